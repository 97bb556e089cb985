"""Trainings on 1, 2 and 4 ranks, plain and sharded, of which a rank is killed at drawn lines and which go on.

`python -m tests.parallel.mortal_saves [--kills N] [--seed S] [--ranks R ...]` ends with 1 where a run did not
come back: the last or the last but one checkpoint loads, and leads to the same bits.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import anybatch as ab
from anybatch.parallel import checkpoint
from tests.parallel import trainings
from tests.parallel.spawned import GROUP_TIMEOUT
from tests.snapshots import assert_same

EPOCHS = 2
SAVING = ["begin", "write_tensors", "finish", "sync_folder", "rmtree", "_rmtree_safe_fd"]  # they touch files
KINDS = "all", "saving", "ending"  # lines: of all functions, of these, and of the last four of these
OURS = str(Path(ab.__file__).parent)
Death = tuple[int, str, int]  # the rank, a kind of lines, and the number of the line


def lived(*lives: Callable[[], object]) -> list[int]:
    """Fork a process for each; 0 for one that ends well, minus the signal's number for one that is killed."""
    children: list[int] = []
    for life in lives:
        if not (child := os.fork()):
            code = 1
            try:
                life()
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def assert_same_end(folder: Path, name: str) -> None:
    """The last and the best checkpoint are those of the training that was not disturbed; no file is half."""
    both = [folder / "undisturbed", folder / name]
    last, best = ([checkpoint.load(one / file) for one in both] for file in ("", "best"))
    for one in last:
        del one.progress["seconds"]  # a clock says it
    for part in ("model", "optimizers", "schedulers", "progress"):
        assert_same(*({part: getattr(one, part)} for one in last))
    assert_same(*(one.model | {"cpu": one.random["cpu"]} for one in last))
    assert_same(*(one.model | {"epoch": one.progress["epoch"]} for one in best))
    logs = [(one / "log.jsonl").read_text().splitlines() for one in both]
    for event in ("step", "epoch"):
        whole, found = ([one[event] for one in map(json.loads, log) if one["event"] == event] for log in logs)
        assert found == whole == [*range(1, len(whole) + 1)]
    whole, found = ({path.name.partition("+")[0] for path in one.iterdir()} for one in both)
    assert found >= whole
    old = found - whole  # killed before it deleted an old one, a run that is done has it still
    assert len(old) <= 1 == all(one.startswith("step-") for one in old), old
    suffixes = {path.suffix for path in both[1].rglob("*") if path.is_file()}
    assert suffixes == {".safetensors", ".json", ".jsonl"}


class Lines(ab.Callback):
    """Counts the lines that a rank passes, kills it at one, and notes the updates at its start and saves."""

    on_every_rank = True

    def __init__(self, note: Path, kind: str = "all", at: int = sys.maxsize) -> None:
        self.note, self.kind, self.at, self.passed = note.open("a"), kind, at, Counter[str]()

    def start(self, trainer: Any, info: Any) -> None:
        self.note.write(f"\n{trainer.steps}")
        save = trainer.save

        def noted(path: Path) -> None:
            self.note.write(f" {trainer.steps}")
            self.note.flush()
            save(path)

        trainer.save = noted

    def enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith((OURS, shutil.__file__)) else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.passed["all"] += 1
        self.passed["saving"] += frame.f_code.co_name in SAVING
        self.passed["ending"] += frame.f_code.co_name in SAVING[2:]
        if self.passed[self.kind] == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.line


def live(rank: int, size: int, is_sharded: bool, folder: Path, store: str, death: Death | None) -> None:
    """Be a rank of a run, from its last checkpoint if there is one; write down how many lines it passed."""
    if size > 1 or is_sharded:
        where = f"file://{store}"
        dist.init_process_group("gloo", where, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    lines = Lines(folder.with_suffix(f".{rank}"), *(death[1:] if death and death[0] == rank else ()))
    metrics, stopping = ab.Metrics(accuracy=ab.accuracy), ab.EarlyStopping("accuracy", patience=EPOCHS)
    callbacks = [lines, metrics, stopping, *([] if is_sharded else [ab.EMA(0.9)])]
    kept = {"out": folder, "save_every": 1, "keep": 2, "callbacks": callbacks, "layer": nn.Dropout}
    trainer = trainings.build("shard" if is_sharded else "replicate", "joined", **kept)
    if checkpoint.has_run(folder):
        trainer.resume(folder)
    os.fsync = lambda _: None  # it takes most of the time, and saves from power cuts, not from kills
    sys.settrace(lines.enter)
    try:
        trainer.fit(epochs=EPOCHS)
    except ab.AnybatchError:  # another rank was killed
        return
    finally:
        sys.settrace(None)
    folder.with_suffix(f".lines{rank}").write_text(json.dumps(lines.passed))


def ranks(size: int, is_sharded: bool, folder: Path, death: Death | None = None) -> list[int]:
    with tempfile.TemporaryDirectory() as stores:
        how = size, is_sharded, folder, f"{stores}/store", death
        return lived(*(partial(live, rank, *how) for rank in range(size)))


def killed(folder: Path, name: str, size: int, is_sharded: bool, draw: random.Random) -> list[int]:
    """Kill a rank of a run at drawn lines until it comes to its end; how many saves each kill lost."""
    odd, code = draw.randrange(size if is_sharded else 1), -signal.SIGKILL
    while code == -signal.SIGKILL:
        kind = draw.choice(KINDS)
        most = json.loads((folder / f"undisturbed.lines{odd}").read_text())[kind]
        codes = ranks(size, is_sharded, folder / name, (odd, kind, draw.randint(1, most)))
        code = codes[odd]
    assert not any(codes), codes
    assert_same_end(folder, name)
    noted = (folder / f"{name}.{odd}").read_text().split("\n")[1:]
    return [int(died.split()[-1]) - int(again.split()[0]) for died, again in pairwise(noted)]


def campaign(kills: int, seed: int, sizes: list[int]) -> None:
    """Kill so many ranks, shared out among the kinds of runs; fails where one does not come back."""
    kinds = [(size, is_sharded) for is_sharded in (False, True) for size in sizes]
    with tempfile.TemporaryDirectory() as name:  # here, so that all that torch loads on first use is there
        live(0, 1, False, Path(name, "first"), "", None)
    for number, (size, is_sharded) in enumerate(kinds):
        draw, lost, begin, runs = random.Random(f"{seed} {number}"), Counter[int](), time.monotonic(), 0
        with tempfile.TemporaryDirectory() as name:
            assert not any(ranks(size, is_sharded, Path(name, "undisturbed")))
            while lost.total() < kills // len(kinds) + (number < kills % len(kinds)):
                lost.update(killed(Path(name), f"run{runs}", size, is_sharded, draw))
                runs += 1
        assert {*lost} <= {0, 1}, lost
        kind, last = f"{size} ranks{', sharded' * is_sharded}", f"{lost[0]} from the last checkpoint"
        print(f"{kind}: {lost.total()} came back, {last}; {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], dest="sizes")
    campaign(**vars(parser.parse_args()))
