"""Real data sets from files: digits, MNIST, CIFAR-10, folders of images, text."""

from anybatch.data.dataset import (
    Dataset as Dataset,
    DataSplit as DataSplit,
    hold_out_rows as hold_out_rows,
    import_extra as import_extra,
)
from anybatch.data.load import load as load
from anybatch.data.mnist import read_idx as read_idx
from anybatch.data.text import Lines as Lines, read_blocks as read_blocks, read_lines as read_lines
