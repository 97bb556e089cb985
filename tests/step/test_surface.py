"""What a step shows and refuses: read-only attributes, warnings, reports, choices, what goes around it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from anybatch import AnybatchError, Options, Step, Terms, Total
from anybatch.core.errors import PlanError
from tests.options import flat
from tests.zoo import Made

X, Y = torch.randn(4, 3), torch.randn(4, 2)


def make(loss: Any = F.mse_loss, **options: Any) -> Step:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.5), **flat(options))


@pytest.mark.parametrize(
    "name", ["clip_norm", "precision", "model", "callbacks", "open_window", "microbatch"]
)
def test_attributes_of_a_step_and_a_window_are_only_read(name: str) -> None:
    step = make()
    found = vars(step).copy()
    with pytest.raises(AttributeError, match=rf"'{name}'.*new Step\(") as told:
        setattr(step, name, None)
    assert isinstance(told.value, AnybatchError)
    assert vars(step) == found
    with step.window() as window:
        window.add((X, Y))
        with pytest.raises(AttributeError):
            setattr(window, name, 1)


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "4"])
def test_micro_batch_may_be_set_to_what_a_step_takes(wrong: Any) -> None:
    step = make(micro_batch=4)
    step.micro_batch = 2
    for refused in (lambda: setattr(step, "micro_batch", wrong), lambda: make(micro_batch=wrong)):
        with pytest.raises(PlanError, match="micro_batch"):
            refused()
    assert step((X, Y)).micro_batches == 2


def test_an_optimizer_of_other_parameters_is_warned_about_and_does_what_is_said() -> None:
    model, other, idle = nn.Linear(3, 2), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), other, idle], lr=0.5)
    with pytest.warns(UserWarning, match=r"got 2 of neither.*computes no gradient") as told:
        step = Step(model, nn.MSELoss(), optimizer, micro_batch=2)
    assert told[0].filename == __file__
    other.grad = torch.ones(2)
    step((X, Y))
    assert (other.tolist(), other.grad, idle.tolist(), idle.grad) == ([0.5, 0.5], None, [1, 1], None)


FORMS = {"terms": Terms, "method": lambda own: own.forward, "closure": lambda own: lambda *it: own(*it)}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_parameter_of_the_loss_is_trained(form: Any) -> None:
    own = Made(
        lambda self, model, micro: Total((model(micro[0]) * self.scale - micro[1]).square().sum(), Y.numel()),
        scale=nn.Parameter(torch.tensor(2.0)),
    )
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([*model.parameters(), own.scale], lr=0.5)
    step = Step(model, form(own), optimizer, micro_batch=4)
    (expected,) = torch.autograd.grad(F.mse_loss(model(X) * own.scale, Y), own.scale)
    step((X, Y))
    assert own.scale.item() == pytest.approx(2.0 - 0.5 * expected.item())
    assert own.scale.grad is None


def test_a_scheduler_that_the_caller_steps_too_is_warned_about_once() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedulers = [LambdaLR(optimizer, lambda epoch: 1.0), StepLR(optimizer, 1, gamma=0.5)]
    step = Step(model, nn.MSELoss(), optimizer, options=Options(scheduler=schedulers))
    early = [one.state_dict() for one in schedulers]
    for _ in range(3):
        step((X, Y))
    for one, state in zip(schedulers, early, strict=True):
        one.load_state_dict(state)  # a checkpoint; not a step of the caller's
    step((X, Y))
    schedulers[1].step()
    with pytest.warns(UserWarning, match="learning rate moves twice") as told:
        step((X, Y))
    assert told[0].filename == __file__
    schedulers[1].step()
    step((X, Y))  # once is enough
