"""A trainer on several ranks makes the run of one process, outlives kills, and ends on all or on none."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import anybatch as ab
from anybatch.parallel import checkpoint
from anybatch.parallel.stored import write_tensors
from anybatch.testing import tolerance
from tests.parallel.pairs import told
from tests.parallel.spawned import Ranks, on_ranks, spawned
from tests.parallel.trainings import BATCH, COUNTS, UPDATES, Stop, as_many, build, data, numbers
from tests.zoo import Made

FLOAT64 = tolerance(torch.float64, 8)
WAY = pytest.mark.parametrize("way", ["replicate", "shard"])


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Four ranks of this file: tests make their group anew, and torch keeps meshes of the old one."""
    with spawned(4) as ranks:
        yield ranks


def assert_alike(found: Any, expected: Any) -> None:
    """But for rounding; a run that was resumed has the last values."""
    assert found["counts"] == expected["counts"]
    values = expected["values"][-len(found["values"]) :] if found["values"] else []
    assert found["values"] == pytest.approx(values, abs=FLOAT64, nan_ok=True)
    assert found["weights"] == pytest.approx(expected["weights"], abs=FLOAT64)


KINDS = [("replicate", kind) for kind in ("rows", "samples", "items", "joined", "few", "whole batch")]
KINDS += [("shard", kind) for kind in ("rows", "samples", "items", "few")]


@pytest.mark.parametrize(("way", "kind"), KINDS)
@on_ranks(4)
def test_any_data_gives_the_run_of_one_process(rank: int, size: int, way: str, kind: str) -> object:
    """With metrics, averaged weights and an early end."""

    def trained(way: str, averages: bool) -> dict[str, Any]:
        metrics = ab.Metrics(accuracy=ab.accuracy, counts=COUNTS)
        stop = ab.EarlyStopping("accuracy", patience=2, larger_is_better=True)
        averaged = [ab.EMA(0.9)] if averages else []
        trainer = build(way, kind, callbacks=[metrics, *averaged, stop])
        return numbers(trainer, trainer.fit(epochs=40 if kind == "rows" else 2))

    found, alone = (trained(one, way != "shard") for one in (way, "local"))
    assert_alike(found, alone)
    assert kind != "rows" or alone["counts"][-1], "no early end"
    return found["bits"]


def save(way: str, folder: Path, epochs: int, **options: Any) -> dict[str, Any]:
    """A run of two epochs, or one that is stopped in the middle of the third."""
    trainer = build(way, out=folder, callbacks=[Stop(at=2 * UPDATES + 3)] * (epochs != 2), **options)
    return numbers(trainer, trainer.fit(epochs=epochs))


def resume(rank: int, size: int, way: str, folder: Path, count: int, stores: Path, **options: Any) -> Any:
    """The run, taken up by so many ranks, one of them without shards: as it was loaded, and at its end."""
    with as_many(rank, size, count, stores) as is_in:
        if not is_in:
            return None
        trainer = build(way if count > 1 else "local", **options)
        trainer.resume(folder)
        return numbers(trainer), numbers(trainer, trainer.fit(epochs=4))


def undisturbed(way: str, **options: Any) -> dict[str, Any]:
    trainer = build(way, **options)
    return numbers(trainer, trainer.fit(epochs=4))


@WAY
@pytest.mark.parametrize("epochs", [2, 3], ids=["at the end of an epoch", "in the middle"])
@on_ranks(4, seconds=180.0)
def test_a_run_goes_on_on_any_number_of_ranks(
    rank: int, size: int, way: str, epochs: int, tmp_path: Any
) -> None:
    folder, alone = tmp_path / "run", undisturbed("local")
    done = save(way, folder, epochs)
    assert {one.name for one in folder.iterdir()} == {"best", "log.jsonl", f"step-{done['counts'][1]:08}"}
    assert [one.name for one in (folder / "best").iterdir()] == ["step-00000010"]
    weights = checkpoint.load(folder).model  # whole tensors, read from all files
    assert torch.cat([one.flatten() for one in weights.values()]).tolist() == done["weights"]
    for count in (3, 2, 1):
        if found := resume(rank, size, way, folder, count, tmp_path):
            loaded, end = found
            assert loaded["bits"] == done["bits"]
            assert loaded["counts"][:3] == done["counts"][:3]
            assert_alike(end, alone)
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [one["step"] for one in lines if one["event"] == "step"] == [*range(1, done["counts"][1] + 1)]


def draws(rank: int, size: int, way: str = "replicate") -> list[float]:
    found: list[float] = []
    build(way, callbacks=[lambda report: found.append(float(torch.rand(())))]).fit(epochs=1)
    return found


def test_ranks_draw_their_own_numbers_and_rank_0_those_of_one_process(four: Ranks) -> None:
    found = four.run(draws)
    assert len({tuple(one) for one in found}) == len(found)
    assert found[0] == draws(0, 1, "local")
    assert len({*found[1]}) == UPDATES


@WAY
@on_ranks(4, seconds=180.0)
def test_with_dropout_a_resumed_run_is_the_same_to_the_bit(
    rank: int, size: int, way: str, tmp_path: Any
) -> Any:
    save(way, tmp_path / "run", 3, layer=nn.Dropout)
    found = resume(rank, size, way, tmp_path / "run", 4, tmp_path, layer=nn.Dropout)[1]
    assert found["bits"] == undisturbed(way, layer=nn.Dropout)["bits"]
    return found["bits"]


