"""accelerate: `accelerator.backward(batch_loss(batch))` with prepared parts, and ab.Step with them."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.errors import OptimizerError
from anybatch.testing import GradientRecorder, relative_error, tolerance
from tests.homes.tasks import LOSSES, MOST, OURS, ROWS, UPDATES, Net, data, dies_at, was_killed
from tests.parallel.spawned import Ranks, spawned

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("accelerate")

from accelerate.state import PartialState  # noqa: E402

from tests.homes.accelerates import (  # noqa: E402
    Loop,
    accelerator,
    batches,
    loop_on_rank,
    shards_on_rank,
)

EXACT, WRONG = 1e-12, 1e-3
TASKS = [*LOSSES]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the variables that accelerate sets."""
    with monkeypatch.context() as patch:
        for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"):
            patch.setenv(name, "no" if "MIXED" in name else "true")
        yield


BUDGETS = {"tokens": "1300KB", "weighted": "900KB", "contrastive": "1000KB"}


@pytest.mark.parametrize("task", TASKS)
def test_updates_are_those_of_the_whole_batch(task: str) -> None:
    whole = Loop(task, accelerator(), is_ours=False).run(batches(task))
    cut = Loop(task, accelerator(), is_ours=True).run(batches(task))
    alone = Loop(task, accelerator(gradient_accumulation_steps=4), is_ours=False).run(
        batches(task, ROWS // 4)
    )
    assert cut.loss.report.micro_batches == 4
    assert len(cut.gradients) == len(alone.gradients) == UPDATES
    assert relative_error(cut.gradients[0], whole.gradients[0]) <= EXACT
    assert relative_error(alone.gradients[0], whole.gradients[0]) >= WRONG
    assert relative_error(cut.parameters, whole.parameters) <= tolerance(torch.float64, 4 * UPDATES)
    assert relative_error(torch.tensor(cut.losses), torch.tensor(whole.losses)) <= EXACT
    assert cut.rates == whole.rates


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("way", ["budget", "out of memory"])
def test_memory_is_kept_and_every_update_made(task: str, way: str) -> None:
    width = 2048 if way == "budget" else 16  # much more than the host holds beside
    limit: Any = {"memory": BUDGETS[task]} if way == "budget" else {"most": MOST}
    whole = Loop(task, accelerator(), is_ours=False, width=width).run(batches(task))
    cut = Loop(task, accelerator(), is_ours=True, micro_batch=None, width=width, **limit).run(batches(task))
    assert cut.loss.report.micro_batches > 1
    assert len(cut.gradients) == UPDATES
    assert relative_error(cut.gradients[0], whole.gradients[0]) <= EXACT
    assert relative_error(cut.parameters, whole.parameters) <= tolerance(torch.float64, 24 * UPDATES)


@pytest.mark.parametrize("task", TASKS)
def test_resume_after_a_kill_is_the_unbroken_run(task: str, tmp_path: Path) -> None:
    unbroken, resumed, killed = (Loop(task, accelerator(), is_ours=True) for _ in range(3))
    rows = batches(task)

    def run() -> None:
        killed.run(rows[:10])
        killed.host.save_state(str(tmp_path))
        dies_at(6, killed.plain)  # in the second update from here
        killed.run(rows[10:])

    assert was_killed(run)
    unbroken.run(rows)
    resumed.host.load_state(str(tmp_path))
    resumed.run(rows[10:])
    assert relative_error(resumed.parameters, unbroken.parameters) == 0
    assert not [path for path in tmp_path.rglob("*") if "anybatch" in path.name or "custom" in path.name]


@pytest.mark.slow
def test_ranks_are_one_batch_and_reduced_once() -> None:
    with spawned(2) as ranks:
        for task in TASKS:
            found = ranks.run(loop_on_rank, task, True, seconds=240.0)
            alone = ranks.run(loop_on_rank, task, False)
            net = Net(most=2 * ROWS).double()
            loss = LOSSES[task](net, [part[: 2 * ROWS] for part in data(task, 6)])
            loss.backward()
            expected = {name: p.grad for name, p in net.named_parameters()}
            for gradient, losses, total in found:
                assert relative_error(gradient, expected) <= EXACT
                assert relative_error(losses[0], loss.item()) <= EXACT
                assert total == found[0][2]
            assert relative_error(alone[0][0], expected) >= WRONG


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
    whole = Loop("tokens", accelerator(), is_ours=False).run(batches("tokens"))
    for batch in batches("tokens"):
        step(batch)
    assert step.optimizers == (optimizer,)
    assert step.schedulers == (scheduler,)
    assert relative_error([*plain.parameters()], whole.parameters) <= tolerance(torch.float64, 4 * UPDATES)
    assert prepared[2].get_last_lr() == whole.scheduler.get_last_lr()


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
    cut = Loop("tokens", accelerator(gradient_accumulation_steps=2), is_ours=True).run(
        batches("tokens", count=2)
    )
    whole = Loop("tokens", accelerator(gradient_accumulation_steps=2), is_ours=False).run(
        batches("tokens", count=2)
    )
    assert len(cut.gradients) == 1
    assert relative_error(cut.gradients[0], whole.gradients[0]) <= EXACT
