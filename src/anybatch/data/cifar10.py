"""CIFAR-10 in its binary form: records of one label byte and 3072 pixel bytes."""

from pathlib import Path

import torch
from torch import Tensor

from anybatch.core import DataError
from anybatch.data.dataset import DataSplit, check_classes, normalised, unreadable

RECORD_BYTES = 1 + 3 * 32 * 32
TRAIN, TEST = "data_batch_*.bin", "test_batch*.bin"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_cifar10(folder: Path) -> DataSplit:
    """Read `data_batch_*.bin` and `test_batch*.bin` of a folder, in the order of their names.

    Inputs are float32 of shape (rows, 3, 32, 32), each channel normalized; targets are int64, 0 to 9.

    Source: Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
    """
    train, test = _read_all(folder, TRAIN), _read_all(folder, TEST)
    return normalised(train, test, name="CIFAR-10", classes=CLASSES)


def _read_all(folder: Path, pattern: str) -> tuple[Tensor, Tensor]:
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise DataError(f"{folder}: expected files named {pattern}, got none; add the missing files")
    records = torch.cat([_read_records(path) for path in paths])
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def _read_records(path: Path) -> Tensor:
    try:
        data = bytearray(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from None
    if not data or len(data) % RECORD_BYTES:
        raise DataError(
            f"{path}: expected a whole number of records of {RECORD_BYTES} bytes, at least one, "
            f"got {len(data)} bytes, {len(data) % RECORD_BYTES} past the last whole record; "
            f"the file is truncated or not CIFAR-10 binary: fetch it again"
        )
    records = torch.frombuffer(data, dtype=torch.uint8).view(-1, RECORD_BYTES)
    check_classes(records[:, 0], num_classes=len(CLASSES), name=str(path))
    return records
