"""The trainer: the same run to the last bit however often it is stopped; nothing lost, nothing half done."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anybatch import Callback, PerRow, Step
from anybatch.core import Fold
from anybatch.core.errors import AnybatchError, CheckpointError, DataError, PlanError
from anybatch.train import checkpoint
from anybatch.train.trainer import Trainer
from tests.snapshots import changes, same, same_as_before
from tests.train import runs
from tests.train.runs import EPOCHS, KINDS, TRAIN, UPDATES, make_rows, make_step, make_trainer


@pytest.mark.parametrize(("kind", "precision"), [
    *[(kind, "float32") for kind in KINDS],
    *[("AdamW", one) for one in ("bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true")],
])  # fmt: skip
def test_resumed_run_is_identical(kind: str, precision: str, tmp_path: Path) -> None:
    def make(out: Path | None = tmp_path, micro_batch: int = 3) -> Trainer:
        return make_trainer(out, step=make_step(kind, precision=precision, micro_batch=micro_batch))

    whole = make(None)
    expected = runs.timeless(whole.fit(epochs=EPOCHS))
    end = runs.End(runs.state(whole), expected)
    first = make()
    reports = first.fit(epochs=2)
    torch.manual_seed(99)  # another process
    again = make()
    again.resume(tmp_path)
    assert changes(runs.state(first), runs.state(again)) == []
    assert (again.epoch, again.updates, again.best) == (2, 2 * UPDATES, first.best)
    assert again.seconds == first.seconds > 0
    reports += again.fit(epochs=EPOCHS)
    runs.assert_same_end(again, reports, end)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "log.jsonl", f"step-{again.steps:08}"]
    other = make(micro_batch=2)  # another cut of the same rows
    other.resume(tmp_path)
    assert other.best == again.best
    assert other.fit(epochs=EPOCHS) == []  # done already
    with pytest.raises(PlanError, match="epochs to be a whole number of at least 1, got 0"):
        other.fit(epochs=0)


@pytest.mark.parametrize(("change", "told"), [
    (lambda: {"train": make_rows(TRAIN + 1)}, r"rows 14 there and 15 here"),
    (lambda: {"batch_size": 5}, r"batch_size 6 there and 5 here"),
    (lambda: {"config": {"lr": 2}}, r"lr 1 there and 2 here"),
    (lambda: {"step": make_step(scheduler=())}, r"schedulers 1 there and 0 here"),
    (lambda: {"step": make_step("AdamW")}, "optimizer 0: SGD there, AdamW here"),
    (lambda: {"step": make_step(precision="bf16-mixed")}, "precision float32 there and bf16-mixed here"),
])  # fmt: skip
def test_resume_from_another_run_is_refused(change: Any, told: str, tmp_path: Path) -> None:
    make_trainer(tmp_path, config={"lr": 1}).fit(epochs=1)
    other = make_trainer(**({"config": {"lr": 1}} | change()))
    before = runs.state(other)
    with pytest.raises(CheckpointError, match=told):
        other.resume(tmp_path)
    checkpoint.save(tmp_path, 99, model=other.step.model)  # by no trainer
    with pytest.raises(CheckpointError, match=r"rows None there and 1[45] here"):
        other.resume(tmp_path)
    assert changes(before, runs.state(other)) == []


@pytest.mark.parametrize(("values", "larger", "best_epoch"), [
    ([math.nan, math.nan], False, None),
    ([3.0, 1.0, 2.0, 1.0], False, 2),
    ([1.0, 2.0, 3.0, 2.5], True, 3),
    ([math.nan, 2.0, 3.0, math.inf], False, 2),
])  # fmt: skip
def test_best_is_of_the_best_epoch(values: Any, larger: bool, best_epoch: Any, tmp_path: Path) -> None:
    told = iter(values)  # a validation that goes as written
    metric: Fold[Any, float, float] = Fold(
        init=lambda: next(told), add=lambda value, _: value, merge=min, finish=lambda value: value
    )
    trainer = make_trainer(tmp_path, metrics={"told": metric}, best_by="told", larger_is_better=larger)
    trainer.fit(epochs=len(values))
    assert checkpoint.load(tmp_path).progress["epoch"] == len(values)
    assert (tmp_path / "best").exists() == (best_epoch is not None)
    if best_epoch is None:  # nothing was ever a number
        assert trainer.best is None
        return
    best = checkpoint.load(tmp_path / "best").progress
    assert trainer.best == values[best_epoch - 1] == best["best"]
    assert best["epoch"] == best_epoch


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"batch_size": 0}, PlanError, r"batch_size to be a whole number of at least 1, got 0"),
    ({"batch_size": True}, PlanError, r"batch_size.*got True"),
    ({"save_every": -1}, PlanError, r"save_every.*at least 0, got -1"),
    ({"seed": 1.0}, PlanError, r"seed to be a whole number.*got 1\.0"),
    ({"config": {"out": Path("a")}}, PlanError, r"config to hold JSON values.*PosixPath"),
    ({"keep": -1}, PlanError, r"keep.*at least 0, got -1"),
    ({"save_minutes": math.nan}, PlanError, r"save_minutes of at least 0, got nan"),
    ({"callbacks": [Callback]}, PlanError, r"methods of ab\.Callback, got the class Callback\. Pass"),
])  # fmt: skip
def test_bad_input_is_refused_before_anything_is_touched(
    options: dict[str, Any], error: type[AnybatchError], message: str, tmp_path: Path
) -> None:
    step, file = make_step(), tmp_path / "file"
    file.write_text("mine")
    with same_as_before(step):
        with pytest.raises(error, match=message):
            make_trainer(**{"out": tmp_path / "out", "step": step} | options)
        for out in (file, file / "below", Path("/proc")):
            with pytest.raises(DataError, match=rf"a folder that can be written, got {out}.*Choose another"):
                make_trainer(out, step=step)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_parameters_of_the_loss_are_kept_and_resumed(tmp_path: Path) -> None:
    def make(out: Path | None) -> Trainer:
        torch.manual_seed(0)
        model, loss = nn.Linear(4, 6), PerRow(nn.Bilinear(6, 3, 1))
        parameters = [*model.parameters(), *loss.function.parameters()]
        step = Step(model, loss, torch.optim.SGD(parameters, lr=0.1, momentum=0.9), micro_batch=2)
        rows = torch.randn(12, 4), torch.randn(12, 3)
        return Trainer(step, rows, rows, batch_size=4, out=out, progress=False)

    whole = make(None)
    whole.fit(epochs=4)
    make(tmp_path).fit(epochs=2)
    again = make(tmp_path)
    for parameter in again.step.loss_module.parameters():  # what a fresh start would not have
        nn.init.zeros_(parameter)
    again.resume(tmp_path)
    again.fit(epochs=4)
    ours, theirs = (dict(one.step.loss_module.state_dict()) for one in (again, whole))
    assert ours
    assert same(ours, theirs)


@pytest.mark.parametrize(("policy", "dropped", "skipped"), [("drop", 3, 0), ("skip", 0, 1)])
def test_not_finite_is_counted_told_and_kept(policy: str, dropped: int, skipped: int, tmp_path: Path) -> None:
    x, y = make_rows(TRAIN)
    x[4] = math.nan

    def make(out: Path, **options: Any) -> Trainer:
        step = make_step(non_finite=policy, precision="fp16-mixed")
        return make_trainer(out, step=step, train=(x, y), save_every=1, **options)

    (report,) = make(tmp_path / "a").fit(epochs=1)
    assert (report.dropped, report.skipped, report.updates) == (dropped, skipped, UPDATES - skipped)
    assert all(map(math.isfinite, (report.loss, *report.validation.values())))
    broken = make(tmp_path / "b", callbacks=[runs.stopped(("update", UPDATES), ZeroDivisionError())])
    with pytest.raises(ZeroDivisionError):
        broken.fit(epochs=1)
    again = make(tmp_path / "c")
    again.resume(tmp_path / "b")  # in the middle of an epoch the counts go on
    assert runs.timeless(again.fit(epochs=1)) == runs.timeless([report])
