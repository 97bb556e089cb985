"""GPT on characters: a decoder of GPT-2's layout that predicts the next character."""

import hashlib

import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.data import read_blocks
from anybatch.recipes.recipe import Recipe, Training, one_of

SIZES = {"tiny": (4, 4, 128), "base": (12, 12, 768)}  # layers, heads, width


class Layer(nn.Module):
    """Causal attention, then two linear layers, each with LayerNorm first and a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (rows, length, width) to the same shape."""
        rows, length, width = tokens.shape
        parts = self.attention(self.norm1(tokens)).view(rows, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # (rows, heads, length, width / heads) each
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.joined(seen.transpose(1, 2).reshape(rows, length, width))
        return tokens + self.narrow(F.gelu(self.wide(self.norm2(tokens))))


class GPT2(nn.Module):
    """Embeddings of characters and positions, layers, and scores of the next character.

    The layout and initial weights of Radford et al. 2019, "Language models are unsupervised multitask
    learners": LayerNorm first, embeddings shared with the scores, weights at the ends of shortcuts divided by
    the root of their number. There is no dropout, so that no cut changes random draws.
    """

    def __init__(self, vocabulary: int, block_size: int, *, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                ends_shortcut = name.endswith(("joined.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if ends_shortcut else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores of the next character: (rows, length) int64 to (rows, vocabulary, length)."""
        tokens = self.characters(text) + self.places.weight[: text.shape[1]]
        for layer in self.layers:
            tokens = layer(tokens)
        return F.linear(self.norm(tokens), self.characters.weight).transpose(1, 2)


def _make(data: str, size: str = "tiny", block_size: int = 64) -> Training:
    layers, heads, width = one_of("size", size, SIZES)
    blocks = read_blocks(data, block_size)
    return Training(
        model=GPT2(len(blocks.vocabulary), block_size, layers=layers, heads=heads, width=width),
        loss=nn.CrossEntropyLoss(),
        train=blocks.train,
        test=blocks.test,
        name=f"{data}, blocks of {block_size} characters",
        vocabulary=hashlib.sha256(blocks.vocabulary.encode()).hexdigest()[:16],
        scores=lambda scores: scores,
    )


GPT = Recipe(name="gpt", make=_make, data="python", optimizer="adamw", lr=1e-3)
