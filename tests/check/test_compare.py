"""Cuts compared with the whole batch, and whether the model gives each row the same."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.check.compare import before_the_model, cut_sizes_to_try, limit_of, rows_agree, rows_agree_on
from anybatch.core.total import Total
from anybatch.testing import Perceptron
from tests.check.benches import ROWS, calls, comparison, cut

BATCH = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)), torch.ones(ROWS, 1)


@pytest.mark.parametrize("rows", range(2, 40))
@pytest.mark.parametrize("own", [None, 1, 4, 100])
def test_cuts_are_ragged_where_they_can_be(rows: int, own: int | None) -> None:
    sizes = cut_sizes_to_try(rows, own)
    assert sizes[-1] == 1 or own == 1
    assert len(set(sizes)) == len(sizes)
    assert all(size < rows for size in sizes)
    assert any(rows % size for size in sizes) or rows == 2
    assert own is None or own >= rows or sizes[0] == own


def test_limits_follow_the_shortest_dtype() -> None:
    limits = [limit_of([torch.float64, dtype], 8) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    assert limits == sorted(limits)
    assert limits[0] < 1e-11 < limits[1] < 1e-3 < limits[2] < 0.1


def test_sound_cut_holds_and_mean_of_means_does_not() -> None:
    sound = comparison(Perceptron(4, 1), nn.MSELoss(), BATCH)
    assert sound.cut_by(3).holds(sound.limit)
    broken = comparison(
        Perceptron(4, 1), lambda model, micro: Total((model(micro[0]) - micro[1]).square().mean(), 1), BATCH
    )
    verdict = broken.cut_by(3)
    assert not verdict.holds(broken.limit)
    assert verdict.words == "3+3+2"
    assert 0 < verdict.error < math.inf


def test_error_is_infinite_where_a_cut_fails() -> None:
    def whole_only(model: nn.Module, micro: Any) -> Total:
        if len(micro[0]) < ROWS:
            raise RuntimeError("too few")
        return Total(model(micro[0]).sum(), len(micro[0]))

    verdict = comparison(Perceptron(4, 1), whole_only, BATCH).cut_by(3)
    assert verdict.error == math.inf
    assert isinstance(verdict.result.error, RuntimeError)


def test_rows_that_cancel_are_measured_by_their_own_size() -> None:
    """The gradient of the whole is rounding: relative to it, any cut is far off."""
    x = torch.randn(ROWS // 2, 4, dtype=torch.float64).repeat(2, 1)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(ROWS // 2)[:, None]

    def signed(model: nn.Module, micro: Any) -> Total:
        return Total((model(micro[0]).exp() * micro[1]).sum(), len(micro[0]))

    ours = comparison(Perceptron(4, 1), signed, (x * 1.1, sign))
    assert ours.cut_by(3).holds(ours.limit)
    assert ours.compare(cut((x, sign), 3), ours.reference).loss_error <= ours.limit


# ---- agreement


LABELLED = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)), torch.ones(ROWS, 1)


def test_rows_agree_where_no_batch_norm_looks_at_them() -> None:
    ours = comparison(nn.Sequential(nn.BatchNorm1d(4), Perceptron(4, 1)), nn.MSELoss(), LABELLED)
    parted = calls(ours.bench, cut(LABELLED))
    assert not rows_agree(ours, ours.reference.calls, parted, cut(LABELLED).parts)
    assert not rows_agree_on(ours.bench, ours, cut(LABELLED))
    assert rows_agree_on(replace(ours.bench, batch_norm="frozen"), ours, cut(LABELLED))


def test_loss_that_changes_what_goes_into_the_model_is_told() -> None:
    def centred(model: nn.Module, micro: Any) -> Total:
        return Total(model(micro[0] - micro[0].mean(0)).sum(), len(micro[0]))

    for loss, kinds in ((nn.MSELoss(), []), (centred, ["meeting"])):
        ours = comparison(Perceptron(4, 1), loss, LABELLED)
        outermost = ours.reference.calls.parts[ours.whole.part]
        found = before_the_model(
            outermost, calls(ours.bench, cut(LABELLED)), cut(LABELLED).parts, ours, "mine"
        )
        assert [finding.kind for finding in found] == kinds
