"""What a step shows, refuses and keeps: attributes, warnings, reports, hooks that update, its own state."""

import io
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from anybatch import AnybatchError, Options, Step, Terms, Total
from anybatch.core import CheckpointError, OptimizerError, PlanError
from anybatch.step.decide import PATIENCE, Limits
from tests.options import flat
from tests.zoo import Limited, Made, Perceptron, dropout

X, Y = torch.randn(4, 3), torch.randn(4, 2)
ATTRIBUTES = "clip_norm precision model callbacks open_window microbatch"
FORMS = {"terms": Terms, "method": lambda own: own.forward, "closure": lambda own: lambda *it: own(*it)}


def make(model: nn.Module | None = None, loss: Any = F.mse_loss, **options: Any) -> Step:
    torch.manual_seed(0)
    model = model or nn.Linear(3, 2)
    return Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.5), **flat(options))


@pytest.mark.parametrize("name", ATTRIBUTES.split())
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


def test_a_step_and_its_report_are_shown_on_a_line() -> None:
    step = make(loss=nn.MSELoss(), micro_batch=3, precision="bf16-mixed", clip_norm=1.0)
    report = step((X, Y))
    shown = "Step(Linear, MSELoss, SGD, 8 trained parameters, micro_batch=3, memory=None, "
    assert repr(step) == f"{shown}precision='bf16-mixed', 1 update made)"
    told = f"StepReport(update 1, loss {report.loss:.6g}, rows 4, micro_batches 2, grad_norm "
    assert repr(report).startswith(f"{told}{report.grad_norm:.4g}, learning_rate 0.5, ")
    assert " 0 trained" in repr(make(nn.LazyLinear(2)))


def test_more_rows_are_tried_after_clean_steps_and_each_failure_doubles_the_patience() -> None:
    limits = Limits()
    limits.learn("rows", 32, largest=32, failed=32)
    assert [limits.size(*one) for one in (("other rows", 32), ("rows", 4))] == [32, 4]
    for patience in (PATIENCE, 2 * PATIENCE):
        for _ in range(patience):
            assert limits.size("rows", 32) == 16  # not the half of 24
            limits.learn("rows", 32, largest=16, failed=0)
        assert limits.size("rows", 32) == 24
        limits.learn("rows", 32, largest=24, failed=24 if patience == PATIENCE else 0)
    assert (limits.size("rows", 32), limits.known["rows"].clean) == (24, 0)  # kept, as it fits
    limits.learn("rows", 32, largest=16, failed=16)  # what used to fit does no longer
    assert limits.size("rows", 32) == 8


def test_an_optimizer_of_other_parameters_is_warned_about_and_does_what_is_said() -> None:
    model, other, idle = nn.Linear(3, 2), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), other, idle], lr=0.5)
    with pytest.warns(UserWarning, match=r"got 2 of neither.*computes no gradient") as told:
        step = Step(model, nn.MSELoss(), optimizer, micro_batch=2)
    assert told[0].filename == __file__
    other.grad = torch.ones(2)
    step((X, Y))
    assert (other.tolist(), other.grad, idle.tolist(), idle.grad) == ([0.5, 0.5], None, [1, 1], None)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_parameter_of_the_loss_is_trained(form: Any) -> None:
    own = Made(
        lambda self, model, micro: Total((model(micro[0]) * self.scale - micro[1]).square().sum(), Y.numel()),
        scale=nn.Parameter(torch.tensor(2.0)),
    )
    model = nn.Linear(3, 2)
    step = Step(model, form(own), torch.optim.SGD([*model.parameters(), own.scale], lr=0.5), micro_batch=4)
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


# ---- programs of any kind


def optimizer_in_backward(model: nn.Module) -> None:
    apply: Any = pytest.importorskip("torch.distributed.optim")._apply_optimizer_in_backward
    apply(torch.optim.SGD, model.parameters(), {"lr": 0.1})


def hook_that_updates(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())  # pyright: ignore


def squares(model: nn.Module, micro: Any) -> Total:
    return Total(F.mse_loss(model(micro[0]), micro[1], reduction="sum"), len(micro[0]))


