"""Tests of the benchmarks of memory: peaks to the byte, how contestants are counted, files and children."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import memory_predicted
from benchmarks.config import MemoryCase
from benchmarks.contestants import Entry, Update, hand
from benchmarks.memory import memory
from benchmarks.memory_bench import POLICIES, Subject
from benchmarks.memory_contestants import IGNORE, ROWS, UPDATES, Job, Tally, planned, rows_of, surviving
from benchmarks.memory_report import Raw, Record, Study, broken, child, sound
from benchmarks.tasks import Batch
from benchmarks.thresholds import Verdict, growth
from benchmarks.zoo import OPTIMIZERS, ZOO

CASE = MemoryCase(task="mlp", rows=8, few=2, many=8)


def keeping_graphs(entry: Entry) -> Update:
    """The loop that adds up losses with their graphs: every micro-batch stays until the end."""

    def update(batch: Batch) -> float:
        losses: list[Tensor] = []
        for x, y in zip(batch[0].split(entry.rows), batch[1].split(entry.rows), strict=True):
            losses.append(F.cross_entropy(entry.model(x), y, reduction="sum"))
        sum(losses[1:], losses[0]).backward()
        entry.optimizer.step()
        entry.optimizer.zero_grad(set_to_none=True)
        return 0.0

    return update


def copying_the_batch(entry: Entry) -> Update:
    update = hand(entry)
    return lambda batch: update((batch[0].clone(), batch[1].clone()))


def test_growth_is_found_where_it_is() -> None:
    peaks = memory(CASE, {"hand": hand, "graphs": keeping_graphs, "copy": copying_the_batch}, seed=0)
    assert growth(peaks, "hand") <= CASE.tolerance
    assert growth(peaks, "graphs") > 1
    assert growth(peaks, "copy") > 0.25  # the batch is about half of what lives at the peak


def test_what_is_held_and_what_stands_apart() -> None:
    peaks = memory(CASE, {"hand": hand}, seed=0)
    assert peaks.held == 4 * (16 * 32 + 32 + 32 * 4 + 4)  # plain SGD keeps no state
    momentum = memory(MemoryCase(task="lenet5", rows=1, few=1, many=1), {"hand": hand}, seed=0)
    assert momentum.held == 2 * 4 * 61_706  # LeNet-5's parameters, and as many numbers of momentum
    assert peaks.batch == (2 * 8 * (16 * 4 + 8), 8 * 8 * (16 * 4 + 8))  # float32 inputs, int64 labels


# ---- a model under any plan


def subject(name: str, optimizer: str = "sgd") -> Subject:
    entry = ZOO[name]
    found = Subject(entry, entry.build("small"), optimizer)
    found.warm_up()
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_predicted_peak_is_the_measured_one(policy: str, optimizer: str) -> None:
    small = subject("unet", optimizer)
    plan = small.plan(4, 2, small.blocks(policy))
    peak = small.measure(plan)
    assert small.predict(plan).peak == peak.bytes == sum(peak.by_owner.values())


@pytest.mark.slow
def test_records_of_predictions_are_judged_sound() -> None:
    records = list(memory_predicted.measure("unet", "small", "cpu"))
    assert len(records) == len(OPTIMIZERS) * len(POLICIES) * 3
    assert {record["micro_batch"] for record in records} == set(ZOO["unet"].rows)
    assert any("composed" in record for record in records)
    assert [verdict.what for verdict in memory_predicted.judge(records) if not verdict.holds] == []


# ---- contestants under a limit


class Words(nn.Module):
    """Predicts each token from itself; computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(self.embed(input_ids)).flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(scores, labels.flatten(), ignore_index=IGNORE)}


def job() -> Job:
    return Job(build=Words, rows=rows_of(7), num_bytes=2**30, tally=Tally())


def test_ours_make_every_update() -> None:
    for contestant in (planned, surviving):
        work = job()
        contestant(work)
        assert work.tally.made == [ROWS] * UPDATES
        assert work.tally.lost == 0
        assert work.tally.rows >= ROWS * UPDATES  # planning sends some through the model, too
        assert 0 < work.tally.first_s < work.tally.seconds


def test_what_was_made_before_a_restart_is_lost() -> None:
    work = job()
    model, optimizer = work.prepare()
    batch = next(work.batches(ROWS))
    for _ in range(2):
        model(**batch)["loss"].backward()
        optimizer.step()
    assert (work.tally.made, work.tally.lost) == ([ROWS, ROWS], 0)
    model, optimizer = work.prepare()
    assert (work.tally.made, work.tally.lost, work.tally.rows) == ([], 2, 2 * ROWS)
    assert work.tally.model is model


# ---- files and children


def judge(records: Sequence[Record]) -> Iterator[Verdict]:
    yield from broken(records)
    for record in sound(records):
        yield Verdict(what=record["model"], measured=record["value"], limit=1.0)


STUDY = Study(kind="memory-test", title="A test", judge=judge, sections=lambda _: ["", "## Records"])
WHEN = {"config": "quick", "date": "2026-11-21", "hardware": "A processor (R)", "versions": {"torch": "2"}}


@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (1.01, 1), (float("nan"), 1)])
def test_exit_code_is_the_judgement(
    value: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"model": "bert", "value": value}]
    raw = Raw(kind="memory-test", **WHEN, records=records)
    assert STUDY.finish(raw, tmp_path) == code
    name = "memory-test-quick_a-processor-r_2026-11-21"
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.md", f"{name}.json"}
    assert ("FAILED: bert" in capsys.readouterr().out) == bool(code)


def test_a_child_that_ends_early_is_an_error() -> None:
    assert child("this", ["--child", "bert"]) == []  # `import this` ends well but writes nothing
    assert child("benchmarks.no_such_module", ["--child", "bert"]) == [
        {"model": "bert", "error": "exit code 1"}
    ]
