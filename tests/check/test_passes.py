"""A pass: the gradient and loss of a step over some rows, in any cut; errors are told, not raised."""

from typing import Any

import torch
from torch import nn

from anybatch.check.copies import Copied
from anybatch.check.draws import Draws
from anybatch.check.passes import Bench, Passed
from anybatch.check.rows import Cut, Part
from anybatch.core.total import Total
from anybatch.testing import Perceptron, reference_step, relative_error, tolerance

BATCH = torch.linspace(-1, 1, 40).view(8, 5), torch.linspace(0, 3, 16).view(8, 2)


def run(model: nn.Module, loss: object, cut: Cut) -> Passed:
    return Bench(subject=Copied(model, loss, torch.float64), draws=Draws(0)).run(cut)


def cut(micro_batch: int, **more: Any) -> Cut:
    return Cut(**({"given": BATCH, "micro_batch": micro_batch, "part": Part.whole(8)} | more))


def test_pass_is_the_reference_step() -> None:
    model = Perceptron(5, 2)
    wanted = reference_step(model, nn.MSELoss(), BATCH)
    for size in (8, 3):
        passed = run(model, nn.MSELoss(), cut(size))
        assert relative_error(passed.gradients, wanted.gradients) <= tolerance(torch.float64, 8)
        assert relative_error(passed.loss, wanted.loss) <= tolerance(torch.float64, 8)


def test_batch_of_samples_is_collated() -> None:
    samples = list(zip(*BATCH, strict=True))
    collate = lambda rows: tuple(torch.stack(column) for column in zip(*rows, strict=True))  # noqa: E731
    model = Perceptron(5, 2)
    one = run(model, nn.MSELoss(), cut(3))
    other = run(model, nn.MSELoss(), cut(3, given=samples, collate=collate))
    assert relative_error(other.gradients, one.gradients) <= tolerance(torch.float64, 8)


def test_bare_means_and_strangers_are_told() -> None:
    generator = torch.Generator().manual_seed(0)

    def bare(model: nn.Module, micro: Any) -> torch.Tensor:
        return model(micro[0]).mean() * torch.rand((), generator=generator)

    passed = run(Perceptron(5, 2), bare, cut(8))
    assert passed.bare
    assert passed.strangers == 1
    assert not run(Perceptron(5, 2), nn.MSELoss(), cut(8)).bare


def test_errors_and_rows_without_weight_are_told() -> None:
    def weightless(model: nn.Module, micro: Any) -> Total:
        return Total(0 * model(micro[0]).sum(), 0)

    assert isinstance(run(nn.Linear(3, 2), nn.MSELoss(), cut(8)).error, RuntimeError)
    assert not run(Perceptron(5, 2), weightless, cut(8)).weighed


def test_default_dtype_comes_back() -> None:
    seen: list[torch.dtype] = []

    class States(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.zeros(1).dtype)
            return x

    run(nn.Sequential(Perceptron(5, 2), States()), nn.MSELoss(), cut(8))
    assert seen == [torch.float64]
    assert torch.get_default_dtype() == torch.float32
