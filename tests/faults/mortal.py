"""A program that can die anywhere: `python -m tests.faults.mortal FOLDER SCENARIOS`, or `... FOLDER windows`.

With scenarios, JSON of {name: [death, ...]}, it makes FOLDER/name for each and lives once per death: each
life is a process of its own that goes on from what it finds. It dies by SIGKILL at `[place, count]`, or after
a share of the time that a whole life takes, `["time", share]`. One more life in each folder has no death.

With "windows" there are three lives for each case of `tests.halves`: one that is not disturbed; one that
saves in the middle of a window and dies in a backward after that; one that goes on from what it finds.

How each life ended is JSON on standard output.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anybatch import Step, Window
from anybatch.core.report import Event, MicroBatchDone
from anybatch.train.trainer import LAST
from tests import halves
from tests.train.runs import EPOCHS, make_trainer

Death = list[Any]
NEVER: Death = ["never", 0]
SAVED = "saved.safetensors"
REPLACE = os.replace


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


# ---- a training


def train(folder: Path, death: Death) -> None:
    """To the end, or to death the count-th time that it comes to a place."""
    left = [death[1]]

    def reap(place: str) -> None:
        left[0] -= place == death[0]
        if place == death[0] and not left[0]:
            die()

    def replace_or_die(source: Path, target: Path) -> None:
        reap("before " + target.name)  # the new file is written, the old one still in place
        REPLACE(source, target)
        reap("after " + target.name)

    def listen(event: Event) -> None:
        reap("micro-batch" if isinstance(event, MicroBatchDone) else "update")

    os.replace = replace_or_die
    # Syncing takes most of the time, and saves from power cuts, not from kills.
    os.fsync = lambda descriptor: None
    trainer = make_trainer(folder, listeners=[listen], save_every=1)
    if (folder / LAST).exists():
        trainer.resume(folder)
    trainer.fit(epochs=EPOCHS)


def play(folder: Path, deaths: list[Death], life_s: float = 0.0) -> list[int]:
    """All lives in a folder, one after the other."""
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


# ---- a window


def begun(step: Step) -> Window:
    random.seed(5)  # Python's own is another one after each fork
    return halves.begun(step, overflowing=step.scale.is_dynamic)


def fill(home: Path, name: str, saved: bool) -> None:
    """A window to its end, from the beginning or from what was saved; saves where it has come to."""
    step = halves.build(**halves.CASES[name])
    window = step.window(halves.restore(home / SAVED, step)["window"]) if saved else begun(step)
    reports = [{key: getattr(one, key) for key in one.__slots__} for one in halves.ended(step, window)]
    for report in reports:  # each process counts its own updates and seconds
        del report["seconds"], report["update"]
    end = home / ("resumed" if saved else "undisturbed")
    halves.save(end, step, reports=reports, scale=step.scale.state(), short=dict(step.model.state_dict()))


def save_and_die(home: Path, name: str) -> None:
    """In the second micro-batch after that."""
    step = halves.build(**halves.CASES[name])
    window = begun(step)
    halves.save(home / SAVED, step, window=window.state())
    window.add(halves.rows(2))
    step.model[0].weight.register_hook(lambda gradient: die())
    window.add(halves.rows(3))


def windows(folder: Path) -> dict[str, list[int]]:
    step = halves.build()
    halves.ended(step, halves.begun(step))  # here, for the same reason
    ends: dict[str, list[int]] = {}
    for name in halves.CASES:
        home = folder / name
        home.mkdir()
        lives = (
            partial(fill, home, name, False),
            partial(save_and_die, home, name),
            partial(fill, home, name, True),
        )
        ends[name] = [born(one) for one in lives]
    return ends


if __name__ == "__main__":
    torch.set_num_threads(1)
    home, asked = Path(sys.argv[1]), sys.argv[2]
    print(json.dumps(windows(home) if asked == "windows" else trainings(home, json.loads(asked))))
