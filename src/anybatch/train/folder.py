"""The checkpoints in a run's folder: last, best and numbered ones, and the newest intact one."""

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
    """Link the last checkpoint under its step number, then delete all but the newest `keep`.

    Higher numbers, of steps that will be repeated, are deleted too. Raises CheckpointError if the file cannot
    be written.
    """
    path = folder / f"step-{step:08}.safetensors"
    for stray in folder.glob(".step-*.tmp"):  # left by a killed process
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
    return (folder / LAST).exists() or bool(numbered(folder))


def load_newest(path: Path) -> Checkpoint:
    """Load a checkpoint, or the newest intact one of a folder, with a warning if it is not the last.

    Raises CheckpointError if there is no intact checkpoint.
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
