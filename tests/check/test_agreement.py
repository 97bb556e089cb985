"""Whether rows agree: with BatchNorm they do once it is frozen, and a loss that mixes rows is told."""

from typing import Any

import torch
from torch import nn

from anybatch.check.compare import agree_in_forward, before_the_model, rows_agree
from anybatch.core.total import Total
from anybatch.testing import Perceptron
from tests.check.benches import ROWS, calls, court, cut

BATCH = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)), torch.ones(ROWS, 1)


def test_rows_agree_where_no_batch_norm_looks_at_them() -> None:
    ours = court(nn.Sequential(nn.BatchNorm1d(4), Perceptron(4, 1)), nn.MSELoss(), BATCH)
    parted = calls(ours.bench, cut(BATCH))
    assert not rows_agree(ours, ours.reference.calls, parted, cut(BATCH).parts)
    assert not agree_in_forward(ours, cut(BATCH))
    assert agree_in_forward(ours, cut(BATCH), frozen=True)


def test_loss_that_changes_what_goes_into_the_model_is_told() -> None:
    def centred(model: nn.Module, micro: Any) -> Total:
        return Total(model(micro[0] - micro[0].mean(0)).sum(), len(micro[0]))

    for loss, kinds in ((nn.MSELoss(), []), (centred, ["meeting"])):
        ours = court(Perceptron(4, 1), loss, BATCH)
        outermost = ours.reference.calls.parts[ours.whole.part]
        found = before_the_model(outermost, calls(ours.bench, cut(BATCH)), cut(BATCH).parts, ours, "mine")
        assert [finding.kind for finding in found] == kinds
