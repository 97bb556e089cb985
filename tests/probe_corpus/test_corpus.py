"""The corpus is what it says; the self-test tells its halves apart and leaves everything as it was."""

import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import tree
from anybatch.core.batch import SampleBatch, TensorBatch
from anybatch.losses.resolve import module_of, resolve
from anybatch.testing import tolerance
from tests.probe_corpus import fault_losses, fault_models, fault_padding, sound_losses, sound_models
from tests.probe_corpus.case import Case, Make
from tests.snapshots import changes

FAULTS: list[Make] = [*fault_losses.FAULTS, *fault_models.FAULTS, *fault_padding.FAULTS]
SOUND: list[Make] = [*sound_models.SOUND, *sound_losses.SOUND]

MICRO_BATCH, WHOLE = 3, 10**6  # of 8 rows: 3 + 3 + 2
PLAINLY = 1e-3  # a fault smaller than this would be none to a user
DROPOUTS = ("p", "dropout", "dropout_p", "noise")  # what the random layers of the corpus call their strength


def ids(make: Make) -> str:
    return make.__name__


# ---- what the corpus says of itself, found without the self-test


def without_dropout(case: Case) -> nn.Module:
    """The model in the case's dtype, in the same mode, without random numbers."""
    for module in case.model.modules():
        for name in DROPOUTS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return case.model.to(case.dtype)


def micro_batches(case: Case, micro_batch: int) -> Iterator[Any]:
    batch = TensorBatch(case.batch) if case.collate is None else SampleBatch(case.batch, case.collate)
    for micro in batch.cut(micro_batch):
        yield tree.map_leaves(lambda leaf: leaf.to(case.dtype) if leaf.is_floating_point() else leaf, micro)


def as_totals(loss: Any) -> Any:
    """A bare mean counts as one, the mean of means that a hand-written loop makes of it."""

    def counted(model: nn.Module, micro: Any) -> Any:
        value = loss(model, micro)
        return ab.Total(value, 1) if isinstance(value, Tensor) else value

    known = isinstance(loss, nn.Module | ab.Terms) or not hasattr(loss, "__code__")
    return loss if known else counted


def run(make: Make, micro_batch: int, *, repadded: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """By hand: the gradient with the loss at its end, sizes, which do not cancel, and the buffers.

    Each term is summed over the micro-batches, then divided by the sum of its weights.
    """
    case = make()
    model = without_dropout(case)
    module_of(case.loss).to(case.dtype)
    loss = resolve(as_totals(case.loss))
    parameters = [p for p in [*model.parameters(), *module_of(case.loss).parameters()] if p.requires_grad]
    parts: dict[str, list[Tensor]] = {}
    weights: dict[str, float] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for micro in micro_batches(case, micro_batch):
            evaluated = loss.evaluate(model, case.repad(micro) if repadded else micro)
            counts = evaluated.weigh()
            for name, value in evaluated.sums.items():
                scaled = value * loss.coefficients.get(name, 1.0)
                parts.setdefault(name, []).append(flat_gradient(scaled, parameters))
                weights[name] = weights.get(name, 0.0) + float(counts[name])
    if getattr(case.loss, "reduction", "mean") == "sum":
        weights = dict.fromkeys(weights, 1.0)
    means = [sum(found) / weights[name] for name, found in parts.items()]
    sizes = [part.abs() / weights[name] for name, found in parts.items() for part in found]
    saved = [value.double().flatten() for value in model.state_dict().values()]
    return torch.stack(means).sum(dim=0), torch.stack(sizes).sum(dim=0), torch.cat(saved)


def flat_gradient(value: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """All entries of the gradient in a line, and the value after them."""
    found: Any = [None] * len(parameters)
    if value.requires_grad:
        found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    pairs = zip(found, parameters, strict=True)
    line = [(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]
    return torch.cat([*line, value.detach()[None]]).double()


def error(one: Tensor, other: Tensor, size: Tensor) -> float:
    """Of the gradient or of the loss, whichever is larger, relative to what was added up."""
    difference = one - other
    return max(float(difference[:-1].norm() / size[:-1].norm()), float(difference[-1].abs() / size[-1]))


def split_error(make: Make) -> float:
    """How far gradient, loss and saved buffers of 3 + 3 + 2 rows lie from those of the whole batch."""
    (split, size, buffers), (whole, _, saved) = run(make, MICRO_BATCH), run(make, WHOLE)
    return max(error(split, whole, size), float((buffers - saved).norm() / (saved.norm() + 1)))


def padding_error(make: Make) -> float:
    """How far they move when the padding holds something else."""
    whole, size, _ = run(make, WHOLE)
    return error(run(make, WHOLE, repadded=True)[0], whole, size)


@pytest.mark.parametrize("make", FAULTS, ids=ids)
def test_fault_is_what_it_says(make: Make) -> None:
    assert not max(split_error(make), padding_error(make)) <= PLAINLY  # NaN is a fault too


@pytest.mark.parametrize("make", SOUND, ids=ids)
def test_sound_model_is_what_it_says(make: Make) -> None:
    limit = tolerance(make().dtype, 8)
    assert split_error(make) <= limit
    assert padding_error(make) <= limit


def test_names_are_different() -> None:
    assert len({make.__name__ for make in (*FAULTS, *SOUND)}) == len(FAULTS) + len(SOUND)


def test_a_case_is_the_same_each_time_and_moves_no_random_stream() -> None:
    for make in (*FAULTS, *SOUND):
        before = torch.get_rng_state()
        one, other = make(), make()
        assert torch.equal(torch.get_rng_state(), before)
        assert changes(state(one), state(other)) == []


# ---- what the self-test says of the corpus


def state(case: Case) -> dict[str, Any]:
    """All that the self-test must leave as it was."""
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
    """The report on a case, of which nothing else has changed."""
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
