"""Files of data sets: what was written is read; a damaged or missing file is refused by name."""

import gzip
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anybatch.core.errors import DataError
from anybatch.data.cifar10 import read_cifar10
from anybatch.data.load import load
from anybatch.data.mnist import read_idx, read_mnist
from anybatch.testing import relative_error, tolerance

CODES = {torch.uint8: 8, torch.float32: 13}
TRAIN_ROWS, TEST_ROWS = 12, 5


def idx_header(code: int, shape: Sequence[int]) -> bytes:
    return bytes([0, 0, code, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)


def idx_bytes(values: Tensor) -> bytes:
    body = values.contiguous().numpy()
    return idx_header(CODES[values.dtype], values.shape) + body.tobytes()


def images(rows: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(256, (rows, *shape), dtype=torch.uint8, generator=generator)


def labels(rows: int) -> Tensor:
    return (torch.arange(rows) % 10).to(torch.uint8)


def write_mnist(folder: Path, *, end: str = "", mark: str = "-") -> dict[str, Tensor]:
    """The four files of MNIST, gzipped where `end` is ".gz"; returns what is in them."""
    parts = {
        f"{part}-{what}": values
        for part, rows in (("train", TRAIN_ROWS), ("t10k", TEST_ROWS))
        for what, values in (("images", images(rows, 28, 28)), ("labels", labels(rows)))
    }
    for stem, values in parts.items():
        data = idx_bytes(values)
        path = folder / f"{stem}{mark}idx{values.ndim}-ubyte{end}"
        path.write_bytes(gzip.compress(data) if end else data)
    return parts


def cifar10_bytes(rows: int, *, first_label: int = 0) -> bytes:
    pixels = images(rows, 3072)
    return b"".join(bytes([(first_label + row) % 10]) + bytes(pixels[row].tolist()) for row in range(rows))


def write_cifar10(folder: Path) -> None:
    for name, rows, label in (("data_batch_1", 4, 0), ("data_batch_2", 3, 4), ("test_batch", 2, 8)):
        (folder / f"{name}.bin").write_bytes(cifar10_bytes(rows, first_label=label))


def read(folder: Path, data: bytes, name: str = "some-idx") -> Tensor:
    path = folder / name
    path.write_bytes(data)
    return read_idx(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tmp_path_factory.mktemp("idx")


@given(shape=st.lists(st.integers(0, 4), max_size=4), gzipped=st.booleans(), seed=st.integers(0, 99))
def test_what_was_written_is_read(folder: Path, shape: list[int], gzipped: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    data = idx_bytes(values)
    found = read(folder, gzip.compress(data) if gzipped else data)
    assert torch.equal(found, values)
    found.zero_()  # it may be written to


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected an IDX file .* got an empty file"),
        (b"\0\0\x08", "expected an IDX file .* got 00 00 08"),
        (b"\0\0\x0a\x01", "unsigned bytes .* got 00 00 0a 01"),
        (idx_header(8, (2, 3)) + bytes(5), r"6 bytes after the header.* shape \(2, 3\), got 5: .*truncated"),
        (idx_header(8, (2, 3)) + bytes(7), "expected 6 bytes after the header, .* got more"),
        (idx_header(8, (2, 3))[:-1], "truncated"),
    ],
)
@pytest.mark.parametrize("gzipped", [False, True])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, data: bytes, message: str, gzipped: bool) -> None:
    with pytest.raises(DataError, match=f"some-idx: .*{message}"):
        read(tmp_path, gzip.compress(data) if gzipped else data)


@pytest.mark.parametrize(("end", "mark"), [("", "-"), (".gz", ".")])
def test_mnist(tmp_path: Path, end: str, mark: str) -> None:
    parts = write_mnist(tmp_path, end=end, mark=mark)
    split = read_mnist(tmp_path)
    assert split.train.classes == tuple("0123456789")
    # The pixels are where they belong: undo the scaling, found from two levels of the training images.
    scaled, raw = split.train.inputs[:, 0, 2:30, 2:30], parts["train-images"]
    dark, bright = scaled[raw == 0][0], scaled[raw == 255][0]
    for part, stem, count in ((split.train, "train", TRAIN_ROWS), (split.test, "t10k", TEST_ROWS)):
        assert part.inputs.shape == (count, 1, 32, 32)
        assert torch.equal(part.targets, parts[f"{stem}-labels"].long())
        found = ((part.inputs[:, 0] - dark) / (bright - dark) * 255).round().to(torch.uint8)
        expected = torch.nn.functional.pad(parts[f"{stem}-images"], (2, 2, 2, 2))  # background all around
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("stem", "values", "message"),
    [
        ("train-images", labels(TRAIN_ROWS), r"shape \(rows, 28, 28\), got shape \(12,\)"),
        ("t10k-images", images(TEST_ROWS, 28, 28).float(), "unsigned bytes .* got 00 00 0d 03"),
        ("train-labels", labels(TRAIN_ROWS - 1), "each image of train-images.*, .* got 11 labels and 12"),
        ("t10k-labels", labels(0), "got 0 labels and 5"),
        ("train-labels", labels(TRAIN_ROWS) + 1, "classes 0 to 9, got 10 in row 9"),
    ],
)
def test_mnist_files_that_belong_not_together(tmp_path: Path, stem: str, values: Any, message: str) -> None:
    write_mnist(tmp_path)
    next(tmp_path.glob(f"{stem}*")).write_bytes(idx_bytes(values))
    with pytest.raises(DataError, match=f"{stem}.*: expected .*{message}"):
        read_mnist(tmp_path)
    next(tmp_path.glob(f"{stem}*")).unlink()
    with pytest.raises(DataError, match=f"{re.escape(str(tmp_path))}: expected one of {stem}-idx"):
        read_mnist(tmp_path)


