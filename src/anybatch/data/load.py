"""Data sets by name, or from a folder whose format is recognized."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from anybatch.core import DataError
from anybatch.data import cifar10, images, mnist
from anybatch.data.dataset import DataSplit
from anybatch.data.digits import read_digits


class Format(NamedTuple):
    """A kind of folder: its name, file name patterns and reader."""

    name: str
    patterns: tuple[str, ...]
    read: Callable[[Path], DataSplit]


FORMATS = (
    Format("MNIST in IDX form", tuple(f"{stem}?idx?-ubyte*" for stem in mnist.STEMS), mnist.read_mnist),
    Format("CIFAR-10 in binary form", (cifar10.TRAIN, cifar10.TEST), cifar10.read_cifar10),
)


def load(source: str | os.PathLike[str], image_size: int | None = None) -> DataSplit:
    """Read a data set by its name, or from a folder.

    Args:
        source: `"digits"`, or a folder with MNIST in IDX form (gzipped or not), CIFAR-10 in binary form, or
            images in one folder for each class.
        image_size: target size in pixels of images in folders. None to leave them unchanged.

    Raises:
        DataError: the name or folder does not exist, the folder has no or several known formats, a file is
            damaged, or an image size was given for another data set.
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
