"""The three models that race: LeNet-5, a small GPT, and an MLP so small that Python dominates."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 512
CONTEXT = 64


class LeNet5(nn.Module):
    """Convolutions 1-6-16 (5x5), then 120-84-10, on 32x32 images, with ReLU and max-pooling.

    Source: Y. LeCun et al., "Gradient-based learning applied to document recognition", Proc. IEEE 86 (1998).
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, images: Tensor) -> Tensor:  # (rows, 1, 32, 32) -> (rows, 10)
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (rows, tokens, width), both
        rows, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Learned positions, pre-norm blocks, and a head tied to the embedding (as in GPT-2), without dropout."""

    def __init__(self, *, layers: int = 4, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (rows, tokens) int64 -> (rows, tokens, vocabulary)
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.embed.weight)


def mlp() -> nn.Module:
    """16-32-4: a micro-batch of 8 rows is a few microseconds of arithmetic."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
