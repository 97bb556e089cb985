"""Callbacks: who is told what, in which order; logs that other programs can read; the progress bar."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from anybatch.core import EpochReport, RunInfo
from anybatch.core.report import StepReport
from anybatch.train import checkpoint
from anybatch.train.loggers import JsonLog
from tests.train.runs import TRAIN, UPDATES, Diary, make_trainer, raising

COURSE = RunInfo(epochs=2, done_epochs=0, done_updates=0, total_updates=6, rows=14_000)
VALUES: Any = {"validation": {"loss": math.inf, "accuracy": 0.5}, "seconds": 200.0, "learning_rate": 1e-4}
NOWHERE = EpochReport(epoch=12, updates=6, loss=math.nan, samples_per_second=60_000.0, **VALUES)
TERMS: Any = {"terms": {"fit": -math.inf, "size": 2.0}, "weights": {"fit": 0.0, "size": 3.0}}
STEP = StepReport(loss=math.nan, rows=3, micro_batches=2, grad_norm=math.nan, updated=False, **TERMS)


def strict(path: Path, *, whole: bool = False) -> list[dict[str, Any]]:
    """The lines of a log (the `whole` ones), read as strictly as other programs do: NaN is no JSON."""
    lines = [one for one in path.read_text().splitlines(keepends=True) if one.endswith("\n") or not whole]
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def test_callbacks_are_told_in_order_and_reports_name_what_they_count() -> None:
    first, second = Diary(), Diary()
    trainer = make_trainer(callbacks=[first, second])
    reports = trainer.fit(epochs=2)
    assert first.events == ["start", *["update"] * UPDATES, "epoch", *["update"] * UPDATES, "epoch", "stop"]
    assert (second.events, second.told) == (first.events, first.told)
    assert first.told[0] == replace(COURSE, total_updates=2 * UPDATES, rows=TRAIN)
    assert [told for told in first.told if isinstance(told, EpochReport)] == reports
    steps = [told for told in first.told if isinstance(told, StepReport)]
    assert [step.rows for step in steps] == [6, 6, 2] * 2
    for epoch, report in enumerate(reports, 1):
        assert (report.epoch, report.updates) == (epoch, epoch * UPDATES)
        assert list(report.validation) == ["loss", "accuracy"]
        assert math.isclose(report.samples_per_second * report.seconds, TRAIN)
        own = [(step.loss, step.weights["loss"]) for step in steps[(epoch - 1) * UPDATES :][:UPDATES]]
        assert math.isclose(report.loss, sum(a * b for a, b in own) / sum(b for _, b in own))
    assert math.isclose(trainer.seconds, sum(report.seconds for report in reports))
    assert reports[-1].learning_rate == trainer.step.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("event", ["start", "update", "epoch", "stop"])
def test_every_callback_that_was_started_is_stopped_whatever_fails(event: str, tmp_path: Path) -> None:
    first, second, third = Diary(), Diary((event, 1), raising(OSError("disk full"))), Diary()
    with pytest.raises(OSError, match="disk full"):
        make_trainer(tmp_path, callbacks=[first, second, third]).fit(epochs=1)
    stops = [diary.events.count("stop") for diary in (first, second, third)]
    assert stops == ([1, 0, 0] if event == "start" else [1, 1, 1])
    assert event == "start" or strict(tmp_path / "log.jsonl")[-1] == {"event": "stop"}


def test_lines_are_json_with_null_for_what_it_cannot_say(tmp_path: Path) -> None:
    lost, trainer = replace(NOWHERE, dropped=1200, skipped=2), make_trainer()
    log = JsonLog(tmp_path / "log.jsonl")
    log.start(trainer, COURSE)
    for told in ({}, {"redone": 1, "dropped": 3}):
        log.update(replace(STEP, **told))
    log.epoch(trainer, lost)
    start, plain, redone, epoch = strict(tmp_path / "log.jsonl")
    assert start.items() >= {"event": "start", "format": 2, **asdict(COURSE)}.items()
    assert plain == {
        "event": "step", "step": 1, "loss": None, "rows": 3, "micro_batches": 2, "cut": [], "grad_norm": None,
        "terms": {"fit": None, "size": 2.0}, "weights": {"fit": 0.0, "size": 3.0}, "updated": False,
        "learning_rate": None, "seconds": 0.0, "memory": plain["memory"],
    }  # fmt: skip
    assert redone == plain | {"step": 2, "redone": 1, "dropped": 3}  # told only where out of the ordinary
    validation = {"loss": None, "accuracy": 0.5}
    assert epoch == {"event": "epoch"} | asdict(lost) | {"loss": None, "validation": validation}


class Killed(BaseException):
    """A process that ends here: nothing after it is carried out, not even a stop."""


def numbers(path: Path, event: str = "step") -> list[int]:
    return [line[event] for line in strict(path / "log.jsonl") if line["event"] == event]


@pytest.mark.parametrize("save_every", [0, 1, 2])
@pytest.mark.parametrize("event", [("update", 1), ("epoch", 1), ("update", 5), ("epoch", 2)])
def test_after_a_resume_the_log_has_each_update_and_each_epoch_once(
    tmp_path: Path, event: tuple[str, int], save_every: int
) -> None:
    dead = make_trainer(tmp_path, save_every=save_every, callbacks=[Diary(event, raising(Killed()))])
    with pytest.raises(Killed):
        dead.fit(epochs=3)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"event": "step", "st')  # the process died while it wrote
    before = strict(tmp_path / "log.jsonl", whole=True)
    again = make_trainer(tmp_path, save_every=save_every)
    if checkpoint.folders(tmp_path):
        again.resume(tmp_path)
    done = again.epoch
    reports = again.fit(epochs=3)
    assert numbers(tmp_path) == list(range(1, 3 * UPDATES + 1))
    assert numbers(tmp_path, "epoch") == [1, 2, 3]
    lines = strict(tmp_path / "log.jsonl")
    told = [(one["loss"], one["validation"]) for one in lines if one["event"] == "epoch"]
    assert told[done:] == [(one.loss, one.validation) for one in reports]
    kept = [line for line in before if line["event"] == "start" or line.get("epoch", 9) <= done]
    assert [line for line in lines if line in kept][: len(kept)] == kept  # nothing else is lost


def test_a_checkpoint_never_comes_before_the_records_of_its_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, save = list[list[int]](), checkpoint.save
    note = lambda *args, **named: found.append(numbers(tmp_path)) or save(*args, **named)  # noqa: E731
    monkeypatch.setattr(checkpoint, "save", note)
    make_trainer(tmp_path, save_every=2, validation=None).fit(epochs=1)
    assert found == [[1, 2], [1, 2, 3]]


@pytest.mark.parametrize("shown", [True, False])
def test_trainer_shows_a_bar_unless_told_not_to(shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    reports = make_trainer(progress=shown).fit(epochs=2)
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", [str(report) for report in reports if shown])
