"""Where padding is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch.check.rows import find_padding

LENGTHS = torch.tensor([5, 3, 4, 1, 2, 5, 3, 2])
MASK = torch.arange(5) < LENGTHS[:, None]
TOKENS = torch.randint(1, 9, (8, 5), generator=torch.Generator().manual_seed(0)) * MASK


TARGETS = TOKENS.clone()
TARGETS[3, 4] = 7  # a target may stand where nothing goes in
LONGER = torch.where(torch.arange(8) == 3, 5, LENGTHS)
WORDS, SAME = nn.Embedding(9, 2, padding_idx=0), nn.Identity()


@pytest.mark.parametrize(
    ("batch", "model", "valid"),
    [
        ({"x": TOKENS, "attention_mask": MASK.long()}, SAME, LENGTHS),
        ({"x": TOKENS, "key_padding_mask": ~MASK}, SAME, LENGTHS),
        ({"x": TOKENS, "mask": MASK.float()}, SAME, LENGTHS),
        ((TOKENS, MASK, TOKENS), SAME, LENGTHS),
        ((TOKENS, torch.zeros(8)), WORDS, LENGTHS),
        ((TOKENS, TARGETS), WORDS, LONGER),
        ((TOKENS,), nn.Embedding(9, 2), None),
        ({"x": TOKENS, "mask": torch.tensor([[1, 0, 1, 0, 1]] * 8)}, SAME, None),  # picks places
        ({"x": TOKENS, "mask": torch.ones(8, 5)}, SAME, None),
        ((TOKENS.clamp(min=1),), WORDS, None),
        ({"x": TOKENS, "y": MASK}, SAME, None),  # ordinal targets
        ((torch.randn(8, 5), MASK), SAME, None),
        ({"x": torch.randn(8, 5, 2), "loss_mask": MASK.float()}, SAME, None),
        ((torch.tensor([[1, 0, 2], [3, 4, 0]]),), WORDS, None),  # a word too
    ],
)
def test_padding_is_told_by_a_mask_or_a_token(batch: Any, model: nn.Module, valid: Tensor | None) -> None:
    found = find_padding(batch, model)
    assert (found is None) == (valid is None)
    if found is not None and valid is not None:
        assert (found.length, found.valid) == (5, tuple(valid.tolist()))
        assert model is WORDS or "mask" in found.source or "[1]" in found.source
