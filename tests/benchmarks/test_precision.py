"""Tests of the benchmarks of precision: what they measure, and that a part can be left out or break."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.core.report import StepReport
from anybatch.data.dataset import Dataset, Split
from benchmarks import precision, precision_cost, precision_lenet5, precision_overflow, precision_sums
from benchmarks.config import Effort, RaceCase
from benchmarks.memory_report import Record
from benchmarks.precision_config import FULL, QUICK, Part

FEW = Effort(least_blocks=2, most_blocks=3, seconds=0.0, warm_up=1, peers_every=1)
SMALL = replace(
    QUICK,
    effort=FEW,
    spare=FEW,
    lessons=replace(QUICK.lessons, epochs=2, rows=8, micro_batch=4, points=100.0, worst=100.0),
    race=RaceCase(name="mlp", task="mlp", rows=2, micro_batches=3, threshold=1e9),
)


def failed(part: Part, records: Sequence[Record]) -> list[str]:
    return [verdict.what for verdict in part.judge(records) if not verdict.holds]


def digits(count: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 1, 32, 32, generator=generator)
    return Dataset(
        inputs=inputs, targets=torch.arange(count) % 10, name="made up", classes=tuple("0123456789")
    )


def without_child(monkeypatch: pytest.MonkeyPatch, broken: Sequence[str] = ()) -> None:
    def measured(module: str, arguments: Sequence[str], *, environment: Mapping[str, str]) -> list[Record]:
        assert environment["OMP_NUM_THREADS"] == "1"
        name = arguments[-1]
        error = [{"model": name, "error": "exit code 9"}] if name in broken else []
        return [*precision.measure(name, SMALL), *error]

    monkeypatch.setattr(precision, "child", measured)


# ---- overflow


def test_one_halving_is_enough_for_what_is_planted() -> None:
    records = list(precision_overflow.measure(FULL))
    assert failed(precision_overflow.PART, records) == []
    computed = {record["way"]: (record["computed"], record["updates"]) for record in records}
    assert list(computed.values()) == [(9, 1), (8, 0), (16, 1)]


@pytest.mark.parametrize(
    ("excess", "what"),
    [(0.5, "overflow: updates of torch's scaler"), (2.5, "overflow: redone besides one")],
)
def test_another_plant_is_noticed(excess: float, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_overflow, "EXCESS", excess)
    assert what in failed(precision_overflow.PART, list(precision_overflow.measure(FULL)))


# ---- sums and master weights


def test_sums_are_as_good_as_their_dtype() -> None:
    records = list(precision_sums.measure_sums(FULL))
    assert failed(precision_sums.SUMS, records) == []
    plain = next(record for record in records if record["what"] == "plain .grad, bfloat16 weights")
    assert plain["off"] > 0.4


def test_small_updates_arrive_with_a_backup_only() -> None:
    records = list(precision_sums.measure_masters(FULL))
    assert failed(precision_sums.MASTERS, records) == []
    without = next(record for record in records if "without" in record["what"])
    assert (without["arrived"], without["off"]) == (0.0, 1.0)


# ---- cost


def test_every_duel_is_fought_in_pairs() -> None:
    duels = {
        name: replace(duel, reference={}, measured={}) if "bf16" in name else duel
        for name, duel in precision_cost.DUELS.items()
    }
    records = list(precision_cost.measure(SMALL, duels))
    assert [record["duel"] for record in records] == list(duels)
    assert {len(seconds) for record in records for seconds in (*record["wall"], *record["cpu"])} == {2}
    assert [record["judged"] for record in records] == [True] * 5 + [False] * 3


def test_a_step_that_does_other_work_takes_part_in_no_duel(monkeypatch: pytest.MonkeyPatch) -> None:
    def skipped(step: ab.Step, batch: Any) -> StepReport:
        return StepReport(
            loss=1.0, terms={}, weights={}, rows=6, micro_batches=3, grad_norm=1.0, updated=True, redone=1
        )

    monkeypatch.setattr(ab.Step, "__call__", skipped)
    with pytest.raises(AssertionError):
        list(precision_cost.measure(SMALL, {"float32 over itself": precision_cost.Duel(measured={})}))


# ---- LeNet-5


@pytest.mark.parametrize("name", ["float32", "bf16-true"])
def test_lessons_are_the_same_from_one_seed(name: str) -> None:
    split = Split(train=digits(12), test=digits(500))
    one, other = (precision_lenet5.train(name, split, SMALL.lessons, seed=1) for _ in range(2))
    assert one["updates"] == 4
    assert len(one["accuracy"]) == 2
    assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_the_share_of_right_answers_is_counted() -> None:
    rows = digits(500)
    model = torch.nn.Linear(1, 1)
    step = ab.Step(model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    vars(step)["model"] = Always(3)
    assert precision_lenet5.tested(step, rows) == 0.1


class Always(torch.nn.Module):
    """The same class for every row."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.full((len(images),), self.chosen), 10).float()


def test_without_data_lenet5_is_left_out(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        (record,) = precision_lenet5.measure(replace(FULL, data=folder))
        assert "Expected" in record["skipped"] or "expected" in record["skipped"]


# ---- all of it


def test_a_run_writes_what_it_could_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_child(monkeypatch)
    arguments = ["--quick", "--folder", str(tmp_path)]
    assert precision.main([*arguments, "--only", "overflow", "lenet5"]) == 0
    (path,) = tmp_path.glob("precision-quick-overflow-lenet5_*.md")
    assert "lenet5: left out. Expected --data" in capsys.readouterr().out
    text = path.read_text()
    assert "## An overflow in micro-batch 3 of 8" in text
    assert "Left out: Expected --data" in text
    path.unlink()
    assert precision.main(["--raw", str(path.with_suffix(".json")), "--folder", str(tmp_path)]) == 0
    assert path.read_text() == text


def test_a_run_that_measured_nothing_has_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_child(monkeypatch)
    assert precision.main(["--only", "lenet5", "--folder", str(tmp_path)]) == 1
    assert "nothing was measured" in capsys.readouterr().out


def test_a_part_that_broke_fails_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_child(monkeypatch, broken=["overflow"])
    assert precision.main(["--only", "overflow", "sums", "--folder", str(tmp_path)]) == 1
    assert "FAILED: overflow: exit code 9" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.md")
    assert "that each add about 0.001" in path.read_text()
    assert "An overflow" not in path.read_text()


def test_parts_run_one_thread_each_in_their_own_process(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    out = tmp_path / "records.jsonl"
    try:
        assert precision.main(["--child", "overflow", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    assert out.read_text().count('"part": "overflow"') == 3
