"""Gradient noise: the estimate equals a slow one, is unbiased, and forgets what was undone."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.observe import GradientNoise
from tests.observe.test_flow import runs_out
from tests.options import flat


def rows_of(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    both = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return both[:, :3], both[:, 3:]


def make(noise: GradientNoise, loss: Any = nn.MSELoss(), **options: Any) -> ab.Step:  # noqa: B008
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Step(model, loss, optimizer, callbacks=[noise], **flat(options, check=False))


def slow(model: nn.Module, batch: tuple[Tensor, Tensor], cut: list[int]) -> tuple[float, float]:
    """Noise and signal by the equations of the paper, solved by least squares: gradients part by part."""

    def gradient(start: int, stop: int) -> Tensor:
        loss = nn.functional.mse_loss(model(batch[0][start:stop]), batch[1][start:stop])
        return torch.cat([one.flatten() for one in torch.autograd.grad(loss, [*model.parameters()])])

    rows, stops = sum(cut), [sum(cut[: index + 1]) for index in range(len(cut))]
    means = [gradient(stop - size, stop) for size, stop in zip(cut, stops, strict=True)]
    # E |mean of b rows|^2 = signal + noise / b; each part counts as its share of the rows, squared.
    shares = [(size / rows) ** 2 for size in cut]
    small = sum(share * float(mean.square().sum()) for share, mean in zip(shares, means, strict=True))
    large = float(gradient(0, rows).square().sum())
    left = torch.tensor([[sum(shares), 1 / rows], [1.0, 1 / rows]], dtype=torch.float64)
    signal, noise = torch.linalg.solve(left, torch.tensor([small, large], dtype=torch.float64)).tolist()
    return noise, signal


def total(model: nn.Module, micro: tuple[Tensor, Tensor]) -> ab.Total:
    return ab.Total(((model(micro[0]) - micro[1]) ** 2).sum(), torch.tensor(float(len(micro[0]))))


CUTS = {"equal": [4] * 3, "ragged": [5, 5, 2], "late": [5, 5, 2], "window": [7, 4, 1], "scarce": [3] * 4}


@pytest.mark.parametrize(("how", "cut"), CUTS.items())
def test_estimate_equals_a_slow_one(how: str, cut: list[int]) -> None:
    noise, batch = GradientNoise(every=1), rows_of(12)
    size = 6 if how == "scarce" else cut[0]
    loss = total if how == "late" else nn.MSELoss()
    step = make(noise, loss, micro_batch=None if how == "window" else size)
    expected = slow(step.model, batch, cut)
    if how == "scarce":
        step.model.register_forward_pre_hook(partial(runs_out, 3))
    if how == "window":
        window = step.window()
        for micro in zip(*[part.split(cut) for part in batch], strict=True):
            window.add(micro)
        report = window.close()
    else:
        report = step(batch)
    assert report.cut == tuple(cut)
    (found,) = noise.history
    assert math.isclose(found.noise, expected[0], rel_tol=1e-9)
    assert math.isclose(found.signal, expected[1], rel_tol=1e-9)
    assert (found.rows, noise.scale) == (12, found.noise / found.signal if found.signal > 0 else None)
    assert noise.record() == {name: getattr(found, name) for name in ("scale", "noise", "signal", "rows")}


def test_only_due_updates_hold_micro_batches_apart_and_what_tells_nothing_is_left_out() -> None:
    noise, batch = GradientNoise(every=2), rows_of(6)
    step, told = make(noise, micro_batch=2), list[bool]()
    for _ in range(5):
        step(batch)
        told.append(bool(noise.record()))
    assert told == [True, False, True, False, True]
    uncut = GradientNoise(every=1)
    make(uncut)(batch)
    assert (uncut.history, uncut.scale, uncut.record()) == ([], None, {})
