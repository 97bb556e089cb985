"""Padding: found by masks and by tokens, cut off, and the module that looks at it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.check.padding import find_padding, first_difference, refilled, trimmed
from tests.check.benches import LIMIT, ROWS, bench, calls, cut

LENGTHS = torch.tensor([5, 3, 4, 1, 2, 5, 3, 2])
MASK = torch.arange(5) < LENGTHS[:, None]
TOKENS = torch.randint(1, 9, (ROWS, 5), generator=torch.Generator().manual_seed(0)) * MASK


@pytest.mark.parametrize(
    "batch",
    [
        {"x": TOKENS, "attention_mask": MASK.long()},
        {"x": TOKENS, "key_padding_mask": ~MASK},
        {"x": TOKENS, "mask": MASK.float()},
        (TOKENS, MASK, TOKENS),
        {"x": TOKENS, "target_padding_mask": MASK},
        ((TOKENS, MASK), torch.zeros(ROWS)),
    ],
)
def test_padding_is_told_by_a_mask(batch: Any) -> None:
    found = find_padding(batch, nn.Identity())
    assert found is not None
    assert (found.length, found.valid) == (5, tuple(LENGTHS.tolist()))
    assert "mask" in found.source or "[1]" in found.source


def test_padding_is_told_by_the_token() -> None:
    found = find_padding((TOKENS, torch.zeros(ROWS)), nn.Embedding(9, 2, padding_idx=0))
    assert found is not None
    assert found.valid == tuple(LENGTHS.tolist())
    labels = TOKENS.clone()
    labels[3, 4] = 7  # a target may stand where nothing goes in
    longer = find_padding((TOKENS, labels), nn.Embedding(9, 2, padding_idx=0))
    assert longer is not None
    assert longer.valid[3] == 5


@pytest.mark.parametrize(
    ("batch", "model"),
    [
        ((TOKENS,), nn.Embedding(9, 2)),
        ({"x": TOKENS, "mask": torch.tensor([[1, 0, 1, 0, 1]] * ROWS)}, nn.Identity()),  # picks places
        ({"x": TOKENS, "mask": torch.ones(ROWS, 5)}, nn.Identity()),
        ({"x": TOKENS, "mask": torch.rand(ROWS, 5)}, nn.Identity()),
        ((TOKENS.clamp(min=1),), nn.Embedding(9, 2, padding_idx=0)),
        ({"x": TOKENS, "y": MASK}, nn.Identity()),  # ordinal targets
        ((torch.randn(ROWS, 5), MASK), nn.Identity()),
        ({"x": torch.randn(ROWS, 5, 2), "target_mask": MASK.float()}, nn.Identity()),
        ({"x": torch.randn(ROWS, 5, 2), "loss_mask": MASK.float()}, nn.Identity()),
        ((torch.tensor([[1, 0, 2], [3, 4, 0]]),), nn.Embedding(9, 2, padding_idx=0)),  # a word too
    ],
)
def test_what_is_no_padding_is_left_alone(batch: Any, model: nn.Module) -> None:
    assert find_padding(batch, model) is None


def test_trimmed_rows_are_as_long_as_the_longest_of_them() -> None:
    pairs = MASK[:, :, None] & MASK[:, None]
    batch = {"x": TOKENS, "mask": MASK, "pairs": pairs, "y": torch.arange(ROWS)}
    padding = find_padding(batch, nn.Identity())
    assert padding is not None
    one, two, three = trimmed(cut(batch, ROWS), padding, 3).batch(None).cut(3)
    assert [micro["x"].shape[1] for micro in (one, two, three)] == [5, 5, 3]
    assert three["pairs"].shape == (2, 3, 3)
    assert three["x"].equal(TOKENS[6:, :3])
    assert two["y"].tolist() == [3, 4, 5]


def test_refilled_rows_differ_in_padded_places_alone() -> None:
    batch = {"tokens": TOKENS, "x": torch.randn(ROWS, 5, 2), "labels": TOKENS, "mask": MASK}
    padding = find_padding(batch, nn.Identity())
    assert padding is not None
    assert padding.is_masked
    other = refilled(cut(batch, ROWS), padding, 1).data
    for name in ("tokens", "x"):
        assert other[name][MASK].equal(batch[name][MASK])
        assert not (other[name][~MASK] == batch[name][~MASK]).any()
    assert other["labels"].equal(TOKENS)
    assert other["mask"].equal(MASK)


class Pool(nn.Module):
    """The mean over all places, filled up or not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, places, width) to (rows, width)."""
        return x.mean(1)


def test_module_that_looks_at_padding_is_the_first_whose_outputs_differ() -> None:
    model = nn.Sequential(
        nn.Embedding(9, 4, padding_idx=0), nn.Tanh(), nn.Sequential(Pool(), nn.Linear(4, 3))
    )
    batch = TOKENS, torch.arange(ROWS) % 3
    ours, padded = bench(model, nn.CrossEntropyLoss()), cut(batch, 1)
    padding = find_padding(batch, model)
    assert padding is not None
    short = trimmed(replace(padded, micro_batch=ROWS), padding, 1)
    long_calls, short_calls = calls(ours, padded), calls(ours, short)
    assert first_difference(padded.parts, long_calls, short_calls, LIMIT) == ("2.0", "2.0")
    assert first_difference(padded.parts, long_calls, long_calls, LIMIT) is None
