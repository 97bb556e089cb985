"""The models that race: LeNet-5, a small GPT, ResNet-18, BERT, and an MLP so small that Python dominates."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from benchmarks.nets import BasicBlock, ResNet

VOCABULARY = 512
CONTEXT = 64
WORDS = 1_000  # of BERT; the published 30,522 would hide a step's cost behind the optimizer's


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


def resnet18() -> nn.Module:
    """ResNet-18 with GroupNorm and a quarter of its width, so that a step takes some tens of milliseconds."""
    model = ResNet(block=BasicBlock, blocks=(2, 2, 2, 2), width=16, classes=10)
    return ab.batch_norm_to_group_norm(model, groups=8)


def bert_tiny() -> nn.Module:
    """BERT-tiny, with random weights, dropout, and a loss of its own over the classes of a row.

    Source: I. Turc et al., "Well-read students learn better" (2019), table 1.
    """
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    return BertForSequenceClassification(BertConfig(**sizes, vocab_size=WORDS, num_labels=3))
