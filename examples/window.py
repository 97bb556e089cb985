"""A loop that already receives micro-batches, of any size: one window per update.

Run it with `python examples/window.py`. It needs nothing but anybatch.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab


class TinyLanguageModel(nn.Module):
    """Predicts each next token from the one before it."""

    def __init__(self, words: int = 50, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of shape (rows, length, words)."""
        return self.head(self.embedding(tokens))


def loss(model: nn.Module, tokens: Tensor) -> dict[str, ab.Total]:
    """Next-token cross-entropy over valid tokens, and a small penalty on large scores over rows."""
    scores = model(tokens)[:, :-1]
    targets = tokens[:, 1:]  # the weight is counted after the shift, where the loss counts
    losses = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=0)
    penalty = scores.logsumexp(-1).square().mean(-1)
    return {
        "next token": ab.Total(losses, (targets != 0).sum()),
        "score size": ab.Total(penalty.sum(), len(tokens)),
    }


def micro_batches() -> Iterator[Tensor]:
    """Sentences of different lengths, padded with 0 within their micro-batch only."""
    for rows, length in ((4, 12), (2, 30), (5, 7)):
        tokens = torch.randint(1, 50, (rows, length))
        tokens[0, length // 2 :] = 0
        yield tokens


def main() -> None:
    """Make three updates of three micro-batches each."""
    torch.manual_seed(0)
    model = TinyLanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = ab.Step(model, ab.Terms(loss, coefficients={"score size": 1e-3}), optimizer, clip_norm=1.0)
    for _ in range(3):
        window = step.window()
        for tokens in micro_batches():
            window.add(tokens)
        report = window.close()
        print(f"loss {report.loss:.4f} over {report.weights['next token']:.0f} tokens in {report.rows} rows")


if __name__ == "__main__":
    main()
