"""The sound half is sound; the self-test tells the halves apart and leaves everything as it was."""

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import tree
from anybatch.losses import module_of
from anybatch.testing import GradientRecorder, tolerance
from tests.probe_corpus import faults, sound
from tests.probe_corpus.case import Case, Make
from tests.snapshots import changes

FAULTS: list[Make] = faults.FAULTS
SOUND: list[Make] = sound.SOUND

MICRO_BATCH = 3  # of 8 rows: 3 + 3 + 2
DROPOUTS = ("p", "dropout", "dropout_p", "noise")  # what the random layers of the corpus call their strength


def ids(make: Make) -> str:
    return make.__name__


# ---- what the corpus says of itself, found without the self-test


def left_by(make: Make, micro_batch: int | None) -> list[Tensor]:
    case = make()
    for module in case.model.modules():
        for name in DROPOUTS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    held = nn.ModuleList([case.model.to(case.dtype), module_of(case.loss).to(case.dtype)])
    held.zero_grad()
    recorder = GradientRecorder(held)
    batch = in_dtype(case.batch, case.dtype) if case.collate is None else case.batch
    collate = case.collate and (lambda samples: in_dtype(case.collate(samples), case.dtype))
    step = ab.Step(
        case.model,
        case.loss,
        recorder,
        micro_batch=micro_batch,
        collate=collate,
        options=ab.Options(check=False),
    )
    report = step(batch)
    return [torch.tensor(report.loss), *recorder.gradients.values(), *held.state_dict().values()]


def in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    return tree.map_leaves(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, batch)


@pytest.mark.parametrize("make", SOUND, ids=ids)
def test_sound_model_is_what_it_says(make: Make) -> None:
    limit = tolerance(make().dtype, 8)
    for cut, whole in zip(left_by(make, MICRO_BATCH), left_by(make, None), strict=True):
        torch.testing.assert_close(cut, whole, rtol=limit, atol=limit)


# ---- what the self-test says of the corpus


def state(case: Case) -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch's stream": torch.get_rng_state(),
        "Python's stream": random.getstate(),
        "NumPy's stream": np.random.get_state()[1].tolist(),
        "grad mode": torch.is_grad_enabled(),
        "batch": [leaf.clone() for leaf in tree.flatten(case.batch).leaves],
    }
    for root in (case.model, module_of(case.loss)):
        for name, module in root.named_modules():
            held = {key: plain(value) for key, value in vars(module).items() if not key.startswith("__")}
            found[f"{type(root).__name__} {name}"] = held
    return found


def identities(case: Case) -> list[tuple[int, int]]:
    """An optimizer holds on to these very objects."""
    held = [*case.model.parameters(), *module_of(case.loss).parameters()]
    return [(id(parameter), id(parameter.grad)) for parameter in held]


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


def summaries(make: Make) -> tuple[Case, Any]:
    case = make()
    before, held = state(case), identities(case)
    report = ab.check(case.model, case.loss, case.batch, collate=case.collate)
    assert changes(before, state(case)) == []
    assert identities(case) == held
    return case, report


@pytest.mark.parametrize("make", FAULTS, ids=ids)
def test_fault_is_named(make: Make) -> None:
    case, report = summaries(make)
    assert not report.exact, str(report)
    named = [
        f"{finding.culprit}\n{finding.what}" for finding in report.findings if finding.kind in case.kinds
    ]
    assert any(re.search(case.culprit, text) for text in named), str(report)


@pytest.mark.parametrize("make", SOUND, ids=ids)
def test_sound_model_raises_no_alarm(make: Make) -> None:
    _, report = summaries(make)
    assert report.exact, str(report)
    assert report.findings == (), str(report)
