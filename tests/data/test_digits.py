"""The digits of scikit-learn: the split is fixed, stratified and complete."""

import sys

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)
import torch

from anybatch.core.errors import DataError
from anybatch.data import digits
from anybatch.data.dataset import Split, normalise


@pytest.fixture(scope="module")
def split() -> Split:
    return digits.read_digits()


def test_the_split_is_fixed(split: Split) -> None:
    """Another split would silently make every published accuracy another number."""
    assert split.test.targets[:12].tolist() == [0, 9, 5, 6, 8, 4, 1, 7, 3, 2, 0, 3]
    again = digits.read_digits()
    assert torch.equal(split.test.inputs, again.test.inputs)
    assert torch.equal(split.train.inputs, again.train.inputs)


def test_the_split_is_stratified(split: Split) -> None:
    held_out = split.test.targets.bincount()
    everything = held_out + split.train.targets.bincount()
    assert int(everything.sum()) == 1797
    assert torch.equal(held_out, everything // 4)
    train = {image.numpy().tobytes() for image in split.train.inputs}
    assert not train & {image.numpy().tobytes() for image in split.test.inputs}
    marks = digits.held_out_rows(torch.tensor([2, 0, 2, 2, 0, 2, 0, 0, 2])).tolist()
    assert marks == [False] * 5 + [True, False, True, False]  # every fourth row of its class


def test_images_are_the_small_ones_enlarged(split: Split) -> None:
    """Between the centres of two pixels lie four new ones, at 1/8, 3/8, 5/8 and 7/8 of the way."""
    small, targets = digits._load()
    held_out = digits.held_out_rows(targets)
    place = ((torch.arange(32) + 0.5) / 4 - 0.5).clamp(0, 7)
    weights = (1 - (place[:, None] - torch.arange(8)).abs()).clamp(min=0)  # (32, 8)
    large = (weights @ small @ weights.T * 255 / 16).round().to(torch.uint8)[:, None]
    train, test = normalise(large[~held_out], large[held_out])
    assert torch.equal(split.train.inputs, train)
    assert torch.equal(split.test.inputs, test)
    assert torch.equal(split.test.targets, targets[held_out])


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"expected scikit-learn.*pip install \"anybatch\[digits\]\""):
        digits.read_digits()
