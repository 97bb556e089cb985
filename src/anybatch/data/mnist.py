"""MNIST and its relatives in IDX files, gzipped or not, checked against their header."""

import gzip
import zlib
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from anybatch.core import DataError
from anybatch.data.dataset import DataSplit, check_classes, normalised, unreadable

# Two zero bytes, and the code of unsigned bytes (http://yann.lecun.com/exdb/mnist/, "the IDX file format").
START = b"\0\0\x08"
STEMS = ("train-images", "train-labels", "t10k-images", "t10k-labels")
MARGIN = 2  # pixels of padding on each side, from 28x28 to the 32x32 of LeNet-5


def read_idx(path: Path) -> Tensor:
    """Return the unsigned bytes of one IDX file as a tensor; its first two bytes show if it is gzipped."""
    try:
        with path.open("rb") as raw:
            gzipped = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if gzipped else path.open("rb") as file:
            return _parse(bytearray(file.read()), path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: expected a whole gzip file, got one that does not unpack ({error}); fetch it again"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None


def read_mnist(folder: Path) -> DataSplit:
    """Read `train-images-idx3-ubyte` and the three other files of a folder, each with or without `.gz`.

    Inputs are float32 of shape (rows, 1, 32, 32), padded from 28 x 28 and normalized; targets are int64.

    Source: LeCun et al. 1998, "Gradient-based learning applied to document recognition", section II.B.
    """
    train_images, train_labels, test_images, test_labels = (_find(folder, stem) for stem in STEMS)
    train, test = _read_pair(train_images, train_labels), _read_pair(test_images, test_labels)
    return normalised(train, test, name="MNIST", classes=tuple("0123456789"))


def _find(folder: Path, stem: str) -> Path:
    kind = "idx3-ubyte" if stem.endswith("images") else "idx1-ubyte"
    names = [f"{stem}{mark}{kind}{end}" for mark in "-." for end in ("", ".gz")]
    found = [folder / name for name in names if (folder / name).exists()]
    if not found:
        raise DataError(
            f"{folder}: expected one of {', '.join(names)}, got none of them; add the missing file"
        )
    return found[0]


def _read_pair(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3 or images.shape[1:] != (28, 28):
        raise DataError(
            f"{images_path}: expected unsigned bytes of shape (rows, 28, 28), "
            f"got shape {tuple(images.shape)}; check that it holds the images of MNIST"
        )
    if labels.ndim != 1:
        raise DataError(
            f"{labels_path}: expected unsigned bytes of shape (rows,), "
            f"got shape {tuple(labels.shape)}; check that it holds the labels of MNIST"
        )
    if len(images) != len(labels) or not len(labels):
        raise DataError(
            f"{labels_path}: expected one label for each image of {images_path.name}, at least one, "
            f"got {len(labels)} labels and {len(images)} images; take both files from the same data set"
        )
    check_classes(labels, num_classes=10, name=str(labels_path))
    return functional.pad(images, (MARGIN,) * 4).unsqueeze(1), labels.long()


def _parse(data: bytearray, path: Path) -> Tensor:
    if len(data) < 4 or not data.startswith(START):
        raise DataError(
            f"{path}: expected an IDX file of unsigned bytes (00 00 08, the number of dimensions), "
            f"got {data[:4].hex(' ') or 'an empty file'}; check the path"
        )
    start = 4 + 4 * data[3]  # of the values
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, min(start, len(data)), 4))
    expected, found = prod(shape), len(data) - start
    if found != expected:
        got = f"{max(found, 0)}: the file is truncated"
        if found > expected:
            got = "more: the header or the file is damaged"
        raise DataError(
            f"{path}: expected {expected} bytes after the header, for shape {shape}, got {got}; "
            "fetch it again"
        )
    flat = (
        torch.frombuffer(data, dtype=torch.uint8, offset=start)
        if expected
        else torch.empty(0, dtype=torch.uint8)
    )
    return flat.view(shape)
