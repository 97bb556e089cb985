"""Programs of any kind: hooks that update, notes on errors, odd modules."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import anybatch as ab
from anybatch.core import OptimizerError
from tests.options import flat
from tests.zoo import Perceptron

ROWS = torch.randn(7, 4), torch.randint(3, (7,))


def own(model: nn.Module, micro: Any) -> ab.Total:
    return ab.Total(cross_entropy(model(micro[0]), micro[1], reduction="sum"), len(micro[0]))


def step(model: nn.Module, loss: object = own, **options: Any) -> ab.Step:
    return ab.Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), **flat(options))


def optimizer_in_backward(model: nn.Module) -> None:
    apply: Any = pytest.importorskip("torch.distributed.optim")._apply_optimizer_in_backward
    apply(torch.optim.SGD, model.parameters(), {"lr": 0.1})


def hook_that_updates(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())  # pyright: ignore


@pytest.mark.parametrize("loss", [own, nn.CrossEntropyLoss()])
@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("add_hooks", [optimizer_in_backward, hook_that_updates])
def test_hooks_that_update_are_refused(add_hooks: Any, micro_batch: int | None, loss: object) -> None:
    model = Perceptron(4, 3)
    made = step(model, loss, micro_batch=micro_batch)
    made(ROWS)
    add_hooks(model)
    weights = [one.detach().clone() for one in model.parameters()]
    for use in (lambda: made(ROWS), made.window):
        with pytest.raises(OptimizerError, match="without hooks that run after"):
            use()
    assert all(map(torch.equal, weights, model.parameters()))


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_error_names_its_micro_batch(in_backward: bool) -> None:
    def fail(rows: Any) -> None:
        if len(rows) == 1:
            raise ValueError("no single row")

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail) if in_backward else fail(output)

    model = Perceptron(4, 3)
    model.register_forward_hook(hook)
    with pytest.raises(ValueError, match="no single row") as caught:
        step(model, micro_batch=3, check=False)(ROWS)
    place = "This error was raised in micro-batch 2 (rows 6 to 6 of the batch; the cut 3+3+1 leaves one row)."
    assert caught.value.__notes__[-1] == place
