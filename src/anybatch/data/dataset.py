"""A data set in memory: normalized inputs, targets and class names."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.core import DataError
from anybatch.state import rng


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataset:
    """Rows in memory: one input and one class each."""

    inputs: Tensor  # normalized float32 images, (rows, channels, height, width)
    targets: Tensor  # int64 classes, (rows,), each an index into `classes`
    name: str  # for reports: "MNIST, training"
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.targets)


class DataSplit(NamedTuple):
    """Training rows and held-out rows of one shape, with the same classes."""

    train: Dataset
    test: Dataset


def hold_out_rows(rows: int, fraction: float, seed: int, *, name: str) -> tuple[Tensor, Tensor]:
    """Return the indices of remaining and of held-out rows, int64, in order."""
    count = round(rows * fraction)
    if not 0 < count < rows:
        raise DataError(
            f"{name}: expected a fraction that leaves rows on both sides, got {fraction}; "
            "use 0.1 to hold out a tenth"
        )
    generator = torch.Generator().manual_seed(rng.derive_seed(seed, "hold out"))
    order = torch.randperm(rows, generator=generator)
    return order[count:].sort().values, order[:count].sort().values


def check_classes(targets: Tensor, *, num_classes: int, name: str) -> None:
    """Raise DataError for targets outside `0 .. num_classes - 1`, with the first one."""
    outside = ((targets < 0) | (targets >= num_classes)).nonzero()
    if len(outside):
        row = int(outside[0])
        raise DataError(
            f"{name}: expected classes 0 to {num_classes - 1}, got {int(targets[row])} in row {row} "
            f"({len(outside)} such rows); the file is damaged or of another data set"
        )


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for a file that the operating system cannot read."""
    reason = error.strerror or error
    return DataError(f"{path}: expected a readable file, got: {reason}; check its name and permissions")


def import_extra(module: str, what: str, extra: str) -> Any:
    """Return a module of an extra; raise DataError if it is not installed.

    It is imported when it is needed: libraries that take seconds are no part of `import anybatch`.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise DataError(f'expected {what}, got: {error}; run: pip install "anybatch[{extra}]"') from None


def normalised(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    name: str,
    classes: tuple[str, ...],
    held_out: str = "test",
) -> DataSplit:
    """Return byte images, `(rows, channels, height, width)`, and their targets as a normalized split."""
    inputs = normalise(train[0], test[0])
    return DataSplit(
        train=Dataset(inputs=inputs[0], targets=train[1], name=f"{name}, training", classes=classes),
        test=Dataset(inputs=inputs[1], targets=test[1], name=f"{name}, {held_out}", classes=classes),
    )


def normalise(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each channel to mean 0 and standard deviation 1 over all training pixels.

    Held-out rows are scaled with the statistics of the training rows. These are computed from the 256 counts
    of each channel, so they do not depend on the order of rows or the number of threads.
    """
    levels = torch.arange(256, dtype=torch.float64)
    counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in train.unbind(1)])
    share = counts.double() / counts.sum(1, keepdim=True)
    mean = share @ levels
    deviation = ((share * (levels - mean[:, None]) ** 2).sum(1)).sqrt()
    deviation[deviation == 0] = 1.0  # a constant channel becomes 0, not NaN
    mean, deviation = (figure.float().view(1, -1, 1, 1) for figure in (mean, deviation))
    # In place: the float32 copy of the training images is the largest tensor of a small recipe.
    return train.float().sub_(mean).div_(deviation), test.float().sub_(mean).div_(deviation)
