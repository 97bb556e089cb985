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
from anybatch.core.errors import CheckpointError, LossError, WindowError
from tests.halves import CASES, TERMS, begun, build, ended, restore, rows, save
from tests.snapshots import changes, same, snapshot


def raising(error: Exception) -> Callable[..., Any]:
    def throw(*_: Any) -> Any:
        raise error

    return throw


def state(step: Step) -> dict[str, Any]:
    masters = {str(number): value.clone() for number, value in enumerate(step.masters.tensors)}
    return snapshot(step) | masters | {"scale": step.scale.state()}


@pytest.mark.parametrize("name", CASES)
def test_a_window_that_was_saved_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    step, other = build(**CASES[name]), build(**CASES[name])
    overflowing = step.scale.is_dynamic
    window = begun(step, overflowing=overflowing)
    save(tmp_path / "a", step, window=window.state())
    expected = ended(step, window)
    assert (expected[0].redone > 0, expected[0].scale > 1) == (overflowing, overflowing)
    for _ in range(2):  # twice: going on must not write into the state
        found = restore(tmp_path / "a", other)
        assert same([*map(told, ended(other, other.window(found["window"])))], [*map(told, expected)])
        assert changes(state(step), state(other)) == []


def told(report: Any) -> dict[str, Any]:
    return {one.name: getattr(report, one.name) for one in fields(report) if one.compare}


def test_nothing_chosen_for_batch_norm_gives_the_sums_of_micro() -> None:
    """Older states say "micro" for both."""
    for there, here in ((None, "micro"), ("micro", None)):
        found = build(batch_norm=there).window()
        found.add(rows(0))
        assert found.state()["made"]["batch_norm"] == "micro"
        assert build(batch_norm=here).window(found.state()).rows == found.rows


def test_the_loss_scale_that_gave_way_is_saved_along(tmp_path: Path) -> None:
    """And it would be seen if it were not."""
    options = CASES["fp16-true"]
    step, other = build(**options), build(**options)
    window = begun(step)
    step.scale.give_way()
    save(tmp_path / "a", step, window=window.state())
    other.window(restore(tmp_path / "a", other)["window"])
    assert other.scale.state() == step.scale.state() != build(**options).scale.state()


def test_a_state_is_a_copy(tmp_path: Path) -> None:
    for options in (CASES["float32"], CASES["several terms, fp16-true, compensated"]):
        step = build(**options)
        window = begun(step)
        found = window.state()
        before = copy.deepcopy(found)
        ended(step, window)
        assert same(found, before)


