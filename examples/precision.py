"""Train LeNet-5 on digits in 16 bits, with an overflow and damaged rows.

Run it with `python examples/precision.py`; the digits need `anybatch[digits]`.
"""

import torch
from torch import nn

import anybatch as ab
from anybatch.data import load
from anybatch.recipes import find_recipe


def main() -> None:
    """Train in two precisions, and survive an overflow and damaged rows."""
    digits = load("digits").train
    rows = digits.inputs, digits.targets

    for precision in ("bf16-true", "fp16-mixed"):
        step = make(precision)
        train(step, rows, epochs=1)
        print(f"{precision}: loss {step(first(rows, 512)).loss:.3f} after an epoch")

    # Rows 200 times as bright, and their gradient is too large for float16 at this loss scale.
    bright = rows[0].clone()
    bright[130:140] *= 200
    report = step((bright[:512], rows[1][:512]))
    print(f"overflow: {report.redone} done again of {report.micro_batches}, scale {report.scale:,g}")

    step = make("fp16-mixed", non_finite="drop")
    bright[130:140] = torch.nan
    report = step((bright[:512], rows[1][:512]))
    print(f"damaged rows: {report.dropped} left out, loss {report.loss:.3f} of the others")


def make(precision: str, non_finite: str = "raise") -> ab.Step:
    """LeNet-5 in a step that takes 64 rows at a time."""
    model = find_recipe("lenet5").prepare("digits").model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    return ab.Step(
        model, loss, optimizer, micro_batch=64, precision=precision, options=ab.Options(non_finite=non_finite)
    )


def train(step: ab.Step, rows: tuple[torch.Tensor, torch.Tensor], epochs: int) -> None:
    """Updates of 64 rows, in an order of their own."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for chosen in torch.randperm(len(rows[0]), generator=generator).split(64):
            step((rows[0][chosen], rows[1][chosen]))


def first(rows: tuple[torch.Tensor, torch.Tensor], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ones."""
    return rows[0][:count], rows[1][:count]


if __name__ == "__main__":
    main()
