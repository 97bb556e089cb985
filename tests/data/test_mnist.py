"""IDX files: what was written is read; a damaged file is refused by name."""

import gzip
import io
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anybatch.core.errors import DataError
from anybatch.data.mnist import read_idx, read_mnist
from tests.data.files import CODES, TEST_ROWS, TRAIN_ROWS, idx_bytes, idx_header, images, labels, write_mnist

SHAPES = st.lists(st.integers(0, 4), max_size=4)


def read(folder: Path, data: bytes, name: str = "some-idx") -> Tensor:
    path = folder / name
    path.write_bytes(data)
    return read_idx(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("idx")


@given(shape=SHAPES, dtype=st.sampled_from(list(CODES)), gzipped=st.booleans(), seed=st.integers(0, 99))
def test_what_was_written_is_read(
    folder: Path, shape: list[int], dtype: torch.dtype, gzipped: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-(2**30), 2**30, shape, generator=generator).to(dtype)
    data = idx_bytes(values)
    found = read(folder, gzip.compress(data) if gzipped else data)
    assert found.dtype == dtype
    assert torch.equal(found, values)
    found.zero_()  # it may be written to


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected an IDX file .* got an empty file"),
        (b"\0\0\x08", "expected an IDX file .* got 00 00 08"),
        (b"\0\0\x0a\x01", "a dtype code among 0x08, .* got 00 00 0a 01"),
        (
            idx_header(8, (2, 3)) + bytes(5),
            r"expected 6 bytes after the header, .* shape \(2, 3\), got 5: .* truncated",
        ),
        (idx_header(8, (2, 3)) + bytes(7), "expected 6 bytes after the header, .* got more"),
        (idx_header(8, (2, 3))[:-1], "truncated"),
        (idx_header(8, (2**32 - 1,) * 40) + bytes(9), "got 9: the file is truncated"),
    ],
)
@pytest.mark.parametrize("gzipped", [False, True])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, data: bytes, message: str, gzipped: bool) -> None:
    with pytest.raises(DataError, match=f"some-idx: .*{message}"):
        read(tmp_path, gzip.compress(data) if gzipped else data)


def test_a_gzip_file_with_a_changed_byte_is_refused_or_the_same(folder: Path) -> None:
    values = images(3, 4, 5)
    data = gzip.compress(idx_bytes(values), mtime=0)
    refused = 0
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 0x10
        try:
            found = read(folder, bytes(changed))
        except DataError as error:
            assert "some-idx" in str(error)  # noqa: PT017
            refused += 1
        else:
            assert torch.equal(found, values), f"byte {place}"
    assert refused >= len(data) - 10  # gzip's own header says when and where it was packed: no data
    for damaged in (*[data[:size] for size in range(len(data))], data + b"more"):
        with pytest.raises(DataError, match="some-idx: expected"):
            read(folder, damaged)


def test_a_file_that_unpacks_to_too_much_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked = []
    original = gzip.GzipFile.read
    monkeypatch.setattr(
        gzip.GzipFile, "read", lambda self, size=-1: unpacked.append(piece := original(self, size)) or piece
    )
    with pytest.raises(DataError, match="got more"):
        read(tmp_path, gzip.compress(idx_bytes(labels(4)) + bytes(10_000_000)))
    assert sum(map(len, unpacked)) < 100


# ---- MNIST


def test_what_is_no_file_or_breaks_off_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    for name, reason in ((".", "Is a"), ("missing", "No such"), ("failing", "Input/output error")):
        if name == "failing":
            monkeypatch.setattr(Path, "open", lambda *_: Failing())
        with pytest.raises(DataError, match=f"expected a readable file, got: {reason}"):
            read_idx(tmp_path / name)


@pytest.mark.parametrize(("end", "mark"), [("", "-"), (".gz", ".")])
def test_mnist(tmp_path: Path, end: str, mark: str) -> None:
    parts = write_mnist(tmp_path, end=end, mark=mark)
    split = read_mnist(tmp_path)
    assert split.train.inputs.shape == (TRAIN_ROWS, 1, 32, 32)
    assert split.test.inputs.shape == (TEST_ROWS, 1, 32, 32)
    assert torch.equal(split.train.targets, parts["train-labels"].long())
    assert torch.equal(split.test.targets, parts["t10k-labels"].long())
    assert split.train.classes == tuple("0123456789")
    # The pixels are where they belong: undo the scaling, found from two levels of the training images.
    scaled, raw = split.train.inputs[:, 0, 2:30, 2:30], parts["train-images"]
    dark, bright = scaled[raw == 0][0], scaled[raw == 255][0]
    for rows, original in ((split.train, raw), (split.test, parts["t10k-images"])):
        found = ((rows.inputs[:, 0] - dark) / (bright - dark) * 255).round().to(torch.uint8)
        assert torch.equal(found[:, 2:30, 2:30], original)
        found[:, 2:30, 2:30] = 0
        assert not found.any()  # background all around


def change_mnist(folder: Path, stem: str, values: Tensor) -> None:
    (path,) = folder.glob(f"{stem}*")
    path.write_bytes(idx_bytes(values))


@pytest.mark.parametrize(
    ("stem", "values", "message"),
    [
        ("train-images", labels(TRAIN_ROWS), r"shape \(rows, 28, 28\), got torch\.uint8 of shape \(12,\)"),
        ("t10k-images", images(TEST_ROWS, 28, 28).float(), r"unsigned bytes .* got torch\.float32"),
        ("t10k-labels", labels(TEST_ROWS).int(), r"unsigned bytes .* got torch\.int32"),
        ("train-labels", labels(TRAIN_ROWS - 1), "each image of train-images.*, .* got 11 labels and 12"),
        ("t10k-labels", labels(0), "got 0 labels and 5"),
        ("train-labels", labels(TRAIN_ROWS) + 1, "classes 0 to 9, got 10 in row 9"),
    ],
)
def test_mnist_files_that_do_not_belong_together(
    tmp_path: Path, stem: str, values: Tensor, message: str
) -> None:
    write_mnist(tmp_path)
    change_mnist(tmp_path, stem, values)
    with pytest.raises(DataError, match=f"{stem}.*: expected .*{message}"):
        read_mnist(tmp_path)
    if not len(values):
        change_mnist(tmp_path, "t10k-images", images(0, 28, 28))
        with pytest.raises(DataError, match="got 0 labels and 0 images"):
            read_mnist(tmp_path)
    next(tmp_path.glob(f"{stem}*")).unlink()
    with pytest.raises(DataError, match=f"{re.escape(str(tmp_path))}: expected one of {stem}-idx"):
        read_mnist(tmp_path)