@pytest.mark.parametrize("saved", [True, False])
def test_a_micro_batch_that_fails_before_it_begins_leaves_the_window_as_it_was(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, other = build(), build()
    window = begun(step)
    save(tmp_path / "a", step, window=window.state())
    expected = ended(step, window)
    again = other.window(restore(tmp_path / "a", other)["window"]) if saved else begun(other)
    with monkeypatch.context() as patch:
        patch.setattr(other.planning, "of_window", raising(RuntimeError("no plan")))
        with pytest.raises(RuntimeError, match="no plan"):
            again.add(rows(2))
    assert ended(other, again) == expected
    assert changes(state(step), state(other)) == []


def test_an_empty_window_and_one_that_was_skipped() -> None:
    step = build()
    assert step.window().state()["cut"] == []
    step.open_window.discard()  # type: ignore[union-attr]
    step = build(non_finite="skip")
    window = step.window()
    window.add((rows(0)[0] * math.nan, rows(0)[1]))
    found = window.state()
    window.discard()
    again = step.window(found)
    again.add(rows(1))
    report = again.close()
    assert (report.updated, report.rows) == (False, 7)


def test_rows_that_were_left_out_stay_counted() -> None:
    step = build(non_finite="drop")
    window = step.window()
    window.add((rows(0)[0] * math.nan, rows(0)[1]))
    found = window.state()
    window.discard()
    again = step.window(found)
    again.add(rows(1))
    report = again.close()
    assert (report.updated, report.dropped, report.rows, report.cut) == (True, 3, 7, (3, 4))


def test_sparse_sums_keep_their_parts() -> None:
    def make() -> Step:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 4))
        optimizers = [
            torch.optim.SparseAdam(list(model[0].parameters())),
            torch.optim.SGD(model[2].parameters(), lr=0.1),
        ]
        return Step(model, nn.CrossEntropyLoss(), optimizers)

    def batch(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(5, (3, 2), generator=generator), torch.randint(4, (3,), generator=generator)

    step, other = make(), make()
    window = step.window()
    window.add(batch(0))
    again = other.window(window.state())
    for one in (window, again):
        one.add(batch(1))
        one.close()
    assert changes(snapshot(step), snapshot(other)) == []


# ---- what does not fit


def other_values(step: Step) -> None:
    with torch.no_grad():
        step.model[0].weight[0, 0] += 1e-6


def own(model: nn.Module, micro: Any) -> Any:
    raise AssertionError


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Step], None], str]] = {
    "precision": (
        {"precision": "bf16-mixed"},
        lambda step: None,
        "precision float32 there and bf16-mixed here",
    ),
    "policy": ({"non_finite": "drop"}, lambda step: None, "non_finite raise there and drop here"),
    "compensated": ({"compensated": True}, lambda step: None, "compensated False there and True here"),
    "accumulate": (
        {"accumulate": torch.float64},
        lambda step: None,
        "accumulate auto there and float64 here",
    ),
    "batch norm": ({"batch_norm": "frozen"}, lambda step: None, "batch_norm micro there and frozen here"),
    "reduction": (
        {"loss": nn.CrossEntropyLoss(reduction="sum")},
        lambda step: None,
        "reduction='mean'.* there and .*reduction='sum'",
    ),
    "loss": ({"loss": own}, lambda step: None, r"loss CrossEntropyLoss\(.* there and own\(\) here"),
    "terms": ({"loss": TERMS}, lambda step: None, r"coefficients {} there and {'size': 0.5} here"),
    "frozen": (
        {},
        lambda step: step.model[0].requires_grad_(False),
        r"parameters \['0.weight float32 \(5, 3\)', .* there and \['1.weight",
    ),
    "shape": (
        {},
        lambda step: setattr(step.model[4].bias, "data", torch.zeros(7)),
        r"4.bias float32 \(4,\) there and 4.bias float32 \(7,\) here",
    ),
    "dtype": (
        {},
        lambda step: setattr(step.model[4].bias, "data", torch.zeros(4).double()),
        r"4.bias float32 \(4,\) there and 4.bias float64",
    ),
    "values": ({}, other_values, r"others in 1 of 7, the first of them 0.weight float32 \(5, 3\)"),
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
    before, scale = snapshot(step), step.scale.state()
    with pytest.raises(CheckpointError, match=words):
        step.window(there)
    assert changes(before, snapshot(step)) == []
    assert step.scale.state() == scale
    assert step.open_window is None


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.pop(name)


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        *way, last = path
        for key in way:
            state = state[key]
        state[last] = value

    return change


DAMAGED: dict[str, Callable[[dict[str, Any]], None]] = {
    **{
        f"no {name}": without(name)
        for name in ("format", "made", "cut", "fold", "gradients", "scale", "scale_before")
    },
    "another format": put("format", value="window 0"),
    "a sum of another shape": put("gradients", "banks", "fit", 0, value=torch.zeros(2, 2)),
    "a sum of another dtype": put("gradients", "banks", "fit", 0, value=torch.zeros(5, 3).half()),
    "a sum for nobody": put("gradients", "banks", "fit", 99, value=torch.zeros(5, 3)),
    "other terms": put("gradients", "banks", "third", value={}),
    "a scale in words": put("scale", "value", value="large"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_state_is_refused_and_nothing_is_changed(name: str) -> None:
    step = build(**CASES["several terms"])
    window = begun(step)
    there = window.state()
    window.discard()
    DAMAGED[name](there)
    before = snapshot(step)
    with pytest.raises(CheckpointError, match=r"as Window.state\(\) gives it, got one that cannot be read"):
        step.window(there)
    assert changes(before, snapshot(step)) == []
    assert step.open_window is None


def test_another_term_in_the_next_micro_batch_is_refused_by_it() -> None:
    step = build(**CASES["several terms"])
    window = begun(step)
    there = window.state()
    window.discard()
    there["fold"]["coefficients"] = {"fit": 1.0, "length": 0.5}
    there["gradients"]["banks"] = {"fit": {}, "length": {}}
    again = step.window(there)
    with pytest.raises(LossError, match=r"the same terms .* got \['fit', 'size'\] after \['fit', 'length'\]"):
        again.add(rows(2))


def test_a_window_that_is_over_has_no_state() -> None:
    window = begun(build())
    window.discard()
    with pytest.raises(WindowError, match="a window that is open to be saved, got one that is closed"):
        window.state()


def test_while_a_window_is_open_no_other_one_goes_on() -> None:
    step = build()
    window = begun(step)
    with pytest.raises(WindowError, match="no open window"):
        step.window(window.state())
