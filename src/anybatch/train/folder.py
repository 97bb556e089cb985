"""The checkpoints in the folder of a run: the last, the best and numbered ones, and which is whole."""

import os
import re
import shutil
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

from anybatch.core import CheckpointError, DataError
from anybatch.train.checkpoint import Checkpoint, load, write_whole

LAST, BEST = "last.safetensors", "best.safetensors"


def make_folder(path: Path) -> Path:
    """Make the folder, where it is not there.

    Raises:
        DataError: nothing can be written in it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()  # one that exists may still not be written to
    except OSError as error:
        raise DataError(
            f"Expected a folder that can be written, got {path}: {error.strerror}. Choose another one."
        ) from None
    return path


def numbered(folder: Path) -> dict[int, Path]:
    """The numbered checkpoints of a folder, the newest first."""
    found = {int(one[1]): path for path in folder.iterdir() if (one := _NUMBERED.fullmatch(path.name))}
    return dict(sorted(found.items(), reverse=True))


_NUMBERED = re.compile(r"step-(\d+)\.safetensors")


def number(folder: Path, step: int, *, keep: int) -> None:
    """Keep the last checkpoint under the number of its step as well, then delete all but the newest `keep`.

    Those with a higher number are of steps that will be made once more, and are deleted, too.

    Raises:
        CheckpointError: the file cannot be written.
    """
    path = folder / f"step-{step:08}.safetensors"
    for stray in folder.glob(".step-*.tmp"):  # of a process that was killed
        shutil.rmtree(stray, ignore_errors=True)
    try:
        write_whole(path, lambda file: _link(folder / LAST, file))
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected a file that can be written, got: {error.strerror}. Make room."
        ) from None
    there = numbered(folder)
    kept = [one for one in there if one <= step][:keep]
    for one in there.keys() - {*kept}:
        with suppress(OSError):  # it can wait for the next time
            there[one].unlink()


def _link(source: Path, target: Path) -> None:
    """The same file under one more name: it takes no room, and is never written to again."""
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError:  # not on every file system
        shutil.copyfile(real, target)


def has_run(folder: Path) -> bool:
    """Whether there is a checkpoint from which a run can go on."""
    return (folder / LAST).exists() or bool(numbered(folder))


def load_newest(path: Path) -> Checkpoint:
    """Load a checkpoint; of a folder the newest one that is whole, with a warning where it is not the last.

    Raises:
        CheckpointError: there is none, or none is whole.
    """
    paths = [path]
    if path.is_dir():
        paths = [path / LAST, *numbered(path).values(), path / BEST]
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