@pytest.mark.parametrize("loss", [squares, nn.MSELoss()])
@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("add_hooks", [optimizer_in_backward, hook_that_updates])
def test_hooks_that_update_are_refused(add_hooks: Any, micro_batch: int | None, loss: object) -> None:
    model = Perceptron(3, 2)
    step = make(model, loss, micro_batch=micro_batch)
    step((X, Y))
    add_hooks(model)
    weights = [one.detach().clone() for one in model.parameters()]
    for use in (lambda: step((X, Y)), step.window):
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

    model = Perceptron(3, 2)
    model.register_forward_hook(hook)
    with pytest.raises(ValueError, match="no single row") as caught:
        make(model, squares, micro_batch=3, check=False)((torch.randn(7, 3), torch.randn(7, 2)))
    place = "This error was raised in micro-batch 2 (rows 6 to 6 of the batch; the cut 3+3+1 leaves one row)."
    assert caught.value.__notes__[-1] == place


# ---- a step's own state

DRAW = torch.Generator().manual_seed(0)
DATA = [(torch.randn(12, 4, generator=DRAW), torch.randn(12, 1, generator=DRAW)) for _ in range(6)]


def made(precision: Any, **options: Any) -> Step:
    """A step in which more than five rows run out of memory."""
    torch.manual_seed(0)
    model = Limited(5, dropout(4, 1, p=0.1))
    optimizer = torch.optim.AdamW(model.parameters())
    return Step(model, nn.MSELoss(), optimizer, precision=precision, **options)


@pytest.mark.filterwarnings("ignore:Expected to find the same loss")
@pytest.mark.parametrize("precision", ["float32", "bf16-true", "fp16-mixed"])
def test_loop_that_was_saved_and_loaded_is_the_unbroken_one(precision: str) -> None:
    whole, file, cuts = made(precision, micro_batch=6), io.BytesIO(), list[tuple[int, ...]]()
    for number, batch in enumerate(DATA):
        if number == 3:
            parts = whole.model.state_dict(), whole.optimizers[0].state_dict(), whole.state_dict()
            torch.save(parts, file)
        cuts.append(whole(batch).cut)
    again = made(precision, micro_batch=6)
    file.seek(0)
    model, optimizer, own = torch.load(file, weights_only=True)
    again.model.load_state_dict(model)
    again.optimizers[0].load_state_dict(optimizer)
    again.load_state_dict(own)
    reports = [again(batch) for batch in DATA[3:]]
    assert [report.cut for report in reports] == cuts[3:]  # what did not fit is known
    assert reports[-1].update == 6
    assert not any(report.redone for report in reports)
    assert again.scale.value == whole.scale.value
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
        full = whole.masters.of(one), again.masters.of(other)
        assert full == (None, None) or torch.equal(*full)  # pyright: ignore


def test_report_as_a_dict_goes_into_a_log() -> None:
    report = made("float32", micro_batch=4)(DATA[0])
    found = report.asdict()
    assert json.loads(json.dumps(found))["cut"] == [4, 4, 4]
    assert found["loss"] == report.loss
    assert found["checked"] is report.checked


def test_another_state_is_refused_before_anything_is_loaded() -> None:
    step = make()
    step((X, Y))
    half = {name: one for name, one in step.state_dict().items() if name != "random"}
    for state in ({}, step.model.state_dict(), half | {"updates": 9}):
        with pytest.raises(CheckpointError, match=r"Expected the result of step.state_dict\(\), got one wi"):
            step.load_state_dict(state)
    assert step.state_dict()["updates"] == 1


@pytest.mark.parametrize("is_hooked", [True, False])
def test_an_optimizer_that_reads_what_forwards_leave_is_refused(is_hooked: bool) -> None:
    """As K-FAC by its hooks, and Opacus by gradients of single rows: they would see the last micro-batch."""

    class Reads(torch.optim.SGD):
        def note(self, module: nn.Module, inputs: Any) -> None:
            self.inputs = inputs

    model = nn.Linear(3, 2)
    optimizer = Reads(model.parameters(), lr=0.1)
    assert Step(model, nn.MSELoss(), optimizer)
    if is_hooked:
        model.register_forward_pre_hook(optimizer.note)
    else:
        Reads.grad_samples = property(lambda self: [])
    with pytest.raises(OptimizerError, match=r"nothing but `\.grad`, got Reads"):
        Step(model, nn.MSELoss(), optimizer)
