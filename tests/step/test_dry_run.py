"""Backward passes of a step, tried out, with nothing changed."""

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.errors import PlanError
from anybatch.precision.policy import find_precision
from anybatch.step import dry_run
from anybatch.testing import relative_error
from tests.options import flat
from tests.snapshots import same, same_as_before

FLOAT32 = find_precision("float32")


class Seen(ab.Callback):
    """Calls a function with each gradient of each micro-batch."""

    def __init__(self, see: Callable[[Tensor], object]) -> None:
        self.see = see

    def micro_gradients(self, micro: Any, gradients: Mapping[str, Sequence[Tensor]], scale: float) -> None:
        for several in gradients.values():
            for gradient in several:
                self.see(gradient.detach())


def show(step: ab.Step, batch: Any, see: Callable[[Tensor], object], **options: Any) -> None:
    dry_run.show(step, batch, Seen(see), **{"scale": 1.0} | options)


class Busy(nn.Module):
    """Draws from three streams, counts its calls, keeps statistics and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.out, self.calls = nn.Linear(4, 1), list[float]()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(random.random())
        x += 1e-3 * torch.randn(x.shape, generator=self.generator)
        return self.out(self.drop(self.norm(self.linear(x)).tanh()))


def make(model: nn.Module, loss: object = None, **options: Any) -> ab.Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return ab.Step(model, nn.MSELoss() if loss is None else loss, optimizer, **flat(options))


def rows_of(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    both = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return both[:, :3].clone(), both[:, 3:].clone()


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true"])
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_nothing_is_changed(precision: str, micro_batch: int | None) -> None:
    model, batch, seen = Busy(), rows_of(6), list[Tensor]()
    step = make(model, batch_norm="micro", micro_batch=micro_batch, precision=precision)
    step.scale.value = 1.0  # an overflow would be refused, as the model writes to its rows
    step(batch)  # so that the optimizer has a state
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    own = copy.deepcopy([*batch, model.generator.get_state(), vars(step.effects)])
    with same_as_before(step):
        show(step, batch, seen.append, precision=step.precision, scale=4.0)
    with same_as_before(step), pytest.raises(ZeroDivisionError):
        show(step, batch, lambda seen: 1 // 0, precision=FLOAT32)
    assert len(seen) == (3 if micro_batch else 1) * 6
    assert same(own, [*batch, model.generator.get_state(), vars(step.effects)])


@pytest.mark.parametrize("precision", ["float32", "fp16-mixed"])
def test_an_open_window_goes_on(precision: str) -> None:
    batch = rows_of(6)

    def train(*, is_watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        step = make(nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1)), precision=precision)
        window = step.window()
        window.add(tuple(part[:4] for part in batch))
        if is_watched:
            show(step, batch, lambda seen: None, precision=step.precision, scale=8.0)
        window.add(tuple(part[4:] for part in batch))
        window.close()
        return [p.detach().clone() for p in step.model.parameters()]

    assert same(train(is_watched=True), train(is_watched=False))


def cosine(outputs: Tensor, targets: Tensor) -> Tensor:
    return 1 - nn.functional.cosine_similarity(outputs, targets, dim=0).sum()


def two_terms(model: nn.Module, micro: tuple[Tensor, Tensor]) -> dict[str, ab.Total]:
    errors, weights = (model(micro[0]) - micro[1]) ** 2, weights_of(micro)
    above = errors[micro[0][:, :1] > 0]
    return {"all": ab.Total(errors.sum(), weights["all"]), "above": ab.Total(above.sum(), weights["above"])}


def weights_of(micro: tuple[Tensor, Tensor]) -> dict[str, Tensor | int]:
    return {"all": len(micro[0]), "above": (micro[0][:, 0] > 0).sum()}


LOSSES = {
    "torch": nn.MSELoss(),
    "whole batch": ab.WholeBatch(cosine),
    "terms": ab.Terms(two_terms, weight=weights_of),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_what_is_shown_adds_up_to_the_gradient(loss: object) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    batch = rows_of(5, dtype=torch.float64)
    step = make(model, loss, micro_batch=2)
    seen: list[Tensor] = []
    show(step, batch, lambda g: seen.append(g.clone()), precision=FLOAT32, scale=2.0**10)
    parameters = list(model.parameters())
    assert len(seen) == 3 * len(parameters)
    sums = [sum(g for g in seen if g.shape == p.shape) / 2**10 for p in parameters]

    recorded: list[Any] = []
    step.optimizers[0].register_step_pre_hook(lambda *_: recorded.extend(p.grad.clone() for p in parameters))
    step(batch)
    for total, gradient in zip(sums, recorded, strict=True):
        assert relative_error(total, gradient) < 1e-12
    late: list[Tensor] = []  # weights that only a forward knows: term by term
    show(make(model, two_terms, micro_batch=2), batch, late.append, precision=FLOAT32)
    assert len(late) == 2 * 3 * len(parameters)


def test_a_cut_where_rows_meet_and_another_scale_are_refused() -> None:
    step = make(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    show(step, rows_of(4), lambda seen: None, precision=FLOAT32)
    with pytest.raises(PlanError, match="BatchNorm"):
        show(step, rows_of(4), lambda seen: None, precision=FLOAT32, micro_batch=2)
    with pytest.raises(PlanError, match="power of two"):
        show(step, rows_of(4), print, precision=FLOAT32, scale=3.0)
