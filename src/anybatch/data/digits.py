"""Scikit-learn's handwritten digits, 8x8 scaled to 32x32, with a fixed held-out split."""

import torch
from torch import Tensor
from torch.nn import functional

from anybatch.data.dataset import DataSplit, import_extra, normalised

HELD_OUT_EVERY = 4  # one row in four of each class, scikit-learn's default share
TOP_LEVEL = 16  # pixels are ink counts of 4x4 blocks: 0 to 16


def read_digits() -> DataSplit:
    """Read the 1797 digits of scikit-learn; every fourth digit of each class is held out.

    The split is stratified and the same on every machine. 1352 rows remain. Inputs are float32 of shape
    (rows, 1, 32, 32), interpolated bilinearly and normalized; targets are int64, 0 to 9.

    Source: Alpaydin and Kaynak, "Optical recognition of handwritten digits", UCI, 1998 (its test set).
    """
    digits = import_extra("sklearn.datasets", "scikit-learn, which holds the digits", "digits").load_digits()
    images, targets = torch.as_tensor(digits.images).float(), torch.as_tensor(digits.target).long()
    large = functional.interpolate(images[:, None], scale_factor=4, mode="bilinear", align_corners=False)
    images = (large * (255 / TOP_LEVEL)).round().to(torch.uint8)  # bytes, like the other readers
    held_out = held_out_rows(targets)
    train, test = (images[~held_out], targets[~held_out]), (images[held_out], targets[held_out])
    return normalised(train, test, name="digits", classes=tuple("0123456789"), held_out="held out")


def held_out_rows(targets: Tensor) -> Tensor:
    """Return a mask of every fourth row of each class, counted within the class."""
    seen_in_class = functional.one_hot(targets).cumsum(0).gather(1, targets[:, None]).squeeze(1)
    return seen_in_class % HELD_OUT_EVERY == 0
