"""Callbacks and their state: resumed is unbroken; averages over updates; stops; who is told what; logs."""

import copy
import json
import math
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import anybatch as ab
from anybatch.core import CheckpointError, EpochReport, LossError, PlanError, RunInfo, StepReport
from anybatch.train import checkpoint, files
from anybatch.train.interrupt import SIGNALS, deferred
from anybatch.train.loggers import JsonLog
from anybatch.train.trainer import Trainer
from tests.snapshots import changes, same
from tests.train import runs
from tests.train.runs import BATCH, EPOCHS, TRAIN, UPDATES, Diary, make_rows, make_step, make_trainer


class Lines(IterableDataset[Any]):
    """Rows one by one, in an order that depends on the epoch and on random numbers drawn while reading."""

    epoch = 0
    set_epoch = lambda self, epoch: setattr(self, "epoch", epoch)  # noqa: E731

    def __iter__(self) -> Iterator[Any]:
        for x, y in zip(*(column.roll(-self.epoch, 0).split(1) for column in make_rows(TRAIN)), strict=True):
            yield x + 0.1 * torch.randn(3), y


def of_loader() -> Any:
    return DataLoader(TensorDataset(*make_rows(TRAIN)), batch_size=3, shuffle=True)


FEEDS: dict[str, dict[str, Any]] = {
    "a loader of whole batches": {"batch_size": None, "make": of_loader},
    "a loader, gathered": {"batch_size": BATCH, "make": of_loader},
    "an iterable": {"batch_size": BATCH, "make": Lines},
    "rows in memory": {"batch_size": BATCH, "make": lambda: make_rows(TRAIN)},
}


def make(out: Path | None, feed: str = "a loader, gathered", **options: Any) -> Trainer:
    """With averaged weights, early stopping in the third epoch or so, and validation from a loader."""
    asked = dict(FEEDS[feed])
    extra = options.pop("callbacks", [])
    settings = {
        "train": asked.pop("make")(),
        "validation": DataLoader(TensorDataset(*make_rows(runs.VALIDATION, seed=1)), batch_size=2),
        "keep": 2 if out else 0,
        "save_every": 1,
        "callbacks": [ab.EMA(0.6), ab.EarlyStopping("accuracy", patience=1, larger_is_better=True), *extra],
    }
    return make_trainer(out, **settings | asked | options)


def numbered(out: Path) -> list[int]:
    """Return the steps of the checkpoints, the newest first."""
    return [int(path.name[5:13]) for path in checkpoint.folders(out)]


def strict(path: Path, *, whole: bool = False) -> list[dict[str, Any]]:
    """The lines of a log (the `whole` ones), read as strictly as other programs do: NaN is no JSON."""
    lines = [one for one in path.read_text().splitlines(keepends=True) if one.endswith("\n") or not whole]
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def numbers(path: Path, event: str = "step") -> list[int]:
    return [line[event] for line in strict(path / "log.jsonl") if line["event"] == event]


def whole_state(trainer: Trainer) -> dict[str, Any]:
    states = [dict(one.state_dict()) for one in trainer.callbacks if one.state_dict()]
    return runs.state(trainer) | {"callbacks": states, "stopped": trainer.stopped}


@pytest.mark.parametrize("feed", FEEDS)
def test_resumed_is_unbroken_wherever_it_was_stopped(feed: str, tmp_path: Path) -> None:
    whole = make(None, feed)
    reports = runs.timeless(whole.fit(epochs=9))
    assert whole.stopped.startswith("validation accuracy has not become better")
    assert 1 < whole.epoch < 9
    told, lives = list[Any](), 0
    while True:
        error = runs.stopped(("update", 2 + lives % 2), LossError("stopped"))
        again = make(tmp_path, feed, callbacks=[error])
        if lives:
            again.resume(tmp_path)
            assert again.steps == numbered(tmp_path)[-1] + 1 or len(numbered(tmp_path)) < 2
        try:
            told += runs.timeless(again.fit(epochs=9))
            break
        except LossError:
            told += reports[len(told) : again.epoch]
        lives += 1
        torch.manual_seed(lives)  # another process
    assert lives >= 2
    assert changes(whole_state(whole), whole_state(again)) == []
    assert same(told, reports)
    assert numbers(tmp_path) == list(range(1, whole.steps + 1))
    assert numbered(tmp_path) == [whole.steps, whole.steps - 1]
    again = make(tmp_path, feed)
    again.resume(tmp_path)
    assert again.fit(epochs=9) == []  # it stays stopped


