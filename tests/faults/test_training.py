"""A training that fails or is asked to stop in the middle: the last whole update is kept, and it goes on."""

import math
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from anybatch import Total
from anybatch.core import MicroBatchDone
from anybatch.core.errors import CheckpointError, NonFiniteLossError
from anybatch.train.metrics import accuracy
from tests.snapshots import changes
from tests.train import runs
from tests.train.runs import BATCH, EPOCHS, UPDATES, assert_same_end, make_rows, make_trainer, undisturbed


@pytest.mark.parametrize("row", range(0, runs.TRAIN, 3))
def test_bad_data_in_an_epoch_costs_nothing_but_its_own_update(row: int, tmp_path: Path) -> None:
    x, y = make_rows(runs.TRAIN)
    spoilt, y[row] = x.clone(), 1
    spoilt[row] = math.nan
    trainer = make_trainer(tmp_path, train=(spoilt, y))
    batches = trainer.train.batches(batch_size=BATCH, seed=5, epoch=0)
    done = next(index for index, (inputs, _) in enumerate(batches) if inputs.isnan().any())
    with pytest.raises(NonFiniteLossError):
        trainer.fit(epochs=EPOCHS)
    assert trainer.updates == done
    assert bool([*tmp_path.glob("step-*")]) == (done > 0)
    again = make_trainer(train=(x, y))  # with the data put right
    if done:
        again.resume(tmp_path)
    assert again.updates == done
    assert_same_end(again, again.fit(epochs=EPOCHS), runs.finished(train=(x, y)))


def test_folder_of_another_run_is_not_written_to(tmp_path: Path) -> None:
    first = make_trainer(tmp_path)
    first.fit(epochs=1)
    first.fit(epochs=2)  # its own folder
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = make_trainer(tmp_path)
    for use in (lambda: other.fit(epochs=1), lambda: other.save(tmp_path)):
        with pytest.raises(CheckpointError, match="without an earlier run"):
            use()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
@pytest.mark.parametrize("place", ["micro-batch", "step", "validation", "epoch"])
@pytest.mark.parametrize("epoch", [1, EPOCHS])
def test_a_stop_waits_for_the_update(epoch: int, place: str, number: int, error: Any, tmp_path: Path) -> None:
    def ring(at: str) -> None:
        if (at, first.epoch + 1) == (place, epoch) and not rung:
            rung.append(signal.raise_signal(number))

    def metric(scores: Tensor, y: Tensor) -> Total:
        ring("validation")
        return accuracy(scores, y)

    rung: list[None] = []
    done = runs.Diary(("epoch", epoch), lambda: place == "epoch" and rung.append(signal.raise_signal(number)))

    def listen(event: object) -> None:
        ring("micro-batch" if isinstance(event, MicroBatchDone) else "step")

    first = make_trainer(tmp_path, listen=listen, metrics={"accuracy": metric}, callbacks=[done])
    with pytest.raises(error):
        first.fit(epochs=EPOCHS)
    assert rung == [None]
    whole = place in ("validation", "epoch")
    assert done.events.count("update") == (epoch - 1) * UPDATES + (UPDATES if whole else 1)
    assert done.events.count("epoch") == epoch - (not whole)
    again = make_trainer()
    again.resume(tmp_path)
    assert again.updates == first.updates
    reports = again.fit(epochs=EPOCHS)
    assert changes(undisturbed().state, runs.state(again)) == []
    assert [report.epoch for report in reports] == list(range(done.events.count("epoch") + 1, EPOCHS + 1))
