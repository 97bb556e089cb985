"""Real data sets from files: digits, MNIST, CIFAR-10."""

from anybatch.data.dataset import Dataset, Split, hold_out
from anybatch.data.load import load
from anybatch.data.mnist import read_idx

__all__ = ["Dataset", "Split", "hold_out", "load", "read_idx"]