def test_callbacks_of_trainer_and_step_are_found_by_class_and_order(tmp_path: Path) -> None:
    def make(*callbacks: ab.Callback, of_step: Any = ()) -> Trainer:
        return make_trainer(tmp_path, step=make_step(callbacks=of_step), callbacks=callbacks)

    make(ab.EMA(0.5), ab.EMA(0.9), of_step=[ab.EMA(0.1)]).fit(epochs=1)
    emas, own = (ab.EMA(0.5), ab.EMA(0.9)), ab.EMA(0.1)
    make(*emas, of_step=[own]).resume(tmp_path)
    assert own.updates == UPDATES
    assert not torch.equal(emas[0].average["0.bias"], emas[1].average["0.bias"])
    with pytest.warns(UserWarning, match=r"gone: EMA \(2\)|anew: EarlyStopping \(1\)"):
        make(ab.EMA(0.5), ab.EarlyStopping()).resume(tmp_path)


@pytest.mark.parametrize("is_windowed", [False, True])
@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("size", [1, 4, None])
def test_average_is_that_of_a_slow_one_over_updates(size: Any, buffers: bool, is_windowed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    model[1].eval()
    x, y = make_rows(TRAIN)
    x[4] = math.nan
    options = ab.Options(non_finite="skip", batch_norm="frozen")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    ema, seen = ab.EMA(0.7, buffers=buffers), list[dict[str, Tensor]]()

    class Look(ab.Callback):
        def update(self, report: ab.StepReport) -> None:
            model[1].running_mean.add_(1)
            if report.updated:
                seen.append(copy.deepcopy(dict(model.state_dict())))

    watching, rows = {"callbacks": [Look(), ema]}, (x.double(), y.clamp(0))
    given: Any = {"micro_batch": size, "options": options, **(watching if is_windowed else {})}
    step = ab.Step(model, nn.CrossEntropyLoss(), optimizer, **given)
    for batch in 2 * [*zip(*(part.split(6) for part in rows), strict=True)] if is_windowed else ():
        with step.window() as window:
            for micro in zip(*(part.split(size or 6) for part in batch), strict=True):
                window.add(micro)
    if not is_windowed:
        Trainer(step, rows, batch_size=6, **watching, progress=False).fit(epochs=2)
    assert ema.updates == len(seen) == 4
    expected, before = seen[0], copy.deepcopy(dict(model.state_dict()))
    for weights in seen[1:]:
        expected = {name: 0.7 * value + 0.3 * weights[name] for name, value in expected.items()}
    expected |= {} if buffers else {name: one for name, one in before.items() if "running" in name}
    with ema.weights(step):
        found = model.state_dict()
        for name in (one for one in expected if "num" not in one):
            torch.testing.assert_close(found[name], expected[name])
    with pytest.raises(KeyError), ema.weights(step):
        raise KeyError
    assert same(dict(model.state_dict()), before)


@pytest.mark.parametrize("precision", ["float32", "bf16-true"])
def test_exported_weights_are_a_plain_state_dict(precision: str, tmp_path: Path) -> None:
    ema = ab.EMA(0.999)
    trainer = make_trainer(None, step=make_step(precision=precision), callbacks=[ema], validation=None)
    trainer.fit(epochs=2)
    full = dict(trainer.step.masters.state_dict(trainer.step.model))
    trainer.save(tmp_path / "run")
    saved = checkpoint.load(tmp_path / "run").model
    files.export(saved, tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert same(found, full)
    assert same(saved, full)
    make_step().model.load_state_dict(found)
    assert ema.average["0.weight"].dtype == torch.float32
    assert not torch.equal(ema.average["0.weight"], full["0.weight"])
    for name, told in (("a.bin", "in .safetensors, got '.bin'"), ("no/a.safetensors", "be written")):
        with pytest.raises(CheckpointError, match=told):
            files.export(full, tmp_path / name)


def test_validation_uses_the_average_if_asked_and_training_does_not() -> None:
    def losses(*callbacks: ab.Callback) -> list[float]:
        return [one.validation["loss"] for one in make_trainer(None, callbacks=callbacks).fit(epochs=2)]

    plain = losses()
    assert losses(ab.EMA(0.0)) == plain == losses(ab.EMA(0.9, validate=False))
    assert losses(ab.EMA(0.9)) != plain


@pytest.mark.parametrize("at", [("update", 2), ("update", UPDATES), ("epoch", 1)])
def test_a_callback_may_stop_the_training_and_it_goes_on_later(at: tuple[str, int], tmp_path: Path) -> None:
    diary = Diary(at, lambda: first.stop("enough [of it]"))
    first = make_trainer(tmp_path, callbacks=[diary])
    reports = first.fit(epochs=EPOCHS)
    assert first.stopped == "enough [of it]"
    assert (diary.events[-2:], diary.events.count(at[0])) == ([at[0], "stop"], at[1])
    assert len(reports) == (at[0] == "epoch")
    assert (tmp_path / "log.jsonl").read_text().endswith('{"event": "stop", "reason": "enough [of it]"}\n')
    again = make_trainer(tmp_path)
    again.resume(tmp_path)
    assert again.steps == first.steps
    again.fit(epochs=EPOCHS)
    assert changes(runs.undisturbed().state, runs.state(again)) == []


def of_the_step(event: str, at: int) -> dict[str, Any]:
    calls = iter(range(1, at))  # the batch after them runs out of numbers
    return {"step": make_step(callbacks=[SimpleNamespace(**{event: lambda _: next(calls)})])}


def of_the_trainer(event: str, at: int) -> dict[str, Any]:
    return {"callbacks": [runs.stopped((event, at), ZeroDivisionError()), Diary()]}


#: What fails, and the steps that are kept.
BREAKS: list[tuple[Callable[[str, int], dict[str, Any]], str, int, int]] = [
    (of_the_trainer, "update", 2, 2), (of_the_trainer, "epoch", 1, UPDATES), (of_the_step, "update", 2, 2),
    (of_the_step, "gradients", 2, 1), (of_the_step, "gradients", UPDATES + 2, UPDATES + 1),
]  # fmt: skip


@cache
def unbroken() -> dict[str, Any]:
    whole = make(None)
    whole.fit(epochs=EPOCHS)
    return whole_state(whole)


@pytest.mark.parametrize(("who", "event", "at", "kept"), BREAKS)
def test_what_is_raised_costs_nothing_and_other_callbacks_are_told(
    who: Callable[[str, int], dict[str, Any]], event: str, at: int, kept: int, tmp_path: Path
) -> None:
    first = make(tmp_path, save_every=0, **who(event, at))
    with pytest.raises((ZeroDivisionError, StopIteration)):
        first.fit(epochs=EPOCHS)
    if isinstance(told := first.callbacks[-1], Diary):
        assert told.events.count(event) == at
    again = make(tmp_path)
    again.resume(tmp_path)
    assert again.steps == kept
    again.fit(epochs=EPOCHS)
    assert changes(unbroken(), whole_state(again)) == []
    assert numbers(tmp_path) == list(range(1, again.steps + 1))


@pytest.mark.parametrize("error", [RuntimeError("broken"), torch.OutOfMemoryError("out of memory")])
def test_a_torn_update_does_not_replace_the_last_checkpoint(error: Exception, tmp_path: Path) -> None:
    trainer = make(tmp_path)
    optimizer: Any = trainer.step.optimizers[0]
    trainer.fit(epochs=1)
    saved, written = checkpoint.folders(tmp_path), optimizer.step

    def fail() -> None:
        written()
        raise error

    optimizer.step = fail
    with pytest.raises((RuntimeError, MemoryError), match=r"broken|cannot be undone"):
        trainer.fit(epochs=2)
    assert checkpoint.folders(tmp_path) == saved


@pytest.mark.parametrize(("make", "told"), [
    (lambda: ab.EMA(1.0), r"decay from 0 to below 1, got 1\.0"),
    (lambda: ab.EarlyStopping(patience=0), "patience.*at least 1, got 0"),
    (lambda: ab.EarlyStopping(least_change=-1), "least_change.*at least 0, got -1"),
])  # fmt: skip
def test_bad_settings_are_refused(make: Any, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        make()


@pytest.mark.parametrize(("values", "options", "epochs"), [
    ([3, 2, 2, 2, 1], {"patience": 2}, 4),
    ([3, 2.5, 2.1, 1.9, 1.8], {"patience": 1, "least_change": 0.45}, 3),
    ([1, 2, math.nan, 2, 3], {"patience": 2, "larger_is_better": True}, 4),
    ([math.nan, math.nan, 1], {"patience": 2}, 2),
    ([3, 2, 1, 0, -1], {"patience": 1}, None),
])  # fmt: skip
def test_early_stopping_waits_for_a_better_value(values: Any, options: Any, epochs: int | None) -> None:
    stopping, asked = ab.EarlyStopping(**options), list[str]()
    for number, value in enumerate(values, 1):
        report: Any = SimpleNamespace(validation={"loss": float(value)})
        stopping.epoch(SimpleNamespace(stop=asked.append), report)  # pyright: ignore
        assert bool(asked) == (epochs is not None and number >= epochs), number


@pytest.mark.parametrize("bad", [1, 2])
def test_where_the_newest_is_damaged_an_earlier_one_comes_to_the_same_end(bad: int, tmp_path: Path) -> None:
    make(tmp_path).fit(epochs=1)
    paths = [*checkpoint.folders(tmp_path), *checkpoint.folders(tmp_path / "best")]
    for path in paths[:bad]:
        file = path / "rank-0.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    again = make(tmp_path)
    told = rf"{re.escape(str(paths[0]))}: expected what .* Going on from .*{paths[bad].name} instead"
    with pytest.warns(UserWarning, match=told):
        again.resume(tmp_path)
    again.fit(epochs=EPOCHS)
    assert changes(unbroken(), whole_state(again)) == []
    assert numbered(tmp_path) == [again.steps, again.steps - 1]
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"step-{again.steps:08}.*: expected what"):
        again.resume(tmp_path)


# ---- who is told what, and logs that other programs can read

COURSE = RunInfo(epochs=2, done_epochs=0, done_updates=0, total_updates=6, rows=14_000)
VALUES: Any = {"validation": {"loss": math.inf, "accuracy": 0.5}, "seconds": 200.0, "learning_rate": 1e-4}
NOWHERE = EpochReport(epoch=12, updates=6, loss=math.nan, samples_per_second=60_000.0, **VALUES)
TERMS: Any = {"terms": {"fit": -math.inf, "size": 2.0}, "weights": {"fit": 0.0, "size": 3.0}}
STEP = StepReport(loss=math.nan, rows=3, micro_batches=2, grad_norm=math.nan, updated=False, **TERMS)


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
    first, second, third = Diary(), Diary((event, 1), runs.raising(OSError("disk full"))), Diary()
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
    rare = {"step": 2, "redone": 1, "dropped": 3, "memory": redone["memory"]}
    assert redone == plain | rare  # told only where out of the ordinary
    validation = {"loss": None, "accuracy": 0.5}
    assert epoch == {"event": "epoch"} | asdict(lost) | {"loss": None, "validation": validation}


def test_checkpoints_are_saved_by_the_clock(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_minutes=1e-9, keep=10).fit(epochs=2)
    assert numbered(tmp_path) == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("save_every", [0, 1, 2])
@pytest.mark.parametrize("event", [("update", 1), ("epoch", 1), ("update", 5), ("epoch", 2)])
def test_after_a_resume_the_log_has_each_update_and_each_epoch_once(
    tmp_path: Path, event: tuple[str, int], save_every: int
) -> None:
    dead = make_trainer(tmp_path, save_every=save_every, callbacks=[runs.stopped(event, runs.Killed())])
    with pytest.raises(runs.Killed):
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


def test_a_checkpoint_never_comes_before_the_records_of_its_updates(tmp_path: Path, monkeypatch: Any) -> None:
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


# ---- Ctrl-C between updates: noted first, obeyed when asked, and nothing left behind


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of a Python program, whatever ran before; back afterwards."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def installed() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("signals", [0, 1, 2])
def test_the_first_ctrl_c_waits_until_it_is_obeyed_and_the_second_breaks_at_once(signals: int) -> None:
    before = installed()
    with deferred() as interruption:
        assert installed() != before
        interruption.obey()
        if signals:
            signal.raise_signal(signal.SIGINT)
            assert interruption.signal == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT) if signals == 2 else interruption.obey()
    assert installed() == before


@pytest.mark.usefixtures("handlers")
def test_own_handlers_come_back_after_the_first_signal_and_after_an_error() -> None:
    heard: list[int] = []
    own = lambda number, frame: heard.append(number)  # noqa: E731
    for number in SIGNALS:
        signal.signal(number, own)
    with deferred() as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert installed() == [own, own]
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit, match=str(128 + 15)):  # the code a shell gives for it
            interruption.obey()
    with suppress(ZeroDivisionError), deferred():
        raise ZeroDivisionError
    assert installed() == [own, own]
    assert heard == [signal.SIGINT]
