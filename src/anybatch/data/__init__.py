"""Real data sets from files: digits, MNIST, CIFAR-10, folders of images, text."""

from anybatch.data.dataset import Dataset, Split, hold_out, hold_out_rows
from anybatch.data.load import load
from anybatch.data.mnist import read_idx
from anybatch.data.text import Lines, read_blocks, read_lines

__all__ = [
    "Dataset",
    "Lines",
    "Split",
    "hold_out",
    "hold_out_rows",
    "load",
    "read_blocks",
    "read_idx",
    "read_lines",
]
