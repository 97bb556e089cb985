"""Writes the files of small data sets, byte by byte, as their authors describe them."""

import gzip
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

CODES = {
    torch.uint8: 0x08,
    torch.int8: 0x09,
    torch.int16: 0x0B,
    torch.int32: 0x0C,
    torch.float32: 0x0D,
    torch.float64: 0x0E,
}
TRAIN_ROWS, TEST_ROWS = 12, 5


def idx_header(code: int, shape: Sequence[int]) -> bytes:
    return bytes([0, 0, code, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)


def idx_bytes(values: Tensor) -> bytes:
    """An IDX file: header and numbers, all big-endian."""
    body = values.contiguous().numpy()
    return idx_header(CODES[values.dtype], values.shape) + body.astype(body.dtype.newbyteorder(">")).tobytes()


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
    """Two training files and a test file."""
    (folder / "data_batch_1.bin").write_bytes(cifar10_bytes(4))
    (folder / "data_batch_2.bin").write_bytes(cifar10_bytes(3, first_label=4))
    (folder / "test_batch.bin").write_bytes(cifar10_bytes(2, first_label=8))
