"""A program that can die anywhere: `python -m tests.faults.mortal FOLDER SCENARIOS`.

Scenarios are JSON of {name: [death, ...]}: each life in FOLDER/name is a process that goes on from what it
finds, and dies by SIGKILL at `[place, count]`, or after a share of a whole life, `["time", share]`; a last
one does not die. How each ended is JSON on standard output.
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from anybatch import EMA, EarlyStopping
from anybatch.core import MicroBatchDone
from anybatch.parallel import checkpoint
from anybatch.train.trainer import Trainer
from tests.train.runs import EPOCHS, TRAIN, make_rows, make_trainer

Death = list[Any]
NEVER: Death = ["never", 0]
REPLACE, REMOVE = os.replace, shutil.rmtree


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def born(life: Callable[[], object], killed_after_s: float | None = None) -> int:
    """How a process of its own ended: 0 for well, minus the signal's number where it was killed."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            life()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if killed_after_s is not None:
        time.sleep(killed_after_s)
        os.kill(pid, signal.SIGKILL)  # one that is done already is still there to be waited for
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def make(out: Path | None, **options: Any) -> Trainer:

    rows = DataLoader(TensorDataset(*make_rows(TRAIN)), batch_size=3, shuffle=True)
    stopping = EarlyStopping("accuracy", patience=EPOCHS, larger_is_better=True)
    kept = {"save_every": 1, "keep": 2} if out else {}
    return make_trainer(out, train=rows, callbacks=[EMA(0.9), stopping], **kept | options)


def train(folder: Path, death: Death) -> None:

    left = [death[1]]

    def reap(place: str) -> None:
        left[0] -= place == death[0]
        if place == death[0] and not left[0]:
            die()

    def replace_or_die(source: Path, target: Path) -> None:
        is_checkpoint = target.name.startswith("step-")
        name = ("best" if target.parent.name == "best" else "last") if is_checkpoint else target.name
        reap("before " + name)  # the new file is written, the old one still in place
        REPLACE(source, target)
        reap("after " + name)

    def remove_or_die(path: Path, **options: Any) -> None:
        reap("before deleting")
        if path.exists():
            next(path.iterdir()).unlink()
            reap("while deleting")
        REMOVE(path, **options)

    def listen(event: object) -> None:
        reap("micro-batch" if isinstance(event, MicroBatchDone) else "update")

    os.replace, shutil.rmtree = replace_or_die, remove_or_die
    # Syncing takes most of the time, and saves from power cuts, not from kills.
    os.fsync = lambda descriptor: None
    trainer = make(folder, listen=listen)
    trainer.step.model.register_forward_pre_hook(lambda module, inputs: reap("forward"))
    for parameter in trainer.step.model.parameters():
        parameter.register_hook(lambda gradient: reap("backward"))
    if checkpoint.has_run(folder):
        trainer.resume(folder)
    trainer.fit(epochs=EPOCHS)


def play(folder: Path, deaths: list[Death], life_s: float = 0.0) -> list[int]:

    folder.mkdir()
    return [
        born(partial(train, folder, NEVER), death[1] * life_s)
        if death[0] == "time"
        else born(partial(train, folder, death))
        for death in [*deaths, NEVER]
    ]


def trainings(folder: Path, scenarios: dict[str, list[Death]]) -> dict[str, list[int]]:
    train(folder, NEVER)  # here, so that all that torch loads on first use is there for the lives to come
    began = time.perf_counter()
    play(folder / "undisturbed", [])
    life_s = time.perf_counter() - began
    return {name: play(folder / name, deaths, life_s) for name, deaths in scenarios.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(trainings(Path(sys.argv[1]), json.loads(sys.argv[2]))))
