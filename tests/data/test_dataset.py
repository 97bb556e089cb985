"""Normalising learns from the training rows alone; the digits."""

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anybatch.core.errors import DataError
from anybatch.data import digits
from anybatch.data.dataset import DataSplit, hold_out_rows, normalise
from anybatch.testing import relative_error, tolerance


def draw_images(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tops = torch.tensor([256, 31, 2]).view(1, 3, 1, 1)
    return (torch.rand(rows, 3, 4, 5, generator=generator) * tops).to(torch.uint8)


@given(st.integers(1, 40), st.integers(0, 5))
def test_normalising_is_the_textbook_formula(rows: int, seed: int) -> None:
    train, test = draw_images(rows, seed), draw_images(3, seed + 100)
    exact = train.double()
    mean = exact.mean((0, 2, 3), keepdim=True)
    deviation = exact.std((0, 2, 3), keepdim=True, correction=0)
    bound = tolerance(torch.float32, 1)
    before, order = (train.clone(), test.clone()), torch.randperm(rows)
    found = normalise(train, test)
    assert torch.equal(train, before[0])
    assert torch.equal(test, before[1])
    assert torch.equal(normalise(train[order], test)[1], found[1])  # to the bit
    for actual, images in zip(found, (train, test), strict=True):
        assert actual.dtype == torch.float32
        assert relative_error(actual, (images.double() - mean) / deviation) <= bound


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


@pytest.fixture(scope="module")
def split() -> DataSplit:
    return digits.read_digits()


def test_the_split_is_fixed_and_stratified(split: DataSplit) -> None:
    """Another split would silently make every published accuracy another number."""
    assert split.test.targets[:12].tolist() == [0, 9, 5, 6, 8, 4, 1, 7, 3, 2, 0, 3]
    held_out = split.test.targets.bincount()
    everything = held_out + split.train.targets.bincount()
    assert int(everything.sum()) == 1797
    assert torch.equal(held_out, everything // 4)
    train = {image.numpy().tobytes() for image in split.train.inputs}
    assert not train & {image.numpy().tobytes() for image in split.test.inputs}
    marks = digits.held_out_rows(torch.tensor([2, 0, 2, 2, 0, 2, 0, 0, 2])).tolist()
    assert marks == [False] * 5 + [True, False, True, False]  # every fourth row of its class
