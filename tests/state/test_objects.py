"""Tests of what is remembered: whatever a run changes in Python is as before, wherever it is kept."""

import functools
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anybatch.state import ObjectState, Reachable, rng

TABLE: dict[str, Any] = {}
OTHER = nn.Linear(1, 1)


class Slotted:
    __slots__ = ("kept",)

    def __init__(self, kept: Any) -> None:
        self.kept = kept


class Holder(nn.Module):
    """Keeps things in every place there is, also tensors that it made."""

    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.kept, self.layer, self.calls = kept, nn.Linear(3, 3), 0
        self.box, self.generator = SimpleNamespace(made=None), torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.box.made is None:
            self.box.made = TABLE["x"] = torch.ones(OTHER.in_features)
        noise = torch.rand(3, generator=self.generator)
        return self.layer(x) * self.table(len(x)) * self.box.made * TABLE["x"] + noise

    @functools.lru_cache  # noqa: B019
    def table(self, rows: int) -> Tensor:
        return torch.ones(rows, 1)


def held_in(kept: Any) -> Any:
    """To be compared; the pickle of a tensor counts pickles."""
    return kept.get_state().tolist() if isinstance(kept, torch.Generator) else pickle.dumps(kept)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list": (lambda: [1, 2], lambda kept: kept.append(3)),
    "slots": (lambda: [Slotted([1])], lambda kept: kept[0].kept.append(2)),
    "inner list": (lambda: ([1],), lambda kept: kept[0].append(3)),
    "dict": (lambda: {"a": 1}, lambda kept: kept.update(b=2)),
    "order": (lambda: OrderedDict(a=1, b=2), lambda kept: kept.move_to_end("a")),
    "default": (lambda: defaultdict(int), lambda kept: kept["a"]),
    "counter": (lambda: Counter(a=1), lambda kept: kept.update("a")),
    "set": (lambda: {1}, lambda kept: kept.add(2)),
    "empty list": (list, lambda kept: kept.append(1)),
    "empty table": (OrderedDict, lambda kept: kept.update(a=1)),
    "empty set": (set, lambda kept: kept.add(1)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda kept: kept.append(3)),
    "object": (lambda: SimpleNamespace(value=1), lambda kept: vars(kept).update(value=2, more=3)),
    "torch": (torch.Generator, lambda kept: torch.rand(1, generator=kept).item()),
    "NumPy": (lambda: np.random.default_rng(0), lambda kept: kept.random()),
    "Python": (lambda: random.Random(0), lambda kept: kept.random()),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_module_keeps_is_put_back_in_place(case: str) -> None:
    build, change = CASES[case]
    model = Holder(build())
    kept, before = model.kept, held_in(model.kept)
    noted = ObjectState([model])
    for _ in range(2):  # as often as wanted
        change(kept)
        assert held_in(kept) != before
        model.kept = None
        noted.put_back()
        assert model.kept is kept
        assert held_in(kept) == before


def test_hooks_that_a_run_adds_are_removed() -> None:
    model = Holder()
    noted = ObjectState([model])
    model.layer.register_forward_hook(lambda *found: None, always_call=True)
    noted.put_back()
    assert not model.layer._forward_hooks
    assert not model.layer._forward_hooks_always_called


def test_values_are_put_back_where_it_is_said() -> None:
    model = Holder([torch.zeros(2), torch.zeros(2), np.zeros(2)])
    for but_for, expected in ((None, [1, 1, 0]), ([model.kept[1]], [0, 1, 0])):
        for one in model.kept:
            one[...] = 0
        noted = ObjectState([model], but_for=but_for)
        for one in model.kept:
            one += 1
        noted.put_back()
        assert [float(one[0]) for one in model.kept] == expected


def test_what_globals_that_methods_name_hold_is_put_back() -> None:
    noted = ObjectState([Holder()])
    assert OTHER in noted.modules
    Holder()(torch.ones(1, 3))
    assert TABLE
    noted.put_back()
    assert TABLE == {}


def test_closures_defaults_partials_and_hooks_are_followed() -> None:
    seen: dict[str, list[Any]] = {name: [] for name in ("cell", "default", "partial", "hook", "method")}
    model, calls = Holder(), 0

    def loss(x: Any, into: list[Any] = seen["default"]) -> None:
        nonlocal calls
        calls += 1
        seen["cell"].append(x)
        into.append(x)

    def put(into: list[Any], *found: Any) -> None:
        into.append(found)

    model.register_forward_hook(functools.partial(put, seen["partial"]))
    model.layer.weight.register_hook(lambda gradient: put(seen["hook"], gradient))
    model.layer.register_forward_pre_hook(lambda *found: seen["method"].append(found))
    noted = ObjectState([model, loss])
    model(torch.ones(1, 3)).sum().backward()
    loss(1)
    assert all(seen.values())
    assert calls == 1
    noted.put_back()
    assert not any(seen.values())
    assert calls == 0
    assert model.layer.weight.grad is None


@pytest.mark.parametrize("name", ["torch", "NumPy", "Python"])
def test_generators_are_found_wherever_they_are(name: str) -> None:
    build, draw = CASES[name]
    generator = build()
    for held in (generator, [generator], {"a": (generator,)}, SimpleNamespace(one=generator)):
        vars(module := nn.Linear(1, 1)).update(held=held)
        assert Reachable([module], is_block=True).generators == [generator]
    read, put = rng.ways(generator)
    state, first = read(), draw(generator)
    put(state)
    assert draw(generator) == first
