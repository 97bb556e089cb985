"""Data sets by name, or from a folder whose format is recognized."""

import os
from collections.abc import Callable
from pathlib import Path

from anybatch.core import DataError
from anybatch.data import cifar10, images, mnist
from anybatch.data.dataset import DataSplit
from anybatch.data.digits import read_digits

#: Kinds of folders: patterns of their files' names, and the reader.
FORMATS: dict[str, tuple[tuple[str, ...], Callable[[Path], DataSplit]]] = {
    "MNIST in IDX form": (tuple(f"{stem}?idx?-ubyte*" for stem in mnist.STEMS), mnist.read_mnist),
    "CIFAR-10 in binary form": ((cifar10.TRAIN, cifar10.TEST), cifar10.read_cifar10),
}


def load(source: str | os.PathLike[str], image_size: int | None = None) -> DataSplit:
    """Read a data set by its name, `"digits"`, or from a folder; raise DataError if that is not possible.

    A folder has MNIST in IDX form (gzipped or not), CIFAR-10 in binary form, or images in one folder for each
    class, which are brought to `image_size` pixels if it is given.
    """
    folder, found = Path(source), list[str]()
    if source != "digits":
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise DataError(
                f"{folder}: expected 'digits' or a folder that can be read, "
                f"got: {error.strerror or error}; {_looked_for()}"
            ) from None
        found = [
            kind
            for kind, (patterns, _) in FORMATS.items()
            if any(Path(name).match(pattern) for name in names for pattern in patterns)
        ]
        if not found and images.has_images(folder):
            return images.read_images(folder, image_size)
        if len(found) != 1:
            kinds = " and ".join(found) or f"{len(names)} other files"
            raise DataError(f"{folder}: expected files of one data set, got {kinds}; {_looked_for()}")
    if image_size is not None:
        raise DataError(
            f"{source}: expected folders of images with an image size, got {image_size}; leave it out"
        )
    return FORMATS[found[0]][1](folder) if found else read_digits()


def _looked_for() -> str:
    kinds = [f"{kind} ({patterns[0]} ...)" for kind, (patterns, _) in FORMATS.items()]
    return f"name a folder with {' or '.join([*kinds, 'images (a folder for each class)'])}"
