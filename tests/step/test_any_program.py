"""Programs of any kind: hooks that update, errors after an update, notes on errors, odd modules."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import anybatch as ab
from anybatch.core import OptimizerError
from tests.options import flat

ROWS = torch.randn(7, 4), torch.randint(3, (7,))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def own(model: nn.Module, micro: Any) -> ab.Total:
    return ab.Total(cross_entropy(model(micro[0]), micro[1], reduction="sum"), len(micro[0]))


def step(model: nn.Module, loss: object = own, optimizer: Any = None, **options: Any) -> ab.Step:
    return ab.Step(model, loss, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), **flat(options))


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
def test_hooks_that_update_are_refused(
    add_hooks: Callable[[nn.Module], None], micro_batch: int | None, loss: object
) -> None:
    model = net()
    made = step(model, loss, micro_batch=micro_batch)
    made(ROWS)
    add_hooks(model)
    weights = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(OptimizerError, match="without hooks that run after"):
        made(ROWS)
    with pytest.raises(OptimizerError, match="without hooks that run after"):
        made.window()
    assert all(map(torch.equal, weights, model.parameters()))


class NoSingles(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        if len(input) == 1:
            raise ValueError("more than one row")
        return super().forward(input)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> Tensor:
        ctx.rows = len(values[0])
        return values[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.rows == 1:
            raise ValueError("in backward")
        return gradients[0]


class InBackward(nn.Sequential):
    def forward(self, input: Tensor) -> Any:
        return FailingBackward.apply(super().forward(input))


@pytest.mark.parametrize("kind", [NoSingles, InBackward])
def test_an_error_names_its_micro_batch(kind: type[nn.Sequential]) -> None:
    model = kind(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"one row|in backward") as caught:
        step(model, micro_batch=3, check=False)(ROWS)
    place = "This error was raised in micro-batch 2 (rows 6 to 6 of the batch; the cut 3+3+1 leaves one row)."
    assert caught.value.__notes__[-1] == place


@pytest.mark.parametrize(("index", "rows"), [(0, "rows 0 to 2"), (1, "rows 3 to 5")])
def test_an_error_of_a_callback_names_the_micro_batch_that_was_done(index: int, rows: str) -> None:
    def listen(event: Any) -> None:
        if getattr(event, "index", None) == index:
            raise ValueError("in a callback")

    with pytest.raises(ValueError, match="in a callback") as caught:
        step(net(), micro_batch=3, callbacks=[SimpleNamespace(micro_batch=listen)])(
            (ROWS[0][:6], ROWS[1][:6])
        )
    assert caught.value.__notes__ == [
        f"This error was raised in a callback, after micro-batch {index} ({rows} of the batch)."
    ]


class Odd(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_sys_modules_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: dict[str, Any] = {"odd": None, "odd.number": 3, "odd.object": object(), "odd.module": Odd("odd")}
    for name, entry in entries.items():
        monkeypatch.setitem(sys.modules, name, entry)
    assert step(net(), micro_batch=3)(ROWS).updated
    assert ab.check(net(), own, ROWS).exact
