"""Real data sets from files: digits, MNIST, CIFAR-10."""

from anybatch.data.dataset import Dataset, Split, hold_out
from anybatch.data.idx import read_idx
from anybatch.data.open import load

__all__ = ["Dataset", "Split", "hold_out", "load", "read_idx"]
