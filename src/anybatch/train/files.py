"""Files written as a whole: weights alone, pages, settings; and the folder of a run."""

import errno
import glob
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from anybatch.core import AnybatchError, CheckpointError, DataError, torch_private as private
from anybatch.parallel import sync_folder, write_tensors


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


def write(
    path: Path,
    make: Callable[[Path], object],
    advice: str = "Choose another place.",
    kind: type[AnybatchError] = CheckpointError,
) -> None:
    """Write a file as a whole: `make` writes one beside it, which is synced and takes its place.

    If the path is a symlink, its target is written. If that fails, an earlier file is unchanged, and an error
    of this kind is raised, with the advice.
    """
    real = Path(os.path.realpath(path))
    beside = real.with_name(f".{real.name}.{os.getpid()}.tmp")
    try:
        if real.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        for stray in real.parent.glob(f".{glob.escape(real.name)}.*.tmp"):  # left by a killed process
            stray.unlink()
        make(beside)
        with beside.open("rb+") as file:  # Windows flushes no file that is only read
            os.fsync(file.fileno())
        os.replace(beside, real)
    except OSError as error:
        reason = error.strerror or error
        raise kind(f"{path}: expected a file that can be written, got: {reason}. {advice}") from None
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(real.parent)


def export(state: Mapping[str, Any], path: str | Path) -> None:
    """Write the tensors of a state dict as a .safetensors file, for `load_state_dict` in any program.

    Raises CheckpointError for another ending, a value that is no tensor, or a file that cannot be written. An
    earlier file of that name is unchanged.
    """
    path, plain = Path(path), {private.plain_name(name): value for name, value in state.items()}
    odd = [name for name, value in plain.items() if not isinstance(value, Tensor)]
    if odd or path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path}: expected a state dict of tensors and a file name that ends in .safetensors, got "
            f"{odd[0] if odd else path.suffix!r}. Choose another name, or write with a program of yours."
        )
    write(path, lambda file: write_tensors(file, plain))
