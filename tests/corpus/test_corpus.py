"""Faults are named by the self-test and said at every door; sound cases raise no alarm, and are sound."""

import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.core import tree
from anybatch.losses import module_of
from tests.corpus import faults, sound
from tests.corpus.case import Case
from tests.corpus.faults import FAULTS
from tests.corpus.later import AT_ONCE, LATER
from tests.corpus.play import broken, float64, play, quiet
from tests.corpus.sound import SOUND
from tests.snapshots import same_as_before

ALL_FAULTS, ALL_SOUND = FAULTS | faults.AT_DOORS, SOUND | sound.AT_DOORS
OPTIONS: Any = ({}, {"non_finite": "drop"}, {"recompute": True}, {"accumulate": torch.float64})


def checked(case: Case) -> Any:
    """The report of the self-test, which changes nothing."""
    held = [*case.model.parameters(), *module_of(case.loss).parameters()]
    step = ab.Step(case.model, case.loss, torch.optim.SGD(held), collate=case.collate)
    leaves = tree.flatten(case.batch).leaves
    before = [leaf.clone() for leaf in leaves]
    with same_as_before(step):
        options = ab.Options(**case.options)
        report = ab.check(case.model, case.loss, case.batch, collate=case.collate, options=options)
    assert all(map(torch.equal, leaves, before))
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
    named = [f"{one.culprit}\n{one.what}" for one in report.findings if one.kind in case.kinds]
    assert not case.kinds or any(re.search(case.culprit, text) for text in named), str(report)


@pytest.mark.parametrize("name", SOUND)
def test_sound_case_raises_no_alarm(name: str) -> None:
    report = checked(SOUND[name]())
    assert report.exact, str(report)
    assert report.findings == (), str(report)


@pytest.mark.parametrize("name", ALL_FAULTS)
def test_fault_is_never_silent_once_it_is_due(name: str) -> None:
    for door in ALL_FAULTS[name]().doors:
        with float64():
            # A window's first `add` of a single row is one that BatchNorm refuses.
            sizes = [2, 3, 5] if door == "window" else [1, 2, 3, 5]
            case, micro = ALL_FAULTS[name](), random.Random(name + door).choice(sizes)
            said, noted = play(case, door, micro)
        assert not broken(said), f"{door}, micro-batch {micro}: {said}"
        assert said[-1] == "exact" or re.search(case.says, noted), noted


@pytest.mark.parametrize("is_quiet", [False, True])
@pytest.mark.parametrize("name", [name for name, make in ALL_SOUND.items() if make().doors])
def test_sound_case_is_exact_through_a_door(name: str, is_quiet: bool) -> None:
    with float64():
        case = quiet(ALL_SOUND[name]()) if is_quiet else ALL_SOUND[name]()
        door, micro = drawn(name, case)
        said, noted = play(case, door, micro, updates=2)
    draws_anyway = name.endswith("by_python")  # draws that change nothing are told, too
    assert bool(noted) == (case.is_warned and (draws_anyway or not is_quiet)), noted
    assert said == ["exact"] * 2 or not is_quiet


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
