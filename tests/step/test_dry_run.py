"""Backward passes of a step, tried out, with nothing changed."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.step import dry_run
from tests.options import flat
from tests.snapshots import same, same_as_before
from tests.zoo import Made, Perceptron


def show(step: ab.Step, batch: Any, see: Callable[[Tensor], object]) -> None:
    seen: Any = ab.Callback()
    seen.gradients = lambda gradients: [see(one.detach()) for one in gradients.values()]
    dry_run.show(step, batch, seen)


def busy() -> Any:
    """Draws from three streams, counts its calls, keeps statistics and writes to its input."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls.append(random.random())
        x += 1e-3 * torch.randn(x.shape, generator=self.generator)
        return self.body(x)

    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1))
    return Made(forward, body=body, calls=[], generator=torch.Generator().manual_seed(1))


def make(model: nn.Module, loss: object = None, **options: Any) -> ab.Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return ab.Step(model, nn.MSELoss() if loss is None else loss, optimizer, **flat(options))


def rows_of(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    both = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return both[:, :3].clone(), both[:, 3:].clone()


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true"])
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_nothing_is_changed(precision: str, micro_batch: int | None) -> None:
    model, batch, seen = busy(), rows_of(6), list[Tensor]()
    step = make(model, batch_norm="micro", micro_batch=micro_batch, precision=precision)
    step.scale.value = 1.0  # an overflow would be refused, as the model writes to its rows
    step(batch)  # so that the optimizer has a state
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    own = copy.deepcopy([*batch, model.generator.get_state(), vars(step.effects)])
    with same_as_before(step):
        show(step, batch, seen.append)
    with same_as_before(step), pytest.raises(ZeroDivisionError):
        show(step, batch, lambda seen: 1 // 0)
    assert len(seen) == 6
    assert same(own, [*batch, model.generator.get_state(), vars(step.effects)])


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
def test_the_gradient_of_the_step_is_shown(loss: object) -> None:
    model = Perceptron(3, 1).double()
    batch = rows_of(5, dtype=torch.float64)
    step = make(model, loss, micro_batch=2)
    seen: list[Tensor] = []
    show(step, batch, lambda gradient: seen.append(gradient.clone()))

    parameters, recorded = list(model.parameters()), list[Any]()
    step.optimizers[0].register_step_pre_hook(lambda *_: recorded.extend(p.grad.clone() for p in parameters))
    step(batch)
    assert same(seen, recorded)
