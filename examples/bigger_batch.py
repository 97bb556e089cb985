"""A batch of 4,096 rows, 64 at a time: the training loop you know, with one line changed.

Run it with `python examples/bigger_batch.py`. It needs nothing but anybatch.
"""

import copy

import torch
from torch import nn

import anybatch as ab


def main() -> None:
    """Train once with the whole batch and once in 64 micro-batches, and compare the weights."""
    torch.manual_seed(0)
    rows, classes = torch.randn(4096, 32), torch.randint(10, (4096,))
    classes[::7] = -100  # rows without a label, as padding or unlabelled tokens are marked
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10)).double()
    split = copy.deepcopy(plain)
    rows = rows.double()

    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    for _ in range(5):
        criterion(plain(rows), classes).backward()  # all 4,096 rows at once
        optimizer.step()
        optimizer.zero_grad()

    optimizer = torch.optim.AdamW(split.parameters(), lr=1e-3)
    step = ab.Step(split, nn.CrossEntropyLoss(), optimizer, micro_batch=64)
    for _ in range(5):
        report = step((rows, classes))  # 64 rows at a time, one exact update

    difference = max(
        (a - b).abs().max().item() for a, b in zip(plain.parameters(), split.parameters(), strict=True)
    )
    print(
        f"{report.micro_batches} micro-batches, {report.weights['loss']:.0f} valid rows, "
        f"loss {report.loss:.4f}"
    )
    print(f"largest difference of a weight after 5 updates: {difference:.1e}")
    if difference > 1e-9:
        raise SystemExit("the cut changed the result")


if __name__ == "__main__":
    main()
