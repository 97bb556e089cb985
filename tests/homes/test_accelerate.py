"""accelerate: `accelerator.backward(batch_loss(batch))` with prepared parts, and ab.Step with them."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.errors import OptimizerError
from anybatch.testing import GradientRecorder, relative_error, tolerance
from tests.homes.tasks import LOSSES, OURS, ROWS, UPDATES, Net, data
from tests.parallel.spawned import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("accelerate")

from accelerate.state import PartialState  # noqa: E402

from tests.homes.accelerates import accelerator, batches, shards_on_rank, train  # noqa: E402

EXACT = 1e-12


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the variables that accelerate sets."""
    with monkeypatch.context() as patch:
        for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"):
            patch.setenv(name, "no" if "MIXED" in name else "true")
        yield


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_that_accelerate_shards_makes_the_update_of_one_process(two: Ranks, accumulate: int) -> None:
    """With 2, accelerate turns FSDP's reduction off in every other call."""
    for errors in two.run(shards_on_rank, accumulate, seconds=120.0):
        assert max(errors) < EXACT


@pytest.mark.parametrize("where", ["forward", "loop"])
def test_bfloat16_of_the_host(where: str) -> None:
    host = accelerator(mixed_precision="bf16")
    net = Net()
    x, y = data("tokens", 1, dtype=torch.float32)
    LOSSES["tokens"](net, (x, y)).backward()
    expected = [p.grad.clone() for p in net.parameters()]
    model = host.prepare(net)
    errors = []
    for loss in (
        lambda batch: LOSSES["tokens"](model, batch),
        ab.BatchLoss(model, OURS["tokens"], micro_batch=7),
    ):
        net.zero_grad()
        with host.autocast() if where == "loop" else nullcontext():
            value = loss((x, y))
        host.backward(value)
        errors.append(relative_error([p.grad for p in net.parameters()], expected))
    assert 0 < errors[1] <= tolerance(torch.bfloat16, ROWS)
    assert errors[1] <= 2 * errors[0]


@pytest.mark.parametrize("is_step", [True, False])
def test_float16_of_the_host_keeps_small_gradients(is_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU accelerate refuses float16, so the forward is wrapped as it does on a GPU."""
    host = accelerator()
    monkeypatch.setattr(type(host.state), "mixed_precision", "fp16")
    net = Net()
    with torch.no_grad():
        net.layers[2].weight *= 1e-3  # without a scale gradients of the first layer underflow in float16
    before = copy.deepcopy(net)
    x, y = data("tokens", 1, dtype=torch.float32)
    x = x * 1e-3
    LOSSES["tokens"](before, (x, y)).backward()
    expected = {name: p.grad for name, p in before.named_parameters()}
    net._original_forward = net.forward
    net.forward = torch.autocast("cpu", torch.float16)(net.forward)
    if is_step:
        recorder = GradientRecorder(net)
        ab.Step(net, OURS["tokens"], recorder, micro_batch=7)((x, y))
        found = recorder.gradients
    else:
        host.scaler = torch.amp.GradScaler("cpu")
        host.backward(ab.BatchLoss(net, OURS["tokens"], micro_batch=7)((x, y)))
        found = {name: p.grad / host.scaler.get_scale() for name, p in net.named_parameters()}
    for name, gradient in expected.items():
        assert relative_error(found[name], gradient) <= tolerance(torch.float16, ROWS)


def test_step_takes_prepared_parts() -> None:
    host, plain = accelerator(), Net().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    prepared = host.prepare(plain, optimizer, scheduler)
    step = ab.Step(
        prepared[0],
        OURS["tokens"],
        prepared[1],
        options=ab.Options(scheduler=prepared[2]),
        micro_batch=7,
        clip_norm=0.1,
    )
    whole = train("tokens")
    for batch in batches("tokens"):
        step(batch)
    assert step.optimizers == (optimizer,)
    assert step.schedulers == (scheduler,)
    assert relative_error([*plain.parameters()], whole.parameters) <= tolerance(torch.float64, 4 * UPDATES)
    assert prepared[2].scheduler.last_epoch == UPDATES


def test_a_scheduler_that_steps_once_per_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    host, net = accelerator(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = host.prepare(net, optimizer, scheduler)
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    monkeypatch.setitem(type(host.state)._shared_state, "num_processes", 2)
    with pytest.raises(OptimizerError, match="steps 2 times"):
        ab.Step(net, nn.MSELoss(), optimizer, options=ab.Options(scheduler=prepared[2]))


def test_accumulation_of_the_host_divides_once_more() -> None:
    """Several whole batches for an update: their losses are averaged, as accelerate averages."""
    whole, cut = (train("tokens", parts=2, is_cut=is_cut) for is_cut in (False, True))
    assert len(cut.gradients) == UPDATES
    assert relative_error(cut.gradients[0], whole.gradients[0]) <= EXACT
