"""How modules differ: each in its own words."""

import pytest
import torch
from torch import nn

from anybatch.probe.nature import Nature, Tried
from anybatch.probe.rows import Axis
from anybatch.total import Total
from tests.probe.benches import LIMIT, ROWS, bench, calls, cut
from tests.probe.layers import Centred, Drifting, Halved, Placed, Pooled, Seeded, Shortened

BATCH = (torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)),)


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
    if layer is Centred:
        assert f"{ROWS - 1} other rows of {ROWS}" in finding.what
