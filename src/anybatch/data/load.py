"""Find out what a name or a folder holds, and read it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from anybatch.core import DataError
from anybatch.data import cifar10, images, mnist
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


def load(source: str | os.PathLike[str], image_size: int | None = None) -> Split:
    """Read a data set by its name, or whatever a folder holds.

    Args:
        source: `"digits"`, or a folder with MNIST in IDX form (gzipped or not), CIFAR-10 in binary form, or
            images in one folder for each class.
        image_size: pixels that images in folders are brought to. None to take them as they are.

    Raises:
        DataError: no such name or folder, none or several of the formats in it, a damaged file, or an image
            size for a data set that has its own.

    Example:
        >>> split = load("digits")
        >>> len(split.train), len(split.test), tuple(split.train.inputs.shape[1:])
        (1352, 445, (1, 32, 32))
    """
    if source == "digits":
        _refuse_size(source, image_size)
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
    if not found and images.has_images(folder):
        return images.read_images(folder, image_size)
    _refuse_size(source, image_size)
    if len(found) != 1:
        kinds = " and ".join(format.name for format in found) or f"{len(names)} other files"
        raise DataError(f"{folder}: expected files of one data set, got {kinds}; {_looked_for()}")
    return found[0].read(folder)


def _refuse_size(source: object, image_size: int | None) -> None:
    if image_size is not None:
        raise DataError(
            f"{source}: expected folders of images with an image size, got {image_size}; leave it out"
        )


def _looked_for() -> str:
    kinds = [f"{format.name} ({format.patterns[0]} ...)" for format in FORMATS]
    return f"name a folder with {' or '.join([*kinds, 'images (a folder for each class)'])}"
