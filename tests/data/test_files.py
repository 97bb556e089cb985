"""Files of data sets, images and text, and the digits: what was written is read; what is damaged is named."""

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
from anybatch.data import digits, load, read_blocks, read_lines
from anybatch.data.cifar10 import read_cifar10
from anybatch.data.dataset import hold_out_rows, normalise
from anybatch.data.images import read_images
from anybatch.data.mnist import read_idx, read_mnist
from anybatch.testing import relative_error, tolerance

CODES = {torch.uint8: 8, torch.float32: 13}
LOOKED_FOR = r"name a folder with MNIST in IDX form \(train-im.*CIFAR-10 in binary form \(data_batch_\*\.bin"
TRAIN_ROWS, TEST_ROWS = 12, 5
FILES = {"data_batch_1": (4, 0), "data_batch_2": (3, 4), "test_batch": (2, 8)}  # rows, first label


def idx_header(code: int, shape: Sequence[int]) -> bytes:
    return bytes([0, 0, code, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)


def idx_bytes(values: Tensor) -> bytes:
    return idx_header(CODES[values.dtype], values.shape) + values.contiguous().numpy().tobytes()


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
    for name, (rows, label) in FILES.items():
        (folder / f"{name}.bin").write_bytes(cifar10_bytes(rows, first_label=label))


def read(folder: Path, data: bytes, name: str = "some-idx") -> Tensor:
    (folder / name).write_bytes(data)
    return read_idx(folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tmp_path_factory.mktemp("idx")


@given(shape=st.lists(st.integers(0, 4), max_size=4), gzipped=st.booleans(), seed=st.integers(0, 99))
def test_what_was_written_is_read(folder: Path, shape: list[int], gzipped: bool, seed: int) -> None:
    values = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    data = idx_bytes(values)
    found = read(folder, gzip.compress(data) if gzipped else data)
    assert torch.equal(found, values)
    found.zero_()  # it may be written to


@pytest.mark.parametrize(("data", "message"), [
    (b"", "expected an IDX file .* got an empty file"),
    (b"\0\0\x08", "expected an IDX file .* got 00 00 08"),
    (b"\0\0\x0a\x01", "unsigned bytes .* got 00 00 0a 01"),
    (idx_header(8, (2, 3)) + bytes(5), r"6 bytes after the header.* shape \(2, 3\), got 5: .*truncated"),
    (idx_header(8, (2, 3)) + bytes(7), "expected 6 bytes after the header, .* got more"),
    (idx_header(8, (2, 3))[:-1], "truncated"),
])  # fmt: skip
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


def test_pixels_are_red_then_green_then_blue_row_by_row(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    record = bytes([5]) + bytes(pixel // 1024 * 64 + pixel % 32 for pixel in range(3072))
    (tmp_path / "data_batch_1.bin").write_bytes(record + record)
    (tmp_path / "data_batch_2.bin").unlink()
    split = read_cifar10(tmp_path)
    assert (split.train.targets.tolist(), split.test.targets.tolist()) == ([5, 5], [8, 9])
    column = torch.arange(32, dtype=torch.float64)
    ramp = (column - column.mean()) / column.std(correction=0)  # in every row of every colour
    found = split.train.inputs[0].double()
    assert relative_error(found, ramp.expand(3, 32, 32)) <= tolerance(torch.float32, 1)


@pytest.mark.parametrize("name", ["data_batch_2.bin", "test_batch.bin"])
@pytest.mark.parametrize(("data", "message"), [
    (b"", "at least one, got 0 bytes"),
    (cifar10_bytes(2)[:-1], "records of 3073 bytes, .* got 6145 bytes, 3072 past the last whole record"),
    (cifar10_bytes(1) + b"\0", "got 3074 bytes, 1 past"),
    (cifar10_bytes(1) + b"\x0a" + bytes(3072), "classes 0 to 9, got 10 in row 1"),
])  # fmt: skip
def test_damaged_records_are_refused_by_name(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    write_cifar10(tmp_path)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name}: expected .*{message}"):
        read_cifar10(tmp_path)


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


# ---- rows that are held out, and the digits


@given(st.integers(1, 40), st.integers(0, 5))
def test_normalising_is_the_textbook_formula(rows: int, seed: int) -> None:
    drawn = torch.rand(rows + 3, 3, 4, 5, generator=torch.Generator().manual_seed(seed))
    both = (drawn * torch.tensor([256, 31, 2]).view(1, 3, 1, 1)).to(torch.uint8)
    train, test = both.split([rows, 3])
    mean = train.double().mean((0, 2, 3), keepdim=True)
    deviation = train.double().std((0, 2, 3), keepdim=True, correction=0)
    before, order = both.clone(), torch.randperm(rows)
    found = normalise(train, test)
    assert torch.equal(both, before)
    assert torch.equal(normalise(train[order], test)[1], found[1])  # to the bit
    for actual, images in zip(found, (train, test), strict=True):
        assert actual.dtype == torch.float32
        expected = (images.double() - mean) / deviation
        assert relative_error(actual, expected) <= tolerance(torch.float32, 1)


@given(st.integers(2, 60), st.integers(0, 9), st.sampled_from([-0.5, 0.0, 0.1, 0.25, 0.5, 0.9, 1.0, 1.5]))
def test_held_out_rows_are_the_rest(rows: int, seed: int, fraction: float) -> None:
    if not 0 < round(rows * fraction) < rows:
        with pytest.raises(DataError, match=f"toy: .*rows on both sides.* got {fraction}"):
            hold_out_rows(rows, fraction, seed, name="toy")
        return
    stay, held_out = hold_out_rows(rows, fraction, seed, name="toy")
    assert len(held_out) == round(rows * fraction)
    assert torch.equal(hold_out_rows(rows, fraction, seed, name="toy")[1], held_out)
    assert torch.equal(torch.cat([stay, held_out]).sort().values, torch.arange(rows))
    for part in (stay, held_out):
        assert torch.equal(part, part.sort().values)


def test_the_split_is_fixed_and_stratified() -> None:
    """Another split would silently make every published accuracy another number."""
    split = digits.read_digits()
    assert split.test.targets[:12].tolist() == [0, 9, 5, 6, 8, 4, 1, 7, 3, 2, 0, 3]
    held_out = split.test.targets.bincount()
    everything = held_out + split.train.targets.bincount()
    assert int(everything.sum()) == 1797
    assert torch.equal(held_out, everything // 4)
    train = {image.numpy().tobytes() for image in split.train.inputs}
    assert not train & {image.numpy().tobytes() for image in split.test.inputs}
    marks = digits.held_out_rows(torch.tensor([2, 0, 2, 2, 0, 2, 0, 0, 2])).tolist()
    assert marks == [False] * 5 + [True, False, True, False]  # every fourth row of its class


# ---- folders of images


def put(folder: Path, count: int, size: tuple[int, int] = (6, 5)) -> Tensor:
    """Images of a class, as bytes (count, 3, height, width)."""
    pillow = pytest.importorskip("PIL.Image")
    folder.mkdir(parents=True)
    pixels = torch.randint(256, (count, *size[::-1], 3), dtype=torch.uint8)
    for number, image in enumerate(pixels):
        pillow.fromarray(image.numpy()).save(folder / f"{number}.png")
    return pixels.permute(0, 3, 1, 2)


def test_every_fifth_image_of_a_class_is_held_out(tmp_path: Path) -> None:
    cats, dogs = put(tmp_path / "cat", 5), put(tmp_path / "dog", 6)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    split = load(tmp_path)
    train, test = normalise(torch.cat([cats[:4], dogs[:4], dogs[5:]]), torch.stack([cats[4], dogs[4]]))
    assert torch.equal(split.train.inputs, train)
    assert torch.equal(split.test.inputs, test)
    assert (split.train.classes, split.test.targets.tolist()) == (("cat", "dog"), [0, 1])
    assert split.train.targets.tolist() == [0] * 4 + [1] * 5


def test_images_of_several_sizes_need_one(tmp_path: Path) -> None:
    put(tmp_path / "a", 5)
    put(tmp_path / "b", 5, size=(7, 5))
    with pytest.raises(DataError, match=r"images of one size, got 7 x 5 where 0.png has 6 x 5; .*image-size"):
        load(tmp_path)
    assert load(tmp_path, image_size=8).train.inputs.shape == (8, 3, 8, 8)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "a", 5)
    with pytest.raises(DataError, match=r"two classes or more.*got 1 classes, 4 images to learn and 1 to"):
        read_images(tmp_path)
    put(tmp_path / "b", 5)
    whole = (tmp_path / "b" / "2.png").read_bytes()
    for damaged in (b"", b"no image", whole[: len(whole) // 2]):
        (tmp_path / "b" / "2.png").write_bytes(damaged)
        with pytest.raises(DataError, match=r"2\.png: expected an image"):
            load(tmp_path)


# ---- text

TEXT = "".join(chr(97 + n * n % 23) for n in range(1234))


def test_blocks_are_the_text_and_targets_one_further(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    blocks = read_blocks(str(tmp_path / "a.txt"), 10)
    assert blocks.vocabulary == "".join(sorted(set(TEXT)))
    for whole, (inputs, targets) in ((TEXT[:-123], blocks.train), (TEXT[-123:], blocks.test)):
        rows = (len(whole) - 1) // 10
        assert inputs.shape == targets.shape == (rows, 10)
        read = ["".join(blocks.vocabulary[i] for i in part.flatten()) for part in (inputs, targets)]
        assert read == [whole[: rows * 10], whole[1 : rows * 10 + 1]]


def test_every_tenth_line_is_held_out_with_its_label(tmp_path: Path) -> None:
    rows = [(f"label {n % 3}", f"text\tnumber {n}") for n in range(25)]
    (tmp_path / "a.txt").write_text("\n\n".join(f"{label}\t {text}" for label, text in rows))
    lines = read_lines(str(tmp_path / "a.txt"), labelled=True)
    assert lines.classes == ("label 0", "label 1", "label 2")
    assert [(lines.classes[n], t) for n, t in zip(lines.test_labels, lines.test, strict=True)] == rows[9::10]
    there = [(lines.classes[n], text) for n, text in zip(lines.train_labels, lines.train, strict=True)]
    assert there == [row for n, row in enumerate(rows) if n % 10 != 9]


@pytest.mark.parametrize(("content", "words"), [
    (None, "expected a readable file"),
    (b"", "got 0 characters"),
    (b" \n\t\n", "all blank"),
    (b"\xff\xfe\x00", "expected text in UTF-8"),
    (b"a\tb\n" * 9, "at least 10 lines with text, got 9"),
    (b"a\tb\n" * 12, "two labels or more, got only 'a'"),
    (b"a\tb\n" * 5 + b"c d\n", "got 'c d' in line 6; write label<TAB>text"),
    (b"a\tb\n" * 5 + b"\td\n", r"in line 6"),
    (b"a\tb\n" * 5 + b"c\t\n", r"in line 6"),
])  # fmt: skip
def test_what_is_no_labelled_text_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"{re.escape(str(path))}(.|\n)*{re.escape(words)}"):
        read_lines(str(path), labelled=True)
