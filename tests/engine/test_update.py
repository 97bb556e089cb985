"""From gradient to update: clip as torch does, update once and in order, with what belongs together."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, CosineAnnealingLR, SequentialLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from anybatch import Step
from anybatch.core.errors import NonFiniteLossError, OptimizerError, OutOfMemoryError
from anybatch.engine import update as optimize


def make_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 4), (4,), ())]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
def test_clipping_is_that_of_torch(dtype: torch.dtype, max_norm: float) -> None:
    parameters = make_parameters(dtype)
    gradients = {p: p.grad.clone() for p in parameters if p.grad is not None}
    norm = optimize.clip(gradients, max_norm)
    assert norm == clip_grad_norm_(parameters, max_norm).item()
    assert all(torch.equal(gradients[p], p.grad) for p in parameters if p.grad is not None)
    assert norm > 0


def test_no_clipping_looks_at_nothing() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    gradient = torch.tensor([math.inf, math.nan])
    assert math.isnan(optimize.clip({parameter: gradient}, math.inf))
    assert gradient[0] == math.inf


def test_clipping_nothing_has_norm_0() -> None:
    assert optimize.clip({}, 1.0) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_clipped(bad: float) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    with pytest.raises(NonFiniteLossError, match=rf"^Expected a finite gradient, got a norm of {bad}\. "):
        optimize.clip({parameter: torch.tensor([1.0, bad])}, 1.0)


class Note(Optimizer):
    """An optimizer that notes in a diary that, and with which gradients, it steps."""

    def __init__(self, parameters: list[nn.Parameter], diary: list[Any]) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.diary = diary

    def step(self, closure: Any = None) -> None:
        self.diary.append([p.grad.item() for p in optimize.owned([self]) if p.grad is not None])


def test_every_optimizer_steps_once_and_in_order() -> None:
    first, second = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    diary: list[Any] = []
    optimize.update(
        {first: torch.tensor(1.0), second: torch.tensor(2.0)}, [Note([second], diary), Note([first], diary)]
    )
    assert diary == [[2.0], [1.0]]


def test_every_scheduler_steps_once() -> None:
    optimizer = SGD(make_parameters(), lr=1.0)
    schedulers = [StepLR(optimizer, 1, gamma=0.5), StepLR(optimizer, 1, gamma=0.1)]
    optimizer.step()
    optimize.schedule(schedulers)
    assert [scheduler.last_epoch for scheduler in schedulers] == [1, 1]


def test_owned_parameters_are_of_all_groups_in_order() -> None:
    a, b, c = make_parameters()
    b.requires_grad_(False)
    found = optimize.owned([SGD([{"params": [a]}, {"params": [b]}], lr=1.0), Adam([c])])
    assert [id(one) for one in found] == [id(one) for one in (a, b, c)]


@pytest.mark.parametrize("sequence", [list, tuple])
def test_one_or_several_optimizers(sequence: Any) -> None:
    a, b, c = make_parameters()
    one, two = SGD([a, c], lr=1.0), SGD([b], lr=1.0)
    assert optimize.check_optimizers(one, [a, b]) == (one,)  # c is somebody else's, but not alone
    assert optimize.check_optimizers(sequence([one, two]), [a, b]) == (one, two)


def test_several_optimizers_may_not_share() -> None:
    a, b, _ = make_parameters()
    with pytest.raises(OptimizerError, match="got 1 in optimizers 0 and 1"):
        optimize.check_optimizers([SGD([a], lr=1.0), SGD([b, a], lr=1.0)], [a, b])
    same = SGD([a], lr=1.0)
    with pytest.raises(OptimizerError, match="Each update would be made twice"):
        optimize.check_optimizers([same, same], [a, b])


def test_schedulers_of_every_kind() -> None:
    optimizer = SGD(make_parameters(), lr=1.0)
    schedulers = [
        CosineAnnealingLR(optimizer, 10),
        ChainedScheduler([ConstantLR(optimizer), StepLR(optimizer, 2)]),
        SequentialLR(optimizer, [ConstantLR(optimizer), StepLR(optimizer, 2)], [3]),
    ]
    for one in schedulers:
        assert optimize.check_schedulers(one, [optimizer]) == (one,)
    assert optimize.check_schedulers(schedulers, [optimizer]) == tuple(schedulers)
    assert optimize.check_schedulers((), [optimizer]) == ()


@pytest.mark.parametrize("given", [None, "cosine", 3, [math.cos]])
def test_other_things_are_no_schedulers(given: object) -> None:
    with pytest.raises(OptimizerError, match=r"^Expected a scheduler that steps once per update, got "):
        optimize.check_schedulers(given, [SGD(make_parameters(), lr=1.0)])


@pytest.mark.parametrize("foreach", [None, True, False])
def test_common_operations_are_set_for_the_update_only(foreach: bool | None) -> None:
    parameters = make_parameters()
    optimizer = SGD([{"params": parameters[:1], "foreach": True}, {"params": parameters[1:]}], lr=1.0)
    fused = Adam([nn.Parameter(torch.zeros(2))], fused=True)
    seen: list[Any] = []
    for one in (optimizer, fused):
        one.register_step_pre_hook(
            lambda it, *_: seen.append([group["foreach"] for group in it.param_groups])
        )
    optimize.update({}, [optimizer, fused], foreach)
    assert seen == [[True, None] if foreach is None else [foreach] * 2, [None]]
    assert [group["foreach"] for group in optimizer.param_groups] == [True, None]


class Partial(SGD):
    """Runs out of memory after its first groups."""

    def __init__(self, groups: list[dict[str, Any]], done: int, *, writes: bool = False) -> None:
        super().__init__(groups, lr=1.0)
        self.done, self.writes, self.updates = done, writes, 0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if self.updates == self.done:
                self.done = -1
                if self.writes:
                    group["params"][0].data.mul_(1)
                    group["params"][0].detach().mul_(1)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            self.updates += 1
            for parameter in group["params"]:
                self.state[parameter]["step"] = torch.tensor(1.0)
                parameter.detach().sub_(parameter.grad)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Partial, "__module__", "torch.optim.sgd")


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("done", [0, 2])
def test_groups_that_have_not_begun_are_done_at_the_second_try(done: int) -> None:
    parameters = make_parameters()
    optimizer = Partial([{"params": [one]} for one in parameters], done)
    groups = optimizer.param_groups
    if done:
        with pytest.raises(OutOfMemoryError, match="cannot be undone"):  # or was the second only begun?
            optimize.update({}, [optimizer])
    else:
        optimize.update({}, [optimizer])
        assert all(torch.equal(p.detach(), -p.grad) for p in parameters if p.grad is not None)
    assert optimizer.param_groups is groups


@pytest.mark.usefixtures("known")
def test_a_group_that_has_begun_is_not_done_again() -> None:
    optimizer = Partial([{"params": [one]} for one in make_parameters()], 1, writes=True)
    with pytest.raises(OutOfMemoryError, match=r"by Partial .* Some parameters may .* cannot be undone"):
        optimize.update({}, [optimizer])
    assert optimizer.updates == 1


def refuse_twice(optimizer: SGD) -> None:
    with pytest.raises(OutOfMemoryError, match=r"It is unknown .* cannot be undone"):
        optimize.update({}, [optimizer])
    optimize.update({}, [optimizer])  # the caller's second try, and the first to go through


def test_nobody_elses_optimizer_is_tried_again() -> None:
    refuse_twice(Partial([{"params": [one]} for one in make_parameters()], 0))


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("when", ["pre", "post", "every pre", "every post", "instance"])
def test_none_is_tried_again_where_something_else_is_called(when: str) -> None:
    optimizer = Partial([{"params": [one]} for one in make_parameters()], 0)
    calls: list[object] = []
    register: dict[str, Any] = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "every pre": register_optimizer_step_pre_hook,
        "every post": register_optimizer_step_post_hook,
    }
    if when in register:
        hook = register[when](lambda *_: calls.append(when))
    else:
        hook, own = nn.Identity().register_forward_hook(print), optimizer.step
        optimizer.step = lambda closure=None: calls.append(when) or own(closure)  # type: ignore[func-returns-value, method-assign]
    try:
        refuse_twice(optimizer)
    finally:
        hook.remove()
    assert calls == [when] * (1 if "post" in when else 2)


@pytest.mark.usefixtures("known")
def test_no_fused_one_is_tried_again() -> None:
    optimizer = Partial([{"params": [one], "fused": True} for one in make_parameters()], 0)
    refuse_twice(optimizer)


@pytest.mark.usefixtures("known")
def test_a_scheduler_does_not_hinder_the_second_try() -> None:
    optimizer = Partial([{"params": [one]} for one in make_parameters()], 0)
    StepLR(optimizer, 2)
    optimize.update({}, [optimizer])
    assert optimizer.updates == 3


def test_gradients_that_were_added_to_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    add, parameter = torch._foreach_add_, nn.Parameter(torch.ones(2))  # type: ignore[attr-defined]

    def lacking(values: list[Tensor], *args: Any, **kwargs: Any) -> None:
        if values[0] is parameter:  # after the momentum was added to the gradient
            raise torch.OutOfMemoryError("CUDA out of memory.")
        add(values, *args, **kwargs)

    monkeypatch.setattr(torch, "_foreach_add_", lacking)
    optimizer = SGD([parameter], lr=0.5, momentum=0.9, nesterov=True, foreach=True)
    with pytest.raises(OutOfMemoryError, match="cannot be undone"):
        optimize.update({parameter: torch.ones(2)}, [optimizer])
    assert torch.equal(parameter.detach(), torch.ones(2))


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
def test_inside_of_a_callers_autocast_no_step_goes_on_with_old_weights(
    precision: str, enabled: bool, windowed: bool
) -> None:
    """Torch casts a weight once, and knows no better before the outermost autocast is over."""

    def losses(outer: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), precision=precision)
        rows, found = (torch.ones(8, 4), torch.ones(8, 1)), list[float]()
        for _ in range(4):
            with nullcontext() if outer else torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                if not windowed:
                    found.append(step(rows).loss)
                    continue
                with step.window() as window:
                    window.add(rows)
                    found.append(window.close().loss)
        return found

    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        inside = losses(outer=True)
    assert inside == losses(outer=False)
    assert len(set(inside)) == 4
