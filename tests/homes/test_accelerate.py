"""accelerate: `accelerator.backward(batch_loss(batch))` with prepared parts, and ab.Step with them."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.errors import OptimizerError
from anybatch.testing import GradientRecorder, relative_error, tolerance
from tests.homes.tasks import LOSSES, OURS, ROWS, UPDATES, data, net
from tests.parallel.spawned import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("accelerate")

from accelerate.state import PartialState  # noqa: E402

from tests.homes.accelerates import accelerator, batches, parts_of, shards_on_rank, train  # noqa: E402

EXACT = 1e-12


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the variables that accelerate sets."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_that_accelerate_shards_makes_the_update_of_one_process(two: Ranks, accumulate: int) -> None:
    """With 2, accelerate turns FSDP's reduction off in every other call."""
    for errors in two.run(shards_on_rank, accumulate, seconds=120.0):
        assert max(errors) < EXACT


@pytest.mark.parametrize("where", ["forward", "loop"])
def test_bfloat16_of_the_host(where: str) -> None:
    host, plain, batch = accelerator(mixed_precision="bf16"), net(), data("tokens", 1, dtype=torch.float32)
    LOSSES["tokens"](plain, batch).backward()
    expected = [p.grad.clone() for p in plain.parameters()]
    model, errors = host.prepare(plain), []
    ours = ab.BatchLoss(model, OURS["tokens"], micro_batch=7)
    for loss in (lambda batch: LOSSES["tokens"](model, batch), ours):
        plain.zero_grad()
        with host.autocast() if where == "loop" else nullcontext():
            value = loss(batch)
        host.backward(value)
        errors.append(relative_error([p.grad for p in plain.parameters()], expected))
    assert 0 < errors[1] <= tolerance(torch.bfloat16, ROWS)
    assert errors[1] <= 2 * errors[0]


@pytest.mark.parametrize("is_step", [True, False])
def test_float16_of_the_host_keeps_small_gradients(is_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU accelerate refuses float16, so the forward is wrapped as it does on a GPU."""
    host, model = accelerator(), net()
    monkeypatch.setattr(type(host.state), "mixed_precision", "fp16")
    with torch.no_grad():  # without a scale gradients of the first layer underflow in float16
        model.body.layers[2].weight *= 1e-3
    before = copy.deepcopy(model)
    x, y = data("tokens", 1, dtype=torch.float32)
    x = x * 1e-3
    LOSSES["tokens"](before, (x, y)).backward()
    model._original_forward = model.forward
    model.forward = torch.autocast("cpu", torch.float16)(model.forward)
    if is_step:
        recorder = GradientRecorder(model)
        ab.Step(model, OURS["tokens"], recorder, micro_batch=7)((x, y))
        found = recorder.gradients
    else:
        host.scaler = torch.amp.GradScaler("cpu")
        host.backward(ab.BatchLoss(model, OURS["tokens"], micro_batch=7)((x, y)))
        found = {name: p.grad / host.scaler.get_scale() for name, p in model.named_parameters()}
    for name, parameter in before.named_parameters():
        assert relative_error(found[name], parameter.grad) <= tolerance(torch.float16, ROWS)


def test_step_takes_prepared_parts() -> None:
    plain, optimizer, scheduler = parts_of(net().double())
    model, given, prepared = accelerator().prepare(plain, optimizer, scheduler)
    options = ab.Options(scheduler=prepared)
    step = ab.Step(model, OURS["tokens"], given, options=options, micro_batch=7, clip_norm=0.1)
    whole = train("tokens")
    for batch in batches("tokens"):
        step(batch)
    assert (step.optimizers, step.schedulers) == ((optimizer,), (scheduler,))
    assert relative_error([*plain.parameters()], whole.parameters) <= tolerance(torch.float64, 4 * UPDATES)
    assert scheduler.last_epoch == UPDATES


def test_a_scheduler_that_steps_once_per_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    host = accelerator()
    model, optimizer, scheduler = parts_of(nn.Linear(2, 1))
    prepared = host.prepare(model, optimizer, scheduler)
    for state in (PartialState, type(host.state)):
        monkeypatch.setitem(state._shared_state, "num_processes", 2)
    with pytest.raises(OptimizerError, match="steps 2 times"):
        ab.Step(model, nn.MSELoss(), optimizer, options=ab.Options(scheduler=prepared[2]))
