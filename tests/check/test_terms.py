"""Terms that do not add up: which, why, and by what they are to be divided; and where padding is."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Total, check
from anybatch.check.finding import Finding
from anybatch.check.rows import find_padding
from tests.zoo import Perceptron

ROWS = 8
GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.randint(0, 3, (ROWS, 3), generator=GENERATOR)
LABELS[torch.arange(3) >= torch.tensor([3, 1, 2, 3, 2, 1, 3, 3])[:, None]] = -100
BATCH = torch.randn(ROWS, 3, 4, generator=GENERATOR), LABELS
BALANCE = torch.tensor([0.5, 1.0, 4.0]).double()
OF_CLASSES = "BALANCE[micro[1][micro[1] >= 0]].sum()"


def losses(model: nn.Module, micro: Any, **more: Any) -> Tensor:
    return F.cross_entropy(model(micro[0]).transpose(1, 2), micro[1], **more)


def right(model: nn.Module, micro: Any) -> Total:
    return Total(losses(model, micro, reduction="sum"), (micro[1] != -100).sum())


def found(loss: Any) -> tuple[Finding, ...]:
    return check(Perceptron(4, 3), loss, BATCH).findings


@pytest.mark.parametrize(("loss", "code"), [
    (lambda m, b: Total(losses(m, b), 1), "(micro[1] != -100).sum()"),
    (lambda m, b: Total(losses(m, b) * len(b[0]), len(b[0])), "(micro[1] != -100).sum()"),
    (lambda m, b: Total(m(b[0]).square().mean(), 1), "len(micro[0])"),
    (lambda m, b: Total(losses(m, b, weight=BALANCE) * len(b[0]), len(b[0])), OF_CLASSES),
    (lambda m, b: Total(losses(m, (b[0][:, :-1], b[1][:, 1:])), 1), "(micro[1][:, 1:] != -100).sum()"),
], ids=["as one", "times rows", "of squares", "class weights", "shifted"])  # fmt: skip
def test_right_denominator_is_found(loss: Any, code: str) -> None:
    (finding,) = found(loss)
    assert (finding.kind, finding.culprit) == ("denominator", "term 'loss' of <lambda>")
    assert f"n = {code}" in finding.ways_out[0]
    assert "ab.Total(mean * n, n)" in finding.ways_out[0]


def squares(model: nn.Module, micro: Any) -> Tensor:
    return model(micro[0]).square().sum((1, 2))  # of each row


def unlisted_mean(model: nn.Module, micro: Any) -> Total:
    weight = (micro[1] == micro[1][:, :1]).sum(1) * 2 + 3
    return Total((squares(model, micro) * weight).sum() / weight.sum(), 1)


class Fading:
    """Divides by what it has seen before."""

    seen = 1.0

    def __call__(self, model: nn.Module, micro: Any) -> Total:
        self.seen += 1
        total = right(model, micro)
        return Total(total.sum / self.seen, total.weight)


def but_the_last(model: nn.Module, micro: Any) -> Total:
    each = squares(model, micro)[: max(1, len(micro[0]) - 1)]
    return Total(each.sum(), len(each))


def seeded(model: nn.Module, micro: Any) -> Total:
    torch.manual_seed(0)
    each = squares(model, micro)
    return Total((each * torch.rand(len(each))).sum(), len(each))


def one_wrong(model: nn.Module, micro: Any) -> dict[str, Any]:
    return {"main": right(model, micro), "mean": Total(losses(model, micro), 1)}


def bare(model: nn.Module, micro: Any) -> Tensor:
    return model(micro[0]).square().mean()


@pytest.mark.parametrize(("loss", "kind", "culprit", "said"), [
    (Fading(), "state", "", ""),
    (unlisted_mean, "meeting", "", ""),  # no candidate divides it
    (but_the_last, "position", "", ""),
    (seeded, "position", "", ""),
    (bare, "denominator", "", r"bare mean.*the rows"),  # even where it adds up
    (one_wrong, "denominator", "term 'mean' of one_wrong", ""),
])  # fmt: skip
def test_faults_of_a_loss_are_told_apart(loss: Any, kind: str, culprit: str, said: str) -> None:
    (finding,) = found(loss)
    assert finding.kind == kind
    assert culprit in finding.culprit
    assert re.search(said, finding.what)


# ---- where padding is

FILLED = torch.tensor([5, 3, 4, 1, 2, 5, 3, 2])
MASK = torch.arange(5) < FILLED[:, None]
TOKENS = torch.randint(1, 9, (8, 5), generator=torch.Generator().manual_seed(0)) * MASK
TARGETS = TOKENS.clone()
TARGETS[3, 4] = 7  # a target may stand where nothing goes in
LONGER = torch.where(torch.arange(8) == 3, 5, FILLED)
WORDS, SAME = nn.Embedding(9, 2, padding_idx=0), nn.Identity()


@pytest.mark.parametrize(("batch", "model", "valid"), [
    ({"x": TOKENS, "attention_mask": MASK.long()}, SAME, FILLED),
    ({"x": TOKENS, "key_padding_mask": ~MASK}, SAME, FILLED),
    ({"x": TOKENS, "mask": MASK.float()}, SAME, FILLED),
    ((TOKENS, MASK, TOKENS), SAME, FILLED),
    ((TOKENS, torch.zeros(8)), WORDS, FILLED),
    ((TOKENS, TARGETS), WORDS, LONGER),
    ((TOKENS,), nn.Embedding(9, 2), None),
    ({"x": TOKENS, "mask": torch.tensor([[1, 0, 1, 0, 1]] * 8)}, SAME, None),  # picks places
    ({"x": TOKENS, "mask": torch.ones(8, 5)}, SAME, None),
    ((TOKENS.clamp(min=1),), WORDS, None),
    ({"x": TOKENS, "y": MASK}, SAME, None),  # ordinal targets
    ((torch.randn(8, 5), MASK), SAME, None),
    ({"x": torch.randn(8, 5, 2), "loss_mask": MASK.float()}, SAME, None),
    ((torch.tensor([[1, 0, 2], [3, 4, 0]]),), WORDS, None),  # a word too
])  # fmt: skip
def test_padding_is_told_by_a_mask_or_a_token(batch: Any, model: nn.Module, valid: Tensor | None) -> None:
    found = find_padding(batch, model)
    assert (found is None) == (valid is None)
    if found is not None and valid is not None:
        assert (found.length, found.valid) == (5, tuple(valid.tolist()))
        assert model is WORDS or "mask" in found.source or "[1]" in found.source
