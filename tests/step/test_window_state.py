"""Windows saved half-way: what goes on from there is the same to the bit; what does not fit is refused."""

import copy
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anybatch import Step
from anybatch.core.errors import CheckpointError, WindowError
from tests.device import needs_sparse
from tests.halves import CASES, TERMS, begun, build, ended, restore, rows, save
from tests.snapshots import changes, same, same_as_before, snapshot


@pytest.mark.parametrize("name", CASES)
def test_a_window_that_was_saved_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    step, other = build(**CASES[name]), build(**CASES[name])
    overflowing = step.scale.is_dynamic
    window = begun(step, overflowing=overflowing)
    there = window.state()
    save(tmp_path / "a", step, window=there)
    before = copy.deepcopy(there)
    expected = ended(step, window)
    assert same(there, before)
    assert (expected[0].redone > 0, expected[0].scale > 1) == (overflowing, overflowing)
    for _ in range(2):  # twice: going on must not write into the state
        found = restore(tmp_path / "a", other)
        assert same([*map(told, ended(other, other.window(found["window"])))], [*map(told, expected)])
        assert changes(snapshot(step), snapshot(other)) == []


def told(report: Any) -> dict[str, Any]:
    return {one.name: getattr(report, one.name) for one in fields(report) if one.compare}


@pytest.mark.parametrize("policy", ["skip", "drop"])
def test_rows_that_were_not_finite_stay_counted(policy: Any) -> None:
    step = build(non_finite=policy)
    window = step.window()
    assert window.state()["cut"] == []
    window.add((rows(0)[0] * math.nan, rows(0)[1]))
    found = window.state()
    window.discard()
    again = step.window(found)
    again.add(rows(1))
    report = again.close()
    assert (report.updated, report.rows) == (policy == "drop", 7)
    assert (report.dropped, report.cut) == (3 if policy == "drop" else 0, (3, 4))


@needs_sparse
def test_a_window_with_sparse_sums_is_not_saved() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 4))
    window = Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)).window()
    window.add((torch.randint(5, (3, 2)), torch.randint(4, (3,))))
    with pytest.raises(WindowError, match="got sparse ones"):
        window.state()
    assert window.close().updated


def other_values(step: Step) -> None:
    with torch.no_grad():
        step.model[0].weight[0, 0] += 1e-6


def own(model: nn.Module, micro: Any) -> Any:
    raise AssertionError


def freeze(step: Step) -> None:
    step.model[0].requires_grad_(False)


def reshape(step: Step) -> None:
    step.model[4].bias.data = torch.zeros(7)


SUM = nn.CrossEntropyLoss(reduction="sum")
REFUSED: dict[str, tuple[dict[str, Any], Callable[[Step], object], str]] = {
    "precision": ({"precision": "bf16-mixed"}, id, "precision is float32 there and bf16-mixed here"),
    "non_finite": ({"non_finite": "drop"}, id, "non_finite is raise there and drop here"),
    "compensated": ({"compensated": True}, id, "compensated is False there and True here"),
    "accumulate": ({"accumulate": torch.float64}, id, "accumulate is auto there and float64 here"),
    "batch_norm": ({"batch_norm": "frozen"}, id, "batch_norm is micro there and frozen here"),
    "loss": ({"loss": own}, id, r"loss is CrossEntropyLoss\(.* there and own\(\) here"),
    "reduction": ({"loss": SUM}, id, "reduction='mean'.* there and .*reduction='sum'"),
    "terms": ({"loss": TERMS}, id, r"loss is CrossEntropyLoss\(.* there and terms\(\) here \(2 differ\)"),
    "frozen": ({}, freeze, r"0.weight is torch.float32 \(5, 3\) .* there and missing here"),
    "shape": ({}, reshape, r"4.bias is torch.float32 \(4,\) .* there and torch.float32 \(7,\) .* here"),
    "values": ({}, other_values, r"0.weight is .* the checksum .* restore first the model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_of_another_step_is_refused_and_nothing_is_changed(name: str) -> None:
    options, change, words = REFUSED[name]
    found = build().window()
    found.add(rows(0))
    there = found.state()
    step = build(**options)
    change(step)
    for parameter in step.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    with same_as_before(step), pytest.raises(CheckpointError, match=words):
        step.window(there)
    assert step.open_window is None


def fit(state: dict[str, Any]) -> dict[int, torch.Tensor]:
    """The sums of the first term, by parameter."""
    return state["gradients"]["banks"]["fit"]


DAMAGED: dict[str, Callable[[dict[str, Any]], object]] = {
    **{
        f"no {name}": lambda state, name=name: state.pop(name)
        for name in ("format", "made", "cut", "fold", "gradients", "scale", "scale_before")
    },
    "another format": lambda state: state.update(format="window 0"),
    "a sum of another shape": lambda state: fit(state).update({0: torch.zeros(2, 2)}),
    "a sum of another dtype": lambda state: fit(state).update({0: torch.zeros(5, 3).half()}),
    "a sum for nobody": lambda state: fit(state).update({99: torch.zeros(5, 3)}),
    "other terms": lambda state: state["gradients"]["banks"].update(third={}),
    "a scale in words": lambda state: state["scale"].update(value="large"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_state_is_refused_and_nothing_is_changed(name: str) -> None:
    step = build(**CASES["several terms"])
    window = begun(step)
    there = window.state()
    window.discard()
    DAMAGED[name](there)
    with same_as_before(step), pytest.raises(CheckpointError, match=r"as Window.state\(\) .*cannot be read"):
        step.window(there)
    assert step.open_window is None


def test_a_window_that_is_over_has_no_state() -> None:
    window = begun(build())
    window.discard()
    with pytest.raises(WindowError, match="a window that is open to be saved, got one that is closed"):
        window.state()


@pytest.mark.parametrize(("there", "here"), [(None, "micro"), ("micro", None)])
def test_nothing_chosen_for_batch_norm_gives_the_sums_of_micro(there: Any, here: Any) -> None:
    """Older states say "micro" for both."""
    found = build(batch_norm=there).window()
    found.add(rows(0))
    assert found.state()["made"]["batch_norm"] == "micro"
    assert build(batch_norm=here).window(found.state()).rows == found.rows