@pytest.mark.parametrize(("ranks", "seed"), [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)])
def test_killed_at_any_moment_it_comes_to_the_same_end(ranks: int, seed: int) -> None:
    command = f"-m tests.parallel.mortal_saves --kills 6 --ranks {ranks} --seed {seed}".split()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr


class Batches:
    def __init__(self, count: int, fails: bool = False) -> None:
        self.count, self.fails = count, fails

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from [(torch.ones(6, 4).double(), torch.ones(6).long())] * self.count
        if self.fails:
            raise ValueError("no more")


def odd_options(case: str, odd: bool) -> dict[str, Any]:
    """What rank 1 does otherwise."""
    rows = TensorDataset(*data()["train"])
    loaders: dict[str, Any] = {
        "other rows": lambda: DataLoader(rows, batch_size=BATCH, sampler=DistributedSampler(rows)),
        "fewer batches": lambda: Batches(2 if odd else 3),
        "data": lambda: Batches(3 if odd else 5, odd),
    }
    calls: dict[str, Any] = {
        "stops alone": Stop(3),
        "callback": Stop(3, ValueError("enough")),
        "interrupted": Stop(3, KeyboardInterrupt()),
        "signal": lambda report: signal.raise_signal(signal.SIGTERM),
        "metric": ab.Metrics(wrong=lambda one, two: 1 if odd else ab.accuracy(one, two)),
    }
    if case in loaders:
        return {"train": loaders[case](), "batch_size": None}
    return {"callbacks": [calls[case]]} if case in calls and (odd or case == "metric") else {}


def failed(rank: int, size: int, way: str, case: str, folder: Path) -> dict[str, Any]:
    """A training in which rank 1 fails in its own way, or rank 0 where it writes; what was said."""
    told, patch = {"said": "", "error": ""}, nullcontext()
    trainer = build(way, out=folder, save_every=2, **odd_options(case, rank == 1))
    if (case, rank) == ("write", 0):
        patch = mock.patch(
            "anybatch.parallel.checkpoint.os.replace", side_effect=OSError(28, "No space left")
        )
    if (case, rank) == ("disk", 1):  # a device that has no room; the kernel says so
        write = lambda path, of: (path.symlink_to("/dev/full"), write_tensors(path, of))[1]  # noqa: E731
        patch = mock.patch("anybatch.parallel.stored.write_tensors", write)
    began = time.monotonic()
    try:
        with patch:
            trainer.fit(epochs=2)
    except BaseException as error:
        told |= {"error": type(error).__name__, "said": str(error)}
    assert case == "metric" or time.monotonic() - began < 15
    return told | {"steps": trainer.steps}


# By case: the error of the rank that is odd, what others say of it, the updates made, and the last save.
FAILED: dict[tuple[str, str], tuple[str, str, int, int]] = {
    ("replicate", "other rows"): ("BatchError", "DistributedSampler", 0, 0),
    ("replicate", "fewer batches"): ("RankError", "the end of epoch 1 after 2 batches", 2, 2),
    ("replicate", "stops alone"): ("RankError", "a stop in epoch 1 after 3 batches", 3, 3),
    ("replicate", "interrupted"): ("KeyboardInterrupt", "KeyboardInterrupt on rank 1", 3, 3),
    ("replicate", "data"): ("ValueError", "ValueError on rank 1", 3, 3),
    ("replicate", "metric"): ("LossError", "LossError on rank 1", UPDATES, UPDATES),
    ("replicate", "write"): ("CheckpointError", "CheckpointError on rank 0", 2, 0),
    ("shard", "callback"): ("ValueError", "ValueError on rank 1", 3, 3),
    ("shard", "signal"): ("SystemExit", "SystemExit on rank 1", 1, 1),
    ("shard", "disk"): ("CheckpointError", "rank-1.safetensors: expected a checkpoint that can be", 2, 0),
}


@pytest.mark.parametrize(("way", "case"), FAILED)
def test_an_error_of_one_rank_is_one_of_all(two: Ranks, way: str, case: str, tmp_path: Path) -> None:
    kind, said, steps, last = FAILED[way, case]
    answers = two.run(failed, way, case, tmp_path / "run")
    odd = case != "write"
    assert answers[odd]["error"] == kind
    assert said in answers[not odd]["said"]
    assert [one.name for one in (tmp_path / "run").glob("step-*")] == [f"step-{last:08}"][: bool(last)]
    for number, one in enumerate(answers):
        assert number == odd or one["error"] in ("RankError", kind)
        assert one["steps"] == steps, one


@on_ranks(2)
def test_what_is_refused_by_name(rank: int, size: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    build("shard", out=folder).fit(epochs=1)
    same, other = build("shard", seed=1), build("shard", width=5)
    before = numbers(same)["bits"]
    assert "Leave ab.EMA out" in told(lambda: build("shard", callbacks=[ab.EMA()]).fit(epochs=1))
    assert "without an earlier run" in told(lambda: build("shard", out=folder).fit(epochs=1))
    assert "seed 0 there and 1 here" in told(lambda: same.resume(folder))
    assert "0.weight: float64 (6, 4) there, float64 (5, 4) here" in told(lambda: other.resume(folder))
    assert numbers(same)["bits"] == before


@on_ranks(4)
def test_buffers_that_differ_are_named_on_rank_0(rank: int, size: int) -> None:
    def note(self: Any, x: Tensor) -> Tensor:
        self.total += x.detach().sum() * self.training
        return x

    with nullcontext() if rank else pytest.warns(match="Buffers of Sequential differ between ranks"):
        build("replicate", layer=lambda: Made(note, total=torch.zeros(()))).fit(epochs=2)
