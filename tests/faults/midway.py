"""A program whose windows are cut short by death: `python -m tests.faults.midway FOLDER`.

For each case of `tests.halves` three lives, each a process of its own: one that is not disturbed; one that
saves in the middle of a window, adds to it and dies by SIGKILL in a backward; one that goes on from what
it finds. The first and the last save where they have come to. How each ended is JSON on standard output.
"""

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from anybatch import Step, Window
from tests.faults.mortal import ended as outcome
from tests.halves import CASES, begun, build, ended, restore, rows, save

SAVED = "saved.safetensors"


def live(home: Path, name: str, saved: bool) -> None:
    """One life to its end, from the beginning or from what was saved."""
    step = build(**CASES[name])
    window = step.window(restore(home / SAVED, step)["window"]) if saved else start(step)
    reports = [{field: getattr(one, field) for field in one.__slots__} for one in ended(step, window)]
    for report in reports:  # each process counts its own updates and seconds
        del report["seconds"], report["update"]
    end = home / ("resumed" if saved else "undisturbed")
    save(end, step, reports=reports, scale=step.scale.state(), short=dict(step.model.state_dict()))


def die(home: Path, name: str) -> None:
    """Save, and die in the second micro-batch after that."""
    step = build(**CASES[name])
    window = start(step)
    save(home / SAVED, step, window=window.state())
    window.add(rows(2))
    step.model[0].weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    window.add(rows(3))


def start(step: Step) -> Window:
    random.seed(5)  # Python's own is another one after each fork
    return begun(step, overflowing=step.scale.is_dynamic)


def born(life: Callable[[], None]) -> int:
    """How a life ended that was lived in a process of its own."""
    pid = os.fork()
    if pid:
        return outcome(pid)
    code = 1
    try:
        life()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # Here, so that all that torch loads on first use is there for the lives to come.
    ended(step := build(), begun(step))
    ends: dict[str, list[int]] = {}
    for name in CASES:
        home = folder / name
        home.mkdir()
        lives = partial(live, home, name, False), partial(die, home, name), partial(live, home, name, True)
        ends[name] = [born(one) for one in lives]
    print(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
