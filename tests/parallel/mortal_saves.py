"""Trainings on 1, 2 and 4 ranks, plain and sharded, of which a rank is killed while a checkpoint is saved.

`python -m tests.parallel.mortal_saves [--kills N] [--seed S] [--ranks R ...]` ends with 1 where a run did not
come back: the last or the last but one checkpoint loads, and leads to the same bits.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from anybatch import Callback
from anybatch.core import AnybatchError
from anybatch.parallel import checkpoint, stored
from tests.parallel import trainings
from tests.parallel.spawned import GROUP_TIMEOUT

EPOCHS, UPDATES = 1, 5
SAVING = {checkpoint.__file__, stored.__file__}
Death = tuple[int, int, int]  # the rank, the save, and the line of it


class Lines(Callback):
    """Counts the lines of each save, and kills this process at one; writes down the update before."""

    on_every_rank = True

    def __init__(self, note: Path, save: int = sys.maxsize, line: int = 0) -> None:
        self.note, self.at, self.saves, self.lines = note, (save, line), 0, 0

    def start(self, trainer: Any, info: Any) -> None:
        self.trainer = trainer
        trainer.save = self.saving(trainer.save)

    def saving(self, save: Any) -> Any:
        def counted(path: Path) -> None:
            self.note.write_text(f"{self.trainer.steps} {self.lines}")
            self.saves, self.lines = self.saves + 1, 0
            sys.settrace(self.enter)
            try:
                save(path)
            finally:
                sys.settrace(None)

        return counted

    def enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.line if frame.f_code.co_filename in SAVING else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.lines += 1
        if (self.saves, self.lines) >= self.at:  # a save may have fewer lines than the one that was counted
            os.kill(os.getpid(), signal.SIGKILL)
        return self.line


def live(rank: int, size: int, is_sharded: bool, folder: Path, store: str, death: Death | None) -> None:
    """Be a rank of a run, from its last checkpoint if there is one; write down how it ended."""
    if size > 1 or is_sharded:
        where = f"file://{store}"
        dist.init_process_group("gloo", where, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    lines = Lines(folder.with_suffix(f".{rank}"), *(death[1:] if death and death[0] == rank else ()))
    way = "shard" if is_sharded else "replicate"
    trainer = trainings.build(way, out=folder, save_every=1, callbacks=[lines])
    loaded = -1
    if checkpoint.has_run(folder):
        trainer.resume(folder)
        loaded = trainer.steps
    try:
        trainer.fit(epochs=EPOCHS)
    except AnybatchError:  # another rank was killed
        return
    told = {"loaded": loaded, "bits": trainings.numbers(trainer)["bits"], "lines": lines.lines}
    folder.with_suffix(f".end{rank}").write_text(json.dumps(told))


def lived(size: int, is_sharded: bool, folder: Path, death: Death | None = None) -> list[int]:
    """Fork the ranks of a run, and wait for them; how each ended."""
    children: list[int] = []
    with tempfile.TemporaryDirectory() as stores:
        for rank in range(size):
            if not (child := os.fork()):
                code = 1
                try:
                    live(rank, size, is_sharded, folder, f"{stores}/store", death)
                    code = 0
                except BaseException as error:
                    sys.stderr.write(f"rank {rank}: {type(error).__name__}: {error}\n")
                os._exit(code)
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def ends(size: int, folder: Path) -> list[dict[str, Any]]:
    return [json.loads(folder.with_suffix(f".end{rank}").read_text()) for rank in range(size)]


def campaign(kills: int, seed: int, ranks: list[int]) -> bool:
    """Kill so many runs, shared out among the kinds; True if all came back."""
    is_whole, kinds = True, [(size, is_sharded) for is_sharded in (False, True) for size in ranks]
    for number, (size, is_sharded) in enumerate(kinds):
        draw, came, loaded, begin = random.Random(f"{seed} {number}"), 0, Counter[int](), time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            whole = Path(name, "whole")
            assert not any(lived(size, is_sharded, whole))
            expected = ends(size, whole)
            wanted = kills // len(kinds) + (number < kills % len(kinds))
            for trial in range(wanted):
                folder, odd = Path(name, f"run{trial}"), draw.randrange(size if is_sharded else 1)
                death = odd, draw.randint(2, EPOCHS * (UPDATES + 1)), draw.randint(1, expected[odd]["lines"])
                codes = lived(size, is_sharded, folder, death)
                steps = int(folder.with_suffix(f".{odd}").read_text().split()[0])  # of the save it died in
                again = lived(size, is_sharded, folder)
                found = [] if any(again) else ends(size, folder)
                lost = {steps - one["loaded"] for one in found}
                are_same = [one["bits"] for one in found] == [one["bits"] for one in expected]
                if codes[odd] == -signal.SIGKILL and are_same and lost <= {0, 1}:
                    came += 1
                else:
                    print(f"broken: {size} {is_sharded} {death}: {codes}, {again}, {lost} lost", flush=True)
                loaded.update(lost)
        kind, last = f"{size} ranks{', sharded' * is_sharded}", f"{loaded[0]} from the last checkpoint"
        print(f"{kind}: {came} of {wanted} came back, {last}; {time.monotonic() - begin:.0f} s", flush=True)
        is_whole = is_whole and came == wanted
    return is_whole


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    sys.exit(not campaign(**vars(parser.parse_args())))
