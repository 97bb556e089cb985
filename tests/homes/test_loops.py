"""Loops of accelerate and of Lightning: gradient, losses and checkpoints of the whole batch, in any cut."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.testing import relative_error, tolerance
from tests.homes.tasks import HOSTS, LOSSES, MOST, OURS, ROWS, UPDATES, data, net, on_rank, was_killed
from tests.parallel.spawned import spawned

pytestmark = pytest.mark.filterwarnings("ignore")  # advice of the hosts
EXACT, WRONG = 1e-12, 1e-3
# Those that are installed; here, because a first import sets environment variables.
MODULES = {name: import_module(module) for name, module in HOSTS.items() if find_spec(name)}
BUDGETS = {"tokens": "1300KB", "weighted": "700KB", "contrastive": "1000KB"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the variables that accelerate sets."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.fixture(params=MODULES)
def host(request: pytest.FixtureRequest) -> Any:
    return MODULES[request.param]


@pytest.mark.parametrize("task", LOSSES)
def test_updates_are_those_of_the_whole_batch(host: Any, task: str) -> None:
    whole, cut, alone = host.train(task), host.train(task, is_cut=True), host.train(task, parts=4)
    assert cut.report.micro_batches == 4
    assert len(cut.gradients) == len(whole.gradients) == len(alone.gradients) == UPDATES
    assert relative_error(cut.gradients[0], whole.gradients[0]) <= EXACT
    assert relative_error(alone.gradients[0], whole.gradients[0]) >= WRONG
    assert relative_error(cut.parameters, whole.parameters) <= tolerance(torch.float64, 4 * UPDATES)
    assert relative_error(torch.tensor(cut.losses), torch.tensor(whole.losses)) <= EXACT
    assert cut.rates == whole.rates


@pytest.mark.parametrize("task", LOSSES)
@pytest.mark.parametrize("way", ["budget", "out of memory"])
def test_memory_is_kept_and_every_update_made(host: Any, task: str, way: str) -> None:
    width = 2048 if way == "budget" else 16  # much more than the host holds beside
    limit: Any = {"memory": BUDGETS[task]} if way == "budget" else {"most": MOST}
    whole = host.train(task, width=width)
    cut = host.train(task, is_cut=True, micro_batch=None, width=width, **limit)
    assert cut.report.micro_batches > 1
    assert len(cut.gradients) == UPDATES
    assert relative_error(cut.gradients[0], whole.gradients[0]) <= EXACT
    assert relative_error(cut.parameters, whole.parameters) <= tolerance(torch.float64, 24 * UPDATES)


@pytest.mark.parametrize("task", LOSSES)
def test_resume_after_a_kill_is_the_unbroken_run(host: Any, task: str, tmp_path: Path) -> None:
    assert was_killed(lambda: host.halves(task, tmp_path / "killed", dies=True))
    unbroken = host.halves(task, tmp_path / "unbroken")
    resumed = host.halves(task, tmp_path / "killed")
    assert len(resumed.gradients) == len(unbroken.gradients)
    assert relative_error(resumed.parameters, unbroken.parameters) == 0
    for path in (tmp_path / "killed").rglob("*"):  # nothing of ours
        assert path.is_dir() or not any(one in path.read_bytes() for one in (b"anybatch.", b"WholeBatch"))


@pytest.mark.skipif("lightning" not in MODULES, reason="Lightning is not installed")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_lightning_under_its_old_name_is_the_same(two: Any, ranks: int) -> None:
    pytest.importorskip("pytorch_lightning")

    def train(package: str) -> Any:
        if ranks == 1:
            return MODULES["lightning"].train("tokens", is_cut=True, package=package)
        return two.run(on_rank, "lightning", "tokens", True, ("package", package), seconds=240.0)[1]

    new, old = train("lightning.pytorch"), train("pytorch_lightning")
    assert old.report.micro_batches == new.report.micro_batches > 1
    assert all(map(torch.equal, old.parameters, new.parameters))
    assert old.losses == new.losses


@pytest.mark.skipif("accelerate" not in MODULES, reason="accelerate is not installed")
def test_step_takes_prepared_parts_of_accelerate() -> None:
    host, whole = MODULES["accelerate"], MODULES["accelerate"].train("tokens")
    plain, optimizer, scheduler = host.parts_of(net().double())
    model, given, prepared = host.accelerator().prepare(plain, optimizer, scheduler)
    options = ab.Options(scheduler=prepared)
    step = ab.Step(model, OURS["tokens"], given, options=options, micro_batch=7, clip_norm=0.1)
    for batch in host.batches("tokens"):
        step(batch)
    assert (step.optimizers, step.schedulers) == ((optimizer,), (scheduler,))
    assert relative_error([*plain.parameters()], whole.parameters) <= tolerance(torch.float64, 4 * UPDATES)
    assert scheduler.last_epoch == UPDATES


@pytest.mark.skipif("accelerate" not in MODULES, reason="accelerate is not installed")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_that_accelerate_shards_makes_the_update_of_one_process(two: Any, accumulate: int) -> None:
    """With 2, accelerate turns FSDP's reduction off in every other call."""
    for errors in two.run(MODULES["accelerate"].shards_on_rank, accumulate, seconds=120.0):
        assert max(errors) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_ranks_are_one_batch_and_reduced_once(name: str) -> None:
    with spawned(2) as ranks:
        for task in LOSSES:
            found = ranks.run(on_rank, name, task, True, seconds=240.0)
            alone = ranks.run(on_rank, name, task, False)
            model = net(most=2 * ROWS).double()
            loss = LOSSES[task](model, [part[: 2 * ROWS] for part in data(task, batches=6)])
            loss.backward()
            expected = [p.grad for p in model.parameters()]
            for one in found:
                assert relative_error([*one.gradients[0].values()], expected) <= EXACT
                assert relative_error(one.losses[0], loss.item()) <= EXACT
                assert all(map(torch.equal, one.parameters, found[0].parameters))
            assert relative_error([*alone[0].gradients[0].values()], expected) >= WRONG
