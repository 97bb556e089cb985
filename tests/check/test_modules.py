"""Modules that differ: the innermost, all of them, and none that is sound."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.check.finding import Finding
from anybatch.check.modules import Search
from anybatch.core.total import Total
from tests.check.benches import LIMIT, ROWS, bench, calls, cut
from tests.check.layers import FAULTS, Centred, Drifting, Marking, Pooled

BATCH = (torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)),)


def loss(model: nn.Module, micro: Any) -> Total:
    outputs = model(micro[0])
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    return Total(first.square().sum(), len(first))


def search(model: nn.Module) -> tuple[list[Finding], list[Finding]]:
    ours, whole, parts = bench(model, loss), cut(BATCH, ROWS), cut(BATCH).parts
    found = Search(
        bench=ours,
        parts=parts,
        table=calls(ours, cut(BATCH)).table(parts[0]),
        tolerance=LIMIT,
        deadline=time.perf_counter() + 60,
    )
    return found.find(calls(ours, whole).parts[whole.part])


@pytest.mark.parametrize("layer", FAULTS.values())
def test_innermost_module_is_found_at_any_depth(layer: type[nn.Module]) -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.5), nn.Sequential(layer(), nn.Tanh())), nn.Linear(4, 2)
    )
    findings, pooled = search(model)
    assert [finding.culprit for finding in findings] == [f"1.1.0 ({layer.__name__})"]
    assert pooled == []


def test_all_are_found_and_sound_ones_are_not() -> None:
    model = nn.Sequential(Centred(), nn.Linear(4, 4), Drifting(), nn.Dropout(0.5), nn.LayerNorm(4), Centred())
    findings, _ = search(model)
    assert [finding.culprit for finding in findings] == ["0 (Centred)", "2 (Drifting)", "5 (Centred)"]
    assert search(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.GroupNorm(2, 4))) == ([], [])


def test_module_that_asks_for_gradients_of_its_inputs_is_run_by_itself() -> None:
    findings, _ = search(nn.Sequential(Marking(), nn.Linear(4, 4)))
    assert [finding.culprit for finding in findings] == ["0 (Marking)"]


def test_value_for_all_rows_is_kept_apart() -> None:
    findings, pooled = search(nn.Sequential(nn.Linear(4, 4), Pooled()))
    assert findings == []
    assert [finding.culprit for finding in pooled] == ["1 (Pooled)"]
