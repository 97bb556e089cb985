"""Callbacks and their state: resumed is unbroken; averages over updates; stops; checkpoints that are kept."""

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
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
from anybatch.core.errors import AnybatchError, CheckpointError, LossError, PlanError, WindowError
from anybatch.train import checkpoint, files
from anybatch.train.trainer import Trainer
from tests.snapshots import changes, same
from tests.train import runs
from tests.train.runs import BATCH, EPOCHS, TRAIN, UPDATES, Diary, make_rows, make_step, make_trainer, stopped


class Lines(IterableDataset[Any]):
    """Rows one by one, in an order that depends on the epoch and on random numbers drawn while reading."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        x, y = make_rows(TRAIN)
        for row in range(self.epoch, TRAIN + self.epoch):
            yield x[row % TRAIN : row % TRAIN + 1] + 0.1 * torch.randn(3), y[row % TRAIN : row % TRAIN + 1]


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


def logged(out: Path) -> list[int]:
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["event"] == "step"]


def whole_state(trainer: Trainer) -> dict[str, Any]:
    states = [dict(one.state_dict()) for one in trainer.callbacks if one.state_dict()]
    return runs.state(trainer) | {"callbacks": states, "stopped": trainer.stopped}


# ---- resume


@pytest.mark.parametrize("feed", FEEDS)
def test_resumed_is_unbroken_wherever_it_was_stopped(feed: str, tmp_path: Path) -> None:
    whole = make(None, feed)
    reports = runs.timeless(whole.fit(epochs=9))
    assert whole.stopped.startswith("validation accuracy has not become better")
    assert 1 < whole.epoch < 9
    told, lives = list[Any](), 0
    while True:
        error = stopped(("update", 2 + lives % 2), LossError("stopped"))
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
    assert logged(tmp_path) == list(range(1, whole.steps + 1))
    assert numbered(tmp_path) == [whole.steps, whole.steps - 1]
    again = make(tmp_path, feed)
    again.resume(tmp_path)
    assert again.fit(epochs=9) == []  # it stays stopped


@pytest.mark.parametrize("damage", [1, 2])
def test_where_the_newest_is_damaged_an_earlier_one_comes_to_the_same_end(
    damage: int, tmp_path: Path
) -> None:
    make(tmp_path).fit(epochs=1)
    paths = [*checkpoint.folders(tmp_path), *checkpoint.folders(tmp_path / "best")]
    for path in paths[:damage]:
        file = path / "rank-0.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    again = make(tmp_path)
    told = rf"{re.escape(str(paths[0]))}: expected what .* Going on from .*{paths[damage].name} instead"
    with pytest.warns(UserWarning, match=told):
        again.resume(tmp_path)
    again.fit(epochs=EPOCHS)
    assert changes(unbroken("a loader, gathered"), whole_state(again)) == []
    assert numbered(tmp_path) == [again.steps, again.steps - 1]
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"step-{again.steps:08}.*: expected what"):
        again.resume(tmp_path)


def test_callbacks_of_trainer_and_step_are_found_by_class_and_order(tmp_path: Path) -> None:
    class Counting(ab.Callback):
        seen = 0

        def gradients(self, gradients: Any) -> None:
            self.seen += 1

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: Any) -> None:
            self.seen = state["seen"]

    def make(*callbacks: ab.Callback, of_step: Any = ()) -> Trainer:
        return make_trainer(tmp_path, step=make_step(callbacks=of_step), callbacks=callbacks)

    make(ab.EMA(0.5), ab.EMA(0.9), of_step=[Counting()]).fit(epochs=1)
    emas, counting = (ab.EMA(0.5), ab.EMA(0.9)), Counting()
    make(*emas, of_step=[counting]).resume(tmp_path)
    assert counting.seen == UPDATES
    assert not torch.equal(emas[0].average["0.bias"], emas[1].average["0.bias"])
    with pytest.warns(UserWarning, match="of the run's callbacks") as told:
        make(ab.EMA(0.5), ab.EarlyStopping()).resume(tmp_path)
    texts = sorted(str(one.message) for one in told)
    assert [text.partition("callbacks, ")[2] for text in texts] == [
        "these are gone: EMA (1), Counting (1)",
        "these begin anew: EarlyStopping (1)",
    ]


def test_an_open_window_is_neither_saved_nor_resumed_over(tmp_path: Path) -> None:
    trainer = make_trainer(None)
    trainer.save(tmp_path / "a")
    window = trainer.step.window()
    window.add(make_rows(3))
    for act in (trainer.save, trainer.resume):
        told = f"without an open window to {act.__name__}, got one with 3 rows"
        with pytest.raises(WindowError, match=told):
            act(tmp_path / "a")
    assert window.close().rows == 3


# ---- averaged weights


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 4, None])
def test_average_is_that_of_a_slow_reference_over_updates_in_any_cut(
    micro_batch: int | None, buffers: bool
) -> None:
    """One of the steps makes no update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    model[1].eval()
    model[1].running_mean.fill_(0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    x, y = make_rows(TRAIN)
    x, y = x.double(), y.clamp(0)
    x[4] = math.nan
    options = ab.Options(non_finite="skip", batch_norm="frozen")
    step = ab.Step(model, nn.CrossEntropyLoss(), optimizer, micro_batch=micro_batch, options=options)
    ema, seen = ab.EMA(0.7, buffers=buffers), list[dict[str, Tensor]]()

    class Look(ab.Callback):
        def update(self, report: ab.StepReport) -> None:
            model[1].running_mean.add_(1)
            if report.updated:
                seen.append(copy.deepcopy(dict(model.state_dict())))

    trainer = Trainer(step, (x, y), batch_size=6, callbacks=[Look(), ema], progress=False)
    trainer.fit(epochs=2)
    assert (ema.updates, trainer.updates, trainer.steps) == (4, 4, 6)
    expected = seen[0]
    for weights in seen[1:]:
        expected = {
            name: 0.7 * value + 0.3 * weights[name] if value.is_floating_point() else weights[name]
            for name, value in expected.items()
        }
    before = copy.deepcopy(dict(model.state_dict()))
    if not buffers:
        expected |= {name: value for name, value in before.items() if "running" in name or "num" in name}
    with ema.weights(step):
        torch.testing.assert_close(dict(model.state_dict()), expected)
    with pytest.raises(KeyError), ema.weights(step):
        raise KeyError
    assert same(dict(model.state_dict()), before)


@pytest.mark.parametrize("precision", ["float32", "bf16-true"])
def test_exported_weights_are_a_plain_state_dict(precision: str, tmp_path: Path) -> None:
    ema = ab.EMA(0.999)
    trainer = make_trainer(None, step=make_step(precision=precision), callbacks=[ema], validation=None)
    trainer.fit(epochs=2)
    full = trainer.step.masters.state_dict(trainer.step.model)
    trainer.save(tmp_path / "run")
    saved = checkpoint.load(tmp_path / "run").model
    files.export(saved, tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert same(found, dict(full))
    assert same(saved, dict(full))
    make_step().model.load_state_dict(found)
    path = next((tmp_path / "run").rglob("rank-0.safetensors"))
    stored = {name: one for name, one in load_file(path).items() if name.startswith("model/")}
    assert same({name.removeprefix("model/"): one for name, one in stored.items()}, dict(full))
    assert ema.average["0.weight"].dtype == torch.float32
    assert not torch.equal(ema.average["0.weight"], full["0.weight"])
    tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    tied[1].weight = tied[0].weight
    files.export(tied.state_dict(), tmp_path / "b.safetensors")
    assert load_file(tmp_path / "b.safetensors").keys() == tied.state_dict().keys()
    odd = {"x": 3}
    for name, values, told in (
        ("a.bin", full, "in .safetensors, got '.bin'"),
        ("a.safetensors", odd, "got 'x'"),
        ("no/a.safetensors", full, "be written"),
    ):
        with pytest.raises(CheckpointError, match=told):
            files.export(values, tmp_path / name)


def test_validation_uses_the_average_if_asked_and_training_does_not() -> None:
    def losses(*callbacks: ab.Callback) -> list[float]:
        return [one.validation["loss"] for one in make_trainer(None, callbacks=callbacks).fit(epochs=2)]

    plain = losses()
    assert losses(ab.EMA(0.0)) == plain == losses(ab.EMA(0.9, validate=False))
    assert losses(ab.EMA(0.9)) != plain


# ---- stops, errors, lines


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


class Broken(Lines):
    def __iter__(self) -> Iterator[Any]:
        for number, row in enumerate(super().__iter__()):
            if number == 2 * BATCH and self.epoch == 1:
                raise OSError("gone")
            yield row


def of_the_step(event: str, at: int) -> dict[str, Any]:
    calls = iter(range(1, at))  # the batch after them runs out of numbers
    return {"step": make_step(callbacks=[SimpleNamespace(**{event: lambda _: next(calls)})])}


def of_the_trainer(event: str, at: int) -> dict[str, Any]:
    return {"callbacks": [stopped((event, at), ZeroDivisionError()), Diary()]}


#: What fails (or stops the training), and the steps that are kept.
BREAKS: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "update of a callback": (lambda: of_the_trainer("update", 2), 2),
    "epoch of a callback": (lambda: of_the_trainer("epoch", 1), UPDATES),
    "the data": (lambda: {"train": Broken()}, UPDATES + 2),
    **{
        f"{event} {at} of the step's": (lambda event=event, at=at: of_the_step(event, at), kept)
        for event, at, kept in (
            ("update", 2, 2), ("update", UPDATES + 2, UPDATES + 2),
            ("gradients", 2, 1), ("gradients", UPDATES + 2, UPDATES + 1),
        )
    },
}  # fmt: skip


@cache
def unbroken(feed: str) -> dict[str, Any]:
    whole = make(None, feed)
    whole.fit(epochs=EPOCHS)
    return whole_state(whole)


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_raised_costs_nothing_and_other_callbacks_are_told(name: str, tmp_path: Path) -> None:
    (options, kept), feed = BREAKS[name], "an iterable" if name == "the data" else "a loader, gathered"
    first = make(tmp_path, feed, save_every=0, **options())
    with pytest.raises((ZeroDivisionError, StopIteration, OSError)):
        first.fit(epochs=EPOCHS)
    if isinstance(told := first.callbacks[-1], Diary):
        assert told.events.count(name.split()[0]) == (2 if kept == 2 else 1)
    again = make(tmp_path, feed)
    again.resume(tmp_path)
    assert again.steps == kept
    again.fit(epochs=EPOCHS)
    assert changes(unbroken(feed), whole_state(again)) == []
    assert logged(tmp_path) == list(range(1, again.steps + 1))


@pytest.mark.parametrize("error", [RuntimeError("broken"), torch.OutOfMemoryError("out of memory")])
def test_a_torn_update_does_not_replace_the_last_checkpoint(error: Exception, tmp_path: Path) -> None:
    """The mutation: save before every error goes on."""
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


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ab.EMA(1.0), r"decay from 0 to below 1, got 1\.0"),
        (lambda: ab.EMA(math.nan), "got nan"),
        (lambda: ab.EarlyStopping(patience=0), "patience.*at least 1, got 0"),
        (lambda: ab.EarlyStopping(least_change=-1), "least_change.*at least 0, got -1"),
    ],
)
def test_bad_settings_are_refused(make: Any, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        make()


def test_early_stopping_needs_a_value(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="trainer with validation rows"):
        make_trainer(None, validation=None, callbacks=[ab.EarlyStopping()]).fit(epochs=1)
    trainer = make_trainer(tmp_path, callbacks=[ab.EarlyStopping("acuracy")])
    with pytest.raises(AnybatchError, match=r"got 'acuracy'\. Choose from \['accuracy', 'loss'\]"):
        trainer.fit(epochs=2)


@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([3, 2, 2, 2, 1], {"patience": 2}, 4),
        ([3, 2.5, 2.1, 1.9, 1.8], {"patience": 1, "least_change": 0.45}, 3),
        ([1, 2, math.nan, 2, 3], {"patience": 2, "larger_is_better": True}, 4),
        ([math.nan, math.nan, 1], {"patience": 2}, 2),
        ([3, 2, 1, 0, -1], {"patience": 1}, None),
    ],
)
def test_early_stopping_waits_for_a_better_value(
    values: list[float], options: dict[str, Any], epochs: int | None
) -> None:
    stopping, asked = ab.EarlyStopping(**options), list[str]()
    for number, value in enumerate(values, 1):
        report: Any = SimpleNamespace(validation={"loss": float(value)})
        stopping.epoch(SimpleNamespace(stop=asked.append), report)  # pyright: ignore
        assert bool(asked) == (epochs is not None and number >= epochs), number
