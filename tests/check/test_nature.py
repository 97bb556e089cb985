"""How modules differ: each in its own words."""

import pytest
import torch
from torch import nn

from anybatch.check.modules import Nature, Tried
from anybatch.check.passes import Bench
from anybatch.check.rows import Axis
from anybatch.core.total import Total
from tests.check.benches import LIMIT, ROWS, bench, calls, cut
from tests.check.layers import (
    ByTurns,
    Centred,
    Crowded,
    Drifting,
    FromNumpy,
    Halved,
    Iterated,
    Leaving,
    Led,
    Placed,
    Pooled,
    Seeded,
    Shortened,
    Twins,
)

BATCH = (torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)),)


SAID = {
    Centred: f"{ROWS - 1} other rows of {ROWS}",
    Crowded: "among fewer or other rows",
    Leaving: "among fewer or other rows",
    FromNumpy: "NumPy",
    ByTurns: f"{ROWS} times for {ROWS} rows",
    Iterated: "buffers",
}


@pytest.mark.parametrize(
    ("layer", "fault", "strangers", "kind"),
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
def test_each_is_told_by_its_kind(layer: type[nn.Module], fault: str, strangers: int, kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer())
    ours = bench(
        model, lambda model, micro: Total(model[0](micro[0]).sum() + 0 * len(model[1:](micro[0])), 1)
    )
    call = calls(ours, cut(BATCH, ROWS)).table(cut(BATCH).part)["1", 0]
    axes = [Axis(0, 1)]
    tried = Tried(call=call, fault=fault, strangers=strangers, inputs=axes, outputs=axes * len(call.outputs))
    finding = Nature(bench=ours, total=ROWS, tolerance=LIMIT).explain(tried)
    assert finding.kind == kind
    assert finding.culprit == f"1 ({layer.__name__})"
    assert SAID.get(layer, "") in finding.what
    about_numbers = any("andom" in way or "torch.rand" in way for way in finding.ways_out)
    assert about_numbers == (layer in (Seeded, FromNumpy, ByTurns))


def of_last(layer: nn.Module) -> tuple[Bench, Tried]:
    """A bench, and a layer whose outputs are said to differ."""
    ours = bench(nn.Sequential(nn.Linear(4, 4), layer), lambda m, micro: Total(m(micro[0]).sum(), 1))
    call = calls(ours, cut(BATCH, ROWS)).table(cut(BATCH).part)["1", 0]
    return ours, Tried(call=call, fault="outputs", inputs=[Axis(0, 1)], outputs=[Axis(0, 1)])


def test_rows_are_changed_no_more_after_the_deadline() -> None:
    ours, tried = of_last(Led())
    assert "is changed" in Nature(bench=ours, total=ROWS, tolerance=LIMIT).explain(tried).what
    late = Nature(bench=ours, total=ROWS, tolerance=LIMIT, deadline=0.0)
    assert "is changed" not in late.explain(tried).what


class Fixed(nn.Module):
    """Cannot be cut in half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        if len(x) == ROWS // 2:
            raise ValueError("no")
        return x


def test_module_that_fails_on_other_rows_is_unexplained() -> None:
    ours, tried = of_last(Fixed())
    finding = Nature(bench=ours, total=ROWS, tolerance=LIMIT).explain(tried)
    assert finding.kind == "unexplained"
    assert "ValueError" in finding.what
