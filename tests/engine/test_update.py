"""From gradient to update: clip as torch does, update once and in order, with what belongs together."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from anybatch import Options, Step, Total
from anybatch.core.errors import NonFiniteLossError, OutOfMemoryError
from anybatch.engine import TornUpdateError, owned, step_optimizers


def make_parameters() -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (4,), ())]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


class Partial(SGD):
    """Runs out of memory once, when its new state is made and nothing is updated. Torn ones: tests/faults."""

    updates, has_failed = 0, False

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = torch.tensor(1.0)
            if not self.has_failed:
                self.has_failed = True
                raise torch.OutOfMemoryError("CUDA out of memory.")
            self.updates += 1
            for parameter in group["params"]:
                parameter.detach().sub_(parameter.grad)


def partial(**group: Any) -> Partial:
    return Partial([{"params": [one], **group} for one in make_parameters()], lr=1.0)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Partial, "__module__", "torch.optim.sgd")


@pytest.mark.usefixtures("known")
def test_memory_that_runs_out_before_the_first_write_changes_nothing() -> None:
    optimizer = partial()
    StepLR(optimizer, 2)  # is no stranger, though it puts a step of its own in the place of the class's
    with pytest.raises(OutOfMemoryError, match=r"by Partial .* No update was made\."):
        step_optimizers({}, [optimizer])
    assert not optimizer.state  # the new state is dropped
    step_optimizers({}, [optimizer])  # the caller's second try
    assert optimizer.updates == 3
    parameters = owned([optimizer])
    assert all(torch.equal(p.detach(), -p.grad) for p in parameters if p.grad is not None)


@pytest.mark.parametrize("when", ["own", "pre", "post", "every pre", "every post", "instance", "fused"])
def test_nobody_knows_what_somebody_else_has_written(when: str, request: pytest.FixtureRequest) -> None:
    if when != "own":
        request.getfixturevalue("known")
    optimizer = partial(**({"fused": True} if when == "fused" else {}))
    calls: list[object] = []
    register: dict[str, Any] = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "every pre": register_optimizer_step_pre_hook,
        "every post": register_optimizer_step_post_hook,
    }
    hook = register[when](lambda *_: calls.append(when)) if when in register else None
    if when == "instance":
        own = optimizer.step
        optimizer.step = lambda closure=None: calls.append(when) or own(closure)  # type: ignore[func-returns-value, method-assign]
    with pytest.raises(TornUpdateError, match="It is unknown what has been updated"):
        step_optimizers({}, [optimizer])
    if hook is not None:
        hook.remove()
    assert calls == [when] * (when in ("pre", "every pre", "instance"))


def test_gradients_that_were_added_to_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    add, parameter = torch._foreach_add_, nn.Parameter(torch.ones(2))  # type: ignore[attr-defined]

    def lacking(values: list[Tensor], *args: Any, **kwargs: Any) -> None:
        if values[0] is parameter:  # after the momentum was added to the gradient
            raise torch.OutOfMemoryError("CUDA out of memory.")
        add(values, *args, **kwargs)

    monkeypatch.setattr(torch, "_foreach_add_", lacking)
    optimizer = SGD([parameter], lr=0.5, momentum=0.9, nesterov=True, foreach=True)
    with pytest.raises(TornUpdateError):
        step_optimizers({parameter: torch.ones(2)}, [optimizer])
    assert torch.equal(parameter.detach(), torch.ones(2))


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
def test_inside_of_a_callers_autocast_no_step_goes_on_with_old_weights(
    precision: str, enabled: bool, windowed: bool
) -> None:
    """Torch casts a weight once, and knows no better before the outermost autocast is over."""

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=enabled)

    def losses(around: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        step = Step(model, nn.MSELoss(), SGD(model.parameters(), lr=0.01), precision=precision)
        rows, found = (torch.ones(8, 4), torch.ones(8, 1)), list[float]()
        for _ in range(4):
            with around(), step.window() if windowed else nullcontext(step) as door:
                found.append((door.add(rows) or door.close() if windowed else door(rows)).loss)
        return found

    with autocast():
        inside = losses(nullcontext)
    assert inside == losses(autocast)
    assert len(set(inside)) == 4


@pytest.mark.parametrize("sparse", [False, True])
def test_entries_are_clamped_where_all_of_the_gradient_is_there(sparse: bool) -> None:
    """Mutation: rows of a sparse gradient, or gradients found before, are clamped apart."""
    model = nn.Embedding(3, 2, sparse=sparse)
    before = model.weight.detach().clone()
    model(torch.tensor([0, 1])).sum().backward()  # found: 1 in the rows 0 and 1
    loss = lambda model, micro: Total(model(micro[0]).sum(), len(micro[0]) / 2)  # noqa: E731
    step = Step(model, loss, SGD(model.parameters(), lr=1.0), options=Options(clip_value=1.25))
    report = step((torch.tensor([0, 2, 2, 2]),))  # adds 1/2 in row 0 and three times 1/2 in row 2
    assert torch.allclose(before - model.weight, torch.tensor([[1.25], [1.0], [1.25]]).expand(3, 2))
    assert report.grad_norm == pytest.approx(math.sqrt(2 * (1.5**2 + 1 + 1.5**2)))


@pytest.mark.parametrize("clip_norm", [math.inf, 1.0])
def test_a_norm_that_overflows_is_refused_only_where_it_is_to_be_clipped(clip_norm: float) -> None:
    model, words = nn.Linear(2, 1), "whose norm can be clipped"
    loss = lambda model, micro: Total(1e25 * model(micro[0]).sum(), len(micro[0]))  # noqa: E731
    step = Step(model, loss, SGD(model.parameters(), lr=1e-30), clip_norm=clip_norm)
    with nullcontext() if math.isinf(clip_norm) else pytest.raises(NonFiniteLossError, match=words):
        report = step((torch.ones(4, 2),))
        assert (report.updated, report.grad_norm) == (True, math.inf)
