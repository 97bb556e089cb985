"""Reentrant checkpoints of the caller's own, and a micro-batch that has to come again."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch import Step
from anybatch.core.errors import OutOfMemoryError
from anybatch.core.finite import NonFinite
from anybatch.engine.gradients import Gradients
from anybatch.engine.plan import Plan
from anybatch.testing import relative_error

REPLAYS = 12  # four micro-batches through three layers


class Frozen(nn.Module):
    """Trained layers that are only reached through checkpoints, as adapters over frozen weights are.

    Args:
        is_tied: all layers are one.
    """

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 8).requires_grad_(False)
        self.layers = nn.ModuleList([nn.Linear(8, 8)] * 3 if is_tied else [nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 4)
        self.replays, self.fails_at = 0, -1

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # in backward
            self.replays += 1
            if self.replays - 1 == self.fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.tanh(layer(x))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids).mean(1).requires_grad_()
        for layer in self.layers:
            hidden = checkpoint(self.run, layer, hidden, use_reentrant=True)
        return self.head(hidden)


def make(*, is_tied: bool = False, **options: Any) -> Step:
    model = Frozen(is_tied=is_tied)
    trained = [p for p in model.parameters() if p.requires_grad]
    return Step(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(trained, lr=1.0), **{"micro_batch": 4} | options
    )


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(20, (16, 5), generator=generator), torch.randint(4, (16,), generator=generator)


def weights(step: Step) -> Tensor:
    return torch.cat([p.detach().flatten() for p in step.model.parameters()])


@pytest.mark.parametrize("options", [{}, {"compensated": True}, {"non_finite": "skip"}], ids=str)
@pytest.mark.parametrize("is_tied", [False, True], ids=["three", "tied"])
@pytest.mark.parametrize("at", range(REPLAYS))
def test_memory_that_runs_out_in_a_replay_loses_nothing(
    at: int, is_tied: bool, options: dict[str, Any]
) -> None:
    step, twin = (make(is_tied=is_tied, **options) for _ in range(2))
    step.model.fails_at = at
    assert step(batch()).redone == 1
    twin(batch())
    assert relative_error(weights(step), weights(twin)) < 1e-6


def test_in_a_window_that_holds_a_part_of_it_it_is_refused() -> None:
    step = make()
    before = weights(step)
    step.model.fails_at = 1
    window = step.window()
    with pytest.raises(OutOfMemoryError):
        window.add(batch())
    window.discard()
    assert torch.equal(before, weights(step))


def overflowing(step: Step) -> Callable[[], None]:
    """The first gradient of the first layer is infinite."""
    first = [math.inf]
    weight = step.model.layers[0].weight
    return weight.register_hook(lambda gradient: gradient * (first.pop() if first else 1.0)).remove


@pytest.mark.parametrize("is_tied", [False, True], ids=["three", "tied"])
def test_where_gradients_are_looked_at_in_parts_an_overflow_loses_nothing(
    is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plan, "bucket", 64.0)  # bytes, less than any layer has
    options: dict[str, Any] = {"precision": "fp16-mixed", "is_tied": is_tied}
    step, twin = make(**options), make(**options)
    overflowing(step)
    assert step(batch()).redone == 1
    twin.scale.give_way()
    assert twin(batch()).redone == 0
    assert relative_error(weights(step), weights(twin)) < 1e-6


def test_and_they_are_looked_at_together_only_there() -> None:
    x = nn.Parameter(torch.ones(4))
    plain: Any = x.exp().sum()
    within: Any = checkpoint(torch.exp, x, use_reentrant=True)
    gradients = Gradients([x], dtype=None, compensated=False, banks=[""], bucket=8.0)
    for value, expected in ((plain, False), (within.sum(), True), (x.exp().sum(), True)):
        gradients.begin()
        gradients.add([value], [torch.ones(())])
        assert gradients._is_gathered is expected
    assert torch.allclose(gradients.finish({})[x], 3 * x.exp())


def test_a_checkpoint_in_a_later_term_is_known_before_the_first_one_is_sent() -> None:
    x = nn.Parameter(torch.ones(4))
    gradients = Gradients([x], dtype=None, compensated=False, banks=["one", "two"], bucket=8.0)
    within: Any = checkpoint(torch.exp, x, use_reentrant=True)
    with pytest.raises(NonFinite):
        gradients.add_each({"one": x.sum(), "two": (within * math.inf).sum()})
    assert not gradients.holds_part
