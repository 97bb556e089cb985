"""Budgets on an accelerator: its allocator's own peak stays within them, and so does a hard limit."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from tests.accelerator.programs import contrast, moved, sgd
from tests.accelerator.simulated import limited, load, uncounted, without_float64
from tests.untold import wrong
from tests.zoo import Made, encoder, own_loss

ROWS, CLASSES, LIMIT = 24, 4, 1e-12


def pooled(*layers: nn.Module, width: int) -> nn.Module:
    """Blocks along a sequence, and a head over its mean."""
    forward = lambda self, x: self.head(self.layers(x).flatten(1, -2).mean(1))  # noqa: E731
    return Made(forward, layers=nn.Sequential(*layers), head=nn.Linear(width, CLASSES))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def attention() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True) for _ in range(3)]
    return pooled(*layers, width=16)


def convolutions() -> nn.Module:
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    layers = first, nn.Tanh(), second, nn.GroupNorm(2, 8), nn.Tanh()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


CROSS_ENTROPY = nn.CrossEntropyLoss()
VECTORS, SEQUENCES, IMAGES = (16,), (20, 16), (3, 12, 12)
CASES: dict[str, tuple[Callable[[], nn.Module], object, tuple[int, ...]]] = {
    "perceptron": (perceptron, CROSS_ENTROPY, VECTORS),
    "convolutions": (convolutions, CROSS_ENTROPY, IMAGES),
    "attention": (attention, CROSS_ENTROPY, SEQUENCES),
    "own loss": (lambda: own_loss(perceptron()), ab.ModelLoss(), VECTORS),
    "whole batch": (lambda: pooled(perceptron(), width=CLASSES), ab.WholeBatch(contrast), SEQUENCES),
}


def drawn(name: str, rows: int) -> tuple[Any, Any]:
    build, _, shape = CASES[name]
    torch.manual_seed(0)
    model = build().double()
    x = torch.randn(rows, *shape).double()
    batch = x, torch.randint(CLASSES, (rows,))
    return model, {"x": x, "labels": batch[1]} if name == "own loss" else batch


def budgets(name: str, shares: tuple[float, ...], is_counted: bool = True) -> list[str]:
    """Return what is wrong with steps within shares of the plain peak."""
    rows, native, loss = ROWS * 8, load().native, CASES[name][1]
    plain, batch = drawn(name, rows)
    there = plain.to("sim")
    step = ab.Step(there, loss, sgd(there), options=ab.Options(check=False))
    on_device = moved(batch)
    for _ in range(2):
        native.reset_peak()
        floor = native.in_use()
        step(on_device)
    given = on_device.values() if isinstance(on_device, dict) else on_device
    held = sum(one.nbytes for one in [*there.parameters(), *given])
    peak = native.peak() - floor + held
    step(on_device)
    expected, wrong = {n: p.detach().cpu() for n, p in there.named_parameters()}, list[str]()
    for share in shares:
        model, _ = drawn(name, rows)
        model = model.to("sim")
        budget = int(share * peak)
        try:
            with nullcontext() if is_counted else uncounted():
                step = ab.Step(model, loss, sgd(model), memory=budget)
                step(on_device)
                with limited(native.in_use() - held + budget):
                    reports = [step(on_device) for _ in range(2)]
        except ab.BudgetError as refused:
            is_true = not refused.smallest or refused.smallest > budget  # 0: below the floor
            wrong += [] if is_true else [f"{share}: refused, {refused.smallest} of {budget}"]
            continue
        off = max((p.detach().cpu() - expected[n]).abs().max().item() for n, p in model.named_parameters())
        wrong += [f"{share}: {off} off"] if off > LIMIT else []
        wrong += [f"{share}: memory ran out"] if any(one.too_large for one in reports) else []
        wrong += [f"{share}: not cut"] if any(not one.micro_batches > 1 for one in reports) else []
        gc.collect()
    return wrong


@pytest.mark.parametrize("name", CASES)
def test_budgets_hold_against_a_hard_limit(sim: Any, name: str) -> None:
    assert sim(budgets, name, (0.6, 0.4, 0.25)) == []


@pytest.mark.parametrize("name", ["convolutions", "attention", "whole batch"])
def test_budgets_hold_on_a_device_that_counts_no_memory(sim: Any, name: str) -> None:
    """The storages that operations return are followed instead."""
    assert sim(budgets, name, (0.6, 0.25), False) == []


def untold() -> list[str]:
    with uncounted(), without_float64():
        return wrong("sim")


def test_all_runs_on_a_device_without_float64_that_does_not_tell_its_size(sim: Any) -> None:
    assert sim(untold) == []


def reserved(memory: int | None, steps: int) -> list[tuple[int, str]]:
    """Of each step of a BERT with its own loss the most bytes reserved, and why it was not compared."""
    native, found = load().native, list[tuple[int, str]]()
    gc.collect()
    floor = native.reserved()
    torch.manual_seed(0)
    model = own_loss(encoder(64, words=200)).to("sim")
    step = ab.Step(model, ab.ModelLoss(), torch.optim.AdamW(model.parameters()), memory=memory)
    batch = moved({"x": torch.randint(200, (48, 48)), "labels": torch.randint(CLASSES, (48,))})
    for _ in range(steps):
        native.most_reserved()
        report = step(batch)
        found.append((native.most_reserved() - floor, report.unchecked))
    return found


def compared(is_capped: bool) -> list[str]:
    """Return what is wrong with steps of which updates 1, 2, 4 and 8 compare the loss of all rows."""
    sim = load()
    budget = int(0.3 * max(reserved(None, 2))[0])
    with pytest.MonkeyPatch.context() as patch:
        if not is_capped:  # a device that cannot be told to refuse
            patch.delattr(sim, "get_per_process_memory_fraction")
        found = enumerate(reserved(budget, 9), 1)
    return [
        f"step {i}: {peak / budget:.2f} of the budget; {unchecked or 'compared'}"
        for i, (peak, unchecked) in found
        if unchecked or peak > 1.03 * budget
    ]


@pytest.mark.parametrize("is_capped", [True, False])
def test_the_loss_of_all_rows_is_compared_within_the_budget(sim: Any, is_capped: bool) -> None:
    assert sim(compared, is_capped) == []
