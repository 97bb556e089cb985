"""Toy models: smooth, because a kink within rounding of 0 turns a rounding error into a wrong gradient."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Perceptron(nn.Module):
    """A smooth network of two layers, along the last axis of its input.

    Smooth, because a kink (ReLU) within rounding of 0 turns a rounding error into a wrong gradient.

    Args:
        features: size of the input's last axis.
        outputs: size of the output's last axis.
        width: hidden units."""

    def __init__(self, features: int, outputs: int, *, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, ..., features) to (rows, ..., outputs)."""
        return self.layers(x)


class ConvNet(nn.Module):
    """Two convolutions that keep the image's size: one score per class and pixel."""

    def __init__(self, channels: int, classes: int, *, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1), nn.Tanh(), nn.Conv2d(width, classes, 1)
        )

    def forward(self, image: Tensor) -> Tensor:
        """(rows, channels, height, width) to (rows, classes, height, width)."""
        return self.layers(image)


class Transformer(nn.Module):
    """One block of attention and feed-forward over tokens; padding is seen by no other token.

    Input and output embeddings are one parameter (tied), as in most language models.

    Args:
        vocabulary: number of tokens.
        width: size of an embedding.
        pad: the token that fills short rows up."""

    def __init__(self, vocabulary: int, *, width: int = 8, pad: int = 0) -> None:
        super().__init__()
        self.pad = pad
        self.embedding = nn.Embedding(vocabulary, width)
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, length) of int64 to (rows, vocabulary, length), as `cross_entropy` reads it."""
        hidden = self.embedding(tokens)
        query, key, value = self.query_key_value(self.attention_norm(hidden)).chunk(3, dim=-1)
        # Every token sees itself, so that a row of padding alone has something to look at, and no NaN.
        itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
        visible = (tokens != self.pad)[:, None, :] | itself
        hidden = hidden + self.mix(F.scaled_dot_product_attention(query, key, value, attn_mask=visible))
        hidden = hidden + self.feed(self.feed_norm(hidden))
        return F.linear(hidden, self.embedding.weight).transpose(1, 2)
