"""Find out what a name or a folder holds, and read it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from anybatch.core import DataError
from anybatch.data import cifar10, mnist
from anybatch.data.dataset import Split
from anybatch.data.digits import read_digits


class Format(NamedTuple):
    """A kind of folder: how to know it by its file names, and how to read it."""

    name: str
    patterns: tuple[str, ...]
    read: Callable[[Path], Split]


FORMATS = (
    Format("MNIST in IDX form", tuple(f"{stem}?idx?-ubyte*" for stem in mnist.STEMS), mnist.read_mnist),
    Format("CIFAR-10 in binary form", (cifar10.TRAIN, cifar10.TEST), cifar10.read_cifar10),
)


def load(source: str | os.PathLike[str]) -> Split:
    """Read a data set by its name, or whatever a folder holds.

    Args:
        source: `"digits"`, or a folder with MNIST in IDX form (gzipped or not) or CIFAR-10 in binary form.

    Raises:
        DataError: no such name or folder, none or both of the formats in it, or a damaged file.

    Example:
        >>> split = load("digits")
        >>> len(split.train), len(split.test), tuple(split.train.inputs.shape[1:])
        (1352, 445, (1, 32, 32))
    """
    if source == "digits":
        return read_digits()
    folder = Path(source)
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise DataError(
            f"{folder}: expected 'digits' or a folder that can be read, "
            f"got: {error.strerror or error}; {_looked_for()}"
        ) from None
    found = [
        format
        for format in FORMATS
        if any(Path(name).match(pattern) for name in names for pattern in format.patterns)
    ]
    if len(found) != 1:
        kinds = " and ".join(format.name for format in found) or f"{len(names)} other files"
        raise DataError(f"{folder}: expected files of one data set, got {kinds}; {_looked_for()}")
    return found[0].read(folder)


def _looked_for() -> str:
    kinds = [f"{format.name} ({format.patterns[0]} ...)" for format in FORMATS]
    return f"name a folder with {' or '.join(kinds)}"
