"""A data set in memory: normalized inputs, targets and class names."""

from dataclasses import dataclass, replace
from pathlib import Path

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

    def __post_init__(self) -> None:
        if self.inputs.ndim != 4 or self.inputs.dtype != torch.float32:
            raise DataError(
                f"{self.name}: expected float32 inputs of shape (rows, channels, height, width), "
                f"got {self.inputs.dtype} of shape {tuple(self.inputs.shape)}; convert them first"
            )
        if self.targets.ndim != 1 or self.targets.dtype != torch.int64:
            raise DataError(
                f"{self.name}: expected int64 targets of shape (rows,), "
                f"got {self.targets.dtype} of shape {tuple(self.targets.shape)}; convert them first"
            )
        if len(self.inputs) != len(self.targets) or not len(self.targets):
            raise DataError(
                f"{self.name}: expected one target for each input and at least one row, "
                f"got {len(self.inputs)} inputs and {len(self.targets)} targets; take both from one data set"
            )
        check_classes(self.targets, num_classes=len(self.classes), name=self.name)

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataSplit:
    """Training rows and held-out rows of one shape, with the same classes."""

    train: Dataset
    test: Dataset

    def __post_init__(self) -> None:
        train, test = self.train, self.test
        if train.inputs.shape[1:] != test.inputs.shape[1:] or train.classes != test.classes:
            raise DataError(
                f"expected {train.name} and {test.name} to agree in the shape of a row and in the classes, "
                f"got {tuple(train.inputs.shape[1:])} with {len(train.classes)} classes and "
                f"{tuple(test.inputs.shape[1:])} with {len(test.classes)}; take both from the same data set"
            )


def hold_out(rows: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split a fraction of validation rows off training rows; both keep their order."""
    stay, held_out = hold_out_rows(len(rows), fraction, seed, name=rows.name)
    validation = replace(rows, inputs=rows.inputs[held_out], targets=rows.targets[held_out])
    return (
        replace(rows, inputs=rows.inputs[stay], targets=rows.targets[stay]),
        replace(validation, name=f"{rows.name}, validation"),
    )


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


def normalised(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    name: str,
    classes: tuple[str, ...],
    held_out: str = "test",
) -> DataSplit:
    """Return byte images, `(rows, channels, height, width)`, and their targets as a normalized split."""
    train_inputs, test_inputs = normalise(train[0], test[0])
    return DataSplit(
        train=Dataset(inputs=train_inputs, targets=train[1], name=f"{name}, training", classes=classes),
        test=Dataset(inputs=test_inputs, targets=test[1], name=f"{name}, {held_out}", classes=classes),
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
