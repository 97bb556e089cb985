"""CIFAR-10 files: records are read in the order of the files; a damaged file is refused by name."""

from pathlib import Path

import pytest
import torch

from anybatch.core.errors import DataError
from anybatch.data.cifar10 import CLASSES, read_cifar10
from anybatch.testing import relative_error, tolerance
from tests.data.files import cifar10_bytes, write_cifar10


def test_records_are_read_in_the_order_of_the_files(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    split = read_cifar10(tmp_path)
    assert split.train.inputs.shape == (7, 3, 32, 32)
    assert split.test.inputs.shape == (2, 3, 32, 32)
    assert split.train.targets.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert split.test.targets.tolist() == [8, 9]
    assert split.train.classes == CLASSES


def test_pixels_are_red_then_green_then_blue_row_by_row(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    pixels = range(3072)
    record = bytes([5]) + bytes(pixel // 1024 * 64 + pixel % 32 for pixel in pixels)
    (tmp_path / "data_batch_1.bin").write_bytes(record + record)
    (tmp_path / "data_batch_2.bin").unlink()
    image = read_cifar10(tmp_path).train.inputs[0].double()
    column = torch.arange(32, dtype=torch.float64)
    expected = (column - column.mean()) / column.std(correction=0)  # every row of every colour is a ramp
    assert relative_error(image, expected.expand(3, 32, 32)) <= tolerance(torch.float32, 1)


@pytest.mark.parametrize("name", ["data_batch_2.bin", "test_batch.bin"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "at least one, got 0 bytes"),
        (cifar10_bytes(2)[:-1], "records of 3073 bytes, .* got 6145 bytes, 3072 past the last whole record"),
        (cifar10_bytes(1) + b"\0", "got 3074 bytes, 1 past"),
        (cifar10_bytes(1) + b"\x0a" + bytes(3072), "classes 0 to 9, got 10 in row 1"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    write_cifar10(tmp_path)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name}: expected .*{message}"):
        read_cifar10(tmp_path)


@pytest.mark.parametrize(
    ("gone", "pattern"), [("data_batch_*", r"data_batch_\*\.bin"), ("test_*", "test_batch")]
)
def test_missing_files_are_named(tmp_path: Path, gone: str, pattern: str) -> None:
    write_cifar10(tmp_path)
    for path in tmp_path.glob(gone):
        path.unlink()
    with pytest.raises(DataError, match=f"expected files named {pattern}"):
        read_cifar10(tmp_path)
    (tmp_path / f"{gone.rstrip('*')}3.bin".replace("test_", "test_batch")).mkdir()
    with pytest.raises(DataError, match=r"3\.bin: expected a readable file, got: Is a directory"):
        read_cifar10(tmp_path)
