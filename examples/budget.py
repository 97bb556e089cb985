"""A batch of 1,024 rows within a memory budget: what a step would take, and what it takes with a budget.

Run it with `python examples/budget.py`.
"""

import torch
from torch import nn

import anybatch as ab
from anybatch.memory.meter import Meter


class Block(nn.Module):
    """A residual layer: what a deep network repeats."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x of shape (rows, width) to the same shape."""
        return x + self.outer(self.inner(x))


def main() -> None:
    """Plan, train within the budget, and measure what it took."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), *[Block(64) for _ in range(6)], nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(1024, 32), torch.randint(10, (1024,))

    whole = ab.plan(model, nn.CrossEntropyLoss(), optimizer, batch)
    budget = whole.peak // 2
    print(f"uncut: {whole.peak:,} bytes at the peak; the budget is half of that")

    step = ab.Step(model, nn.CrossEntropyLoss(), optimizer, memory=budget)
    print(step.foresee(batch))
    for _ in range(3):
        with Meter(model, [optimizer], batch_leaves=batch) as meter:
            report = step(batch)
        print(f"loss {report.loss:.4f}, micro-batches {report.micro_batches}, peak {meter.peak:,} bytes")
        if meter.peak > budget:
            raise SystemExit("over the budget")


if __name__ == "__main__":
    main()
