"""Faults are named by the self-test and said at every door; sound cases raise no alarm, and are sound."""

import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anybatch as ab
from anybatch.core import tree
from anybatch.losses import module_of
from tests.corpus import faults, sound
from tests.corpus.case import Case
from tests.corpus.faults import FAULTS
from tests.corpus.later import AT_ONCE, LATER
from tests.corpus.play import broken, float64, play, quiet
from tests.corpus.sound import SOUND
from tests.snapshots import changes

ALL_FAULTS, ALL_SOUND = FAULTS | faults.AT_DOORS, SOUND | sound.AT_DOORS
OPTIONS: Any = (
    {},
    {"non_finite": "drop"},
    {"recompute": True},
    {"accumulate": torch.float64},
)


def state(case: Case) -> dict[str, Any]:
    """All that the self-test leaves as it was; an optimizer holds on to these very objects."""
    found: dict[str, Any] = {
        "torch's stream": torch.get_rng_state(),
        "Python's stream": random.getstate(),
        "NumPy's stream": str(np.random.get_state()),
        "grad mode": torch.is_grad_enabled(),
        "batch": [leaf.clone() for leaf in tree.flatten(case.rows_of(0)).leaves],
    }
    for root in (case.model, module_of(case.loss)):
        found[f"identities {type(root).__name__}"] = [(id(one), id(one.grad)) for one in root.parameters()]
        for name, module in root.named_modules():
            held = {key: plain(value) for key, value in vars(module).items() if not key.startswith("__")}
            found[f"{type(root).__name__} {name}"] = held
    return found


def plain(value: Any) -> Any:
    """What can be compared: tensors with their gradients, numbers, how many hooks there are."""
    if isinstance(value, Tensor):
        gradient = None if value.grad is None else value.grad.clone()
        hooks = [len(found or ()) for found in (value._backward_hooks, value._post_accumulate_grad_hooks)]
        return [value.detach().clone(), gradient, value.requires_grad, hooks]
    if isinstance(value, dict):
        # Hooks stand under numbers that go on from model to model; their order is what counts.
        return {key if isinstance(key, str) else place: plain(value[key]) for place, key in enumerate(value)}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value if isinstance(value, int | float | str | bool | None) else type(value).__name__


def checked(case: Case) -> Any:
    """The report of the self-test, which changes nothing."""
    before = state(case)
    options = ab.Options(**case.options)
    report = ab.check(case.model, case.loss, case.rows_of(0), collate=case.collate, options=options)
    assert changes(before, state(case)) == []
    return report


def drawn(name: str, case: Case) -> tuple[str, int]:
    """A door and a micro-batch."""
    chosen = random.Random(name)
    return chosen.choice(case.doors), chosen.choice([1, 2, 3, 5])


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(name: str) -> None:
    case = FAULTS[name]()
    report = checked(case)
    assert not report.exact, str(report)
    named = [
        f"{finding.culprit}\n{finding.what}" for finding in report.findings if finding.kind in case.kinds
    ]
    assert not case.kinds or any(re.search(case.culprit, text) for text in named), str(report)


@pytest.mark.parametrize("name", SOUND)
def test_sound_case_raises_no_alarm(name: str) -> None:
    report = checked(SOUND[name]())
    assert report.exact, str(report)
    assert report.findings == (), str(report)


@pytest.mark.parametrize("name", ALL_FAULTS)
def test_fault_is_never_silent_once_it_is_due(name: str) -> None:
    with float64():
        case = ALL_FAULTS[name]()
        if not case.doors:
            pytest.skip("nothing but the self-test can see it")
        door, micro = drawn(name, case)
        said, noted = play(case, door, micro)
        assert not broken(said), f"{door}, micro-batch {micro}: {said}"
        assert said[-1] == "exact" or re.search(case.says, noted), noted


@pytest.mark.parametrize("name", ALL_SOUND)
def test_sound_case_is_exact_through_a_door(name: str) -> None:
    with float64():
        for is_quiet in (False, True):
            case = quiet(ALL_SOUND[name]()) if is_quiet else ALL_SOUND[name]()
            door, micro = drawn(name, case)
            said, noted = play(case, door, micro, updates=2)
            assert bool(noted) == (case.is_warned and not is_quiet), noted
    assert said == ["exact"] * 2


@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: next(iter(one), "plain"))
@pytest.mark.parametrize("name", LATER)
def test_what_is_wrong_from_an_update_on_is_found(name: str, options: Any) -> None:
    chosen = random.Random(f"{name} {options}")
    with float64():
        start = chosen.randint(2, 7)
        case = LATER[name](start)
        part = "feed" if hasattr(case.model, "feed") else "layers"
        case = replace(case, options={**options, "recompute": [part]} if "recompute" in options else options)
        door, micro = chosen.choice(case.doors), chosen.choice([1, 2, 5, 8, 16])
        said, _ = play(case, door, micro, updates=9)
    assert said[: start - 1] == ["exact"] * (start - 1), said
    late = broken(said) or (name in AT_ONCE and "silent" in said)
    assert not late, f"{door}, micro-batch {micro}, from {start} on: {said}"
