"""The checkpoints in a run's folder: last, best and numbered ones, and the newest intact one."""

import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from anybatch.core import CheckpointError, DataError
from anybatch.parallel import shard_files
from anybatch.train import checkpoint
from anybatch.train.checkpoint import Checkpoint, load, write
from anybatch.train.share import Share

LAST, BEST = "last.safetensors", "best.safetensors"
_Rest = Callable[[], Mapping[str, Any]]  # gives progress and random numbers
_RUN = "run.safetensors"  # beside shards: a checkpoint without model and optimizers


def make_folder(path: Path) -> Path:
    """Create a folder if it does not exist; raise DataError if it is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()  # an existing folder may be read-only
    except OSError as error:
        raise DataError(
            f"Expected a folder that can be written, got {path}: {error.strerror}. Choose another one."
        ) from None
    return path


def numbered(folder: Path) -> dict[int, Path]:
    """Return the numbered checkpoints of a folder, the newest first."""
    found = {int(one[1]): path for path in folder.iterdir() if (one := _NUMBERED.fullmatch(path.name))}
    return dict(sorted(found.items(), reverse=True))


_NUMBERED = re.compile(r"step-(\d+)\.safetensors")


def number(folder: Path, step: int, *, keep: int) -> None:
    """Link the last checkpoint under its step number; delete higher ones and all but the newest `keep`."""
    path = folder / f"step-{step:08}.safetensors"
    for stray in folder.glob(".step-*.tmp"):  # left by a killed process
        shutil.rmtree(stray, ignore_errors=True)
    write(path, lambda file: _link(folder / LAST, file), "Make room.")
    there = numbered(folder)
    kept = [one for one in there if one <= step][:keep]
    for one in there.keys() - {*kept}:
        with suppress(OSError):  # deleted next time
            there[one].unlink()


def _link(source: Path, target: Path) -> None:
    real = os.path.realpath(source)
    try:
        os.link(real, target)  # safe, because the file is never written to again
    except OSError:  # not supported by every file system
        shutil.copyfile(real, target)


def has_run(folder: Path) -> bool:
    """Return True if a folder has a checkpoint from which a run can resume."""
    return (folder / LAST).exists() or bool(numbered(folder)) or shard_files.is_run(folder)


def write_run(
    path: Path, share: Share, parts: Mapping[str, Any], rest: _Rest, *, step: int, keep: int
) -> None:
    """Write a checkpoint; in lockstep a folder of shards, by all ranks, with the other parts in a file.

    Folders `step-N` are then in that of the last checkpoint, and in `best` and others beside it.
    """
    if not share.is_lockstep:
        return checkpoint.save(path, **parts, **rest())
    is_last = path.name == LAST
    shard_files.save(
        path.parent if is_last else path.with_suffix(""),
        step,
        model=parts["model"],
        optimizers=parts["optimizers"],
        keep=max(keep, 1) if is_last else 1,
        group=share.group,
        write=lambda folder: checkpoint.save(folder / _RUN, **_beside_shards(parts), **rest()),
    )


def read_run(
    path: Path, share: Share, parts: Mapping[str, Any], check: Callable[[Checkpoint], object]
) -> Checkpoint:
    """Load a checkpoint of `write_run` into these parts, after the check; see `load_newest`.

    Folders of shards are loaded by any number of ranks, and into models without shards.
    """
    found = list[Checkpoint]()

    def read(loaded: Checkpoint, into: Mapping[str, Any]) -> None:
        check(loaded)
        checkpoint.restore(loaded, **into)
        found.append(loaded)

    if share.is_lockstep or shard_files.is_run(path):
        shard_files.restore(
            path,
            model=parts["model"],
            optimizers=parts["optimizers"],
            group=share.group,
            read=lambda folder: read(load(folder / _RUN), _beside_shards(parts)),
        )
    else:
        read(load_newest(path), parts)
    return found[0]


def _beside_shards(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {**parts, "model": nn.Module(), "optimizers": ()}


def is_of(path: Path, out: Path, share: Share) -> bool:
    """Return True if a checkpoint is of the run in a folder, and of the kind that this one writes there."""
    homes = [path.parent.resolve(), path.resolve().parent]  # the path may be a symlink or its target
    if path.name == _RUN:  # in out/step-N or out/best/step-N
        homes = [homes[0].parent, homes[0].parent.parent]
    return out.resolve() in homes and (path.name == _RUN) == share.is_lockstep


def load_newest(path: Path) -> Checkpoint:
    """Load a checkpoint, or the newest intact one of a folder, with a warning if it is not the last."""
    paths = [path / LAST, *numbered(path).values(), path / BEST] if path.is_dir() else [path]
    errors: list[CheckpointError] = []
    for one in paths:
        try:
            found = load(one)
        except CheckpointError as error:
            errors.append(error)
            continue
        if errors:
            warnings.warn(f"{errors[0]} Going on from {one} instead.", stacklevel=3)
        return found
    raise errors[0]
