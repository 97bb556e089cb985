"""Scikit-learn's handwritten digits, 8x8 brought to 32x32, with a fixed held-out split."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from anybatch.core import DataError
from anybatch.data.dataset import Split, normalised

HELD_OUT_EVERY = 4  # one row in four of each class, the share that scikit-learn holds out by default
TOP_LEVEL = 16  # scikit-learn's pixels count ink in 4x4 blocks: 0 to 16


def read_digits() -> Split:
    """Read the 1797 digits that come with scikit-learn; every fourth one of each class is held out.

    The split draws nothing: within each class the 4th, 8th, 12th ... row is held out, so it is stratified
    and the same on every machine. 1352 rows stay. Inputs are float32 of shape (rows, 1, 32, 32), interpolated
    bilinearly and normalised; targets are int64, 0 to 9.

    Source: Alpaydin and Kaynak, "Optical recognition of handwritten digits", UCI, 1998 (its test set).
    """
    images, targets = _load()
    large = functional.interpolate(images[:, None], scale_factor=4, mode="bilinear", align_corners=False)
    images = (large * (255 / TOP_LEVEL)).round().to(torch.uint8)  # bytes, as the other readers have them
    held_out = held_out_rows(targets)
    train, test = (images[~held_out], targets[~held_out]), (images[held_out], targets[held_out])
    return normalised(train, test, name="digits", classes=tuple("0123456789"), held_out="held out")


def held_out_rows(targets: Tensor) -> Tensor:
    """Mark every fourth row of each class, counted within the class, in the order given."""
    seen_in_class = functional.one_hot(targets).cumsum(0).gather(1, targets[:, None]).squeeze(1)
    return seen_in_class % HELD_OUT_EVERY == 0


def _load() -> tuple[Tensor, Tensor]:
    """Images float32 `(1797, 8, 8)` and targets int64; the one contact with untyped scikit-learn."""
    try:
        # Imported when asked for: an extra that costs seconds must not be part of `import anybatch`.
        digits: Any = import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise DataError(
            f"expected scikit-learn, which holds the digits, got: {error}; "
            'run: pip install "anybatch[digits]"'
        ) from None
    return torch.as_tensor(digits.images).float(), torch.as_tensor(digits.target).long()
