"""A program that trains and can die anywhere: `python -m tests.faults.mortal FOLDER [SCENARIOS]`.

Without scenarios it trains in FOLDER to the end; one line on standard output says that the first
micro-batch of the fourth update is done, and then it waits for a line on standard input.

With scenarios, JSON of {name: [death, ...]}, it makes FOLDER/name for each and lives once per death: each
life is a process of its own that goes on from what it finds. It dies by SIGKILL at `[place, count]`, or after
a share of the time that a whole life takes, `["time", share]`. One more life in each folder has no death.
"""

import itertools
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from anybatch.core.report import Event, MicroBatchDone
from anybatch.train.trainer import LAST
from tests.train.runs import EPOCHS, make_trainer

Death = list[Any]
NEVER: Death = ["never", 0]
REPLACE = os.replace


class Reaper:
    """Kills this process, the count-th time that it comes to a place."""

    def __init__(self, place: str, count: int) -> None:
        self.place, self.left = place, count

    def __call__(self, place: str) -> None:
        self.left -= place == self.place
        if place == self.place and not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def live(folder: Path, death: Death) -> None:
    """Train to the end, or to death."""
    torch.set_num_threads(1)
    reap = Reaper(*death)

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


def born(folder: Path, death: Death) -> int:
    """A life in a process of its own; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        live(folder, NEVER if death[0] == "time" else death)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """How it ended: 0 for well, minus the signal's number where it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def play(folder: Path, deaths: list[Death], life_s: float) -> list[int]:
    """All lives in a folder, one after the other."""
    folder.mkdir()
    ends: list[int] = []
    for death in [*deaths, NEVER]:
        pid = born(folder, death)
        if death[0] == "time":
            time.sleep(death[1] * life_s)
            os.kill(pid, signal.SIGKILL)  # one that is done already is still there to be waited for
        ends.append(ended(pid))
    return ends


def main(folder: Path, scenarios: dict[str, list[Death]]) -> None:
    live(folder, NEVER)  # here, so that all that torch loads on first use is there for the lives to come
    began = time.perf_counter()
    play(folder / "undisturbed", [], 0)
    life_s = time.perf_counter() - began
    print(json.dumps({name: play(folder / name, deaths, life_s) for name, deaths in scenarios.items()}))


def wait_in_the_middle(folder: Path) -> None:
    """Train to the end, waiting once in the middle of the fourth update."""
    count = itertools.count(1)

    def listen(event: Event) -> None:
        # Updates of 2, 2 and 1 micro-batches; the next has 2 again.
        if isinstance(event, MicroBatchDone) and next(count) == 6:
            print("in the middle", flush=True)
            sys.stdin.readline()

    torch.set_num_threads(1)
    make_trainer(folder, listeners=[listen]).fit(epochs=EPOCHS)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    else:
        wait_in_the_middle(Path(sys.argv[1]))
