"""Which module differs, and why."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.check.finding import Finding
from anybatch.check.modules import ComparedCall, ModuleSearch, ModuleTest
from anybatch.check.passes import Bench
from anybatch.check.rows import Axis
from anybatch.core.total import Total
from tests.check.benches import LIMIT, ROWS, bench, calls, cut
from tests.check.layers import (
    FAULTS,
    ByTurns,
    Centred,
    Crowded,
    Drifting,
    FromNumpy,
    Halved,
    Iterated,
    Leaving,
    Led,
    Marking,
    Placed,
    Pooled,
    Seeded,
    Shortened,
    Twins,
)

BATCH = (torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)),)


def loss(model: nn.Module, micro: Any) -> Total:
    outputs = model(micro[0])
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    return Total(first.square().sum(), len(first))


def search(model: nn.Module) -> tuple[list[Finding], list[Finding]]:
    ours, whole, parts = bench(model, loss), cut(BATCH, ROWS), cut(BATCH).parts
    found = ModuleSearch(
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


# ---- nature


INPUTS = (torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)),)


SAID = {
    Centred: f"{ROWS - 1} other rows of {ROWS}",
    Crowded: "rows are missing or replaced",
    Leaving: "rows are missing or replaced",
    FromNumpy: "NumPy",
    ByTurns: f"{ROWS} times for {ROWS} rows",
    Iterated: "buffers",
}


@pytest.mark.parametrize(
    ("layer", "fault", "unreplayed", "kind"),
    [
        (Centred, "outputs", 0, "meeting"),
        (Drifting, "outputs", 0, "state"),
        (Placed, "outputs", 0, "position"),
        (Seeded, "outputs", 1, "position"),
        (Shortened, "dropped rows", 0, "dropped rows"),
        (Halved, "gradients", 0, "detached"),
        (Pooled, "pooled", 0, "meeting"),
        (Led, "outputs", 0, "meeting"),
        (Twins, "outputs", 0, "meeting"),
        (Crowded, "outputs", 0, "meeting"),
        (Leaving, "outputs", 0, "meeting"),
        (FromNumpy, "outputs", 0, "position"),
        (ByTurns, "outputs", 0, "position"),
        (Iterated, "gradients", 0, "state"),
        (nn.Tanh, "outputs", 0, "unexplained"),
    ],
)
def test_each_is_told_by_its_kind(layer: type[nn.Module], fault: str, unreplayed: int, kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer())
    ours = bench(
        model, lambda model, micro: Total(model[0](micro[0]).sum() + 0 * len(model[1:](micro[0])), 1)
    )
    call = calls(ours, cut(INPUTS, ROWS)).table(cut(INPUTS).part)["1", 0]
    axes = [Axis(0, 1)]
    tested = ComparedCall(
        call=call, fault=fault, unreplayed=unreplayed, inputs=axes, outputs=axes * len(call.outputs)
    )
    finding = ModuleTest(bench=ours, total=ROWS, tolerance=LIMIT).explain(tested)
    assert finding.kind == kind
    assert finding.culprit == f"1 ({layer.__name__})"
    assert SAID.get(layer, "") in finding.what
    about_numbers = any("andom" in way or "torch.rand" in way for way in finding.ways_out)
    assert about_numbers == (layer in (Seeded, FromNumpy, ByTurns))


def of_last(layer: nn.Module) -> tuple[Bench, ComparedCall]:
    """A bench, and a layer whose outputs are said to differ."""
    ours = bench(nn.Sequential(nn.Linear(4, 4), layer), lambda m, micro: Total(m(micro[0]).sum(), 1))
    call = calls(ours, cut(INPUTS, ROWS)).table(cut(INPUTS).part)["1", 0]
    return ours, ComparedCall(call=call, fault="outputs", inputs=[Axis(0, 1)], outputs=[Axis(0, 1)])


def test_rows_are_changed_no_more_after_the_deadline() -> None:
    ours, tested = of_last(Led())
    assert "one is changed" in ModuleTest(bench=ours, total=ROWS, tolerance=LIMIT).explain(tested).what
    late = ModuleTest(bench=ours, total=ROWS, tolerance=LIMIT, deadline=0.0)
    assert "one is changed" not in late.explain(tested).what


class Fixed(nn.Module):
    """Cannot be cut in half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        if len(x) == ROWS // 2:
            raise ValueError("no")
        return x


def test_module_that_fails_on_other_rows_is_unexplained() -> None:
    ours, tested = of_last(Fixed())
    finding = ModuleTest(bench=ours, total=ROWS, tolerance=LIMIT).explain(tested)
    assert finding.kind == "unexplained"
    assert "ValueError" in finding.what