def test_pixels_are_red_then_green_then_blue_row_by_row(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    pixels = range(3072)
    record = bytes([5]) + bytes(pixel // 1024 * 64 + pixel % 32 for pixel in pixels)
    (tmp_path / "data_batch_1.bin").write_bytes(record + record)
    (tmp_path / "data_batch_2.bin").unlink()
    split = read_cifar10(tmp_path)
    assert (split.train.targets.tolist(), split.test.targets.tolist()) == ([5, 5], [8, 9])
    image = split.train.inputs[0].double()
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
def test_damaged_records_are_refused_by_name(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    write_cifar10(tmp_path)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name}: expected .*{message}"):
        read_cifar10(tmp_path)


LOOKED_FOR = r"name a folder with MNIST in IDX form \(train-im.*CIFAR-10 in binary form \(data_batch_\*\.bin"


def test_folders_are_recognised(tmp_path: Path) -> None:
    mnist, cifar10 = tmp_path / "a", tmp_path / "b"
    for folder, write in ((mnist, write_mnist), (cifar10, write_cifar10)):
        folder.mkdir()
        write(folder)
        (folder / "README.md").touch()  # other files do not matter
    assert load(str(mnist)).train.name == "MNIST, training"
    assert load(cifar10).train.name == "CIFAR-10, training"
    assert load("digits").test.name == "digits, held out"


def test_what_holds_no_data_set_is_refused(tmp_path: Path) -> None:
    makes: dict[str, Any] = {
        "'digits' or a folder that can be read, got: No such file or directory": lambda _: None,
        "files of one data set, got 1 other files": lambda one: (one.mkdir(), (one / "cats.zip").touch()),
        "got MNIST in IDX form and CIFAR-10 in binary": lambda one: (write_mnist(one), write_cifar10(one)),
    }
    for message, make in makes.items():
        make(tmp_path / "some-data")
        with pytest.raises(DataError, match=f"some-data: expected .*{message}.*{LOOKED_FOR}"):
            load(tmp_path / "some-data")
