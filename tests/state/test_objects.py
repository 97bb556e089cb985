"""Tests of what is remembered: whatever a run changes in Python is as before, wherever it is kept."""

import functools
import random
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anybatch import Step
from anybatch.core.batch import TensorBatch
from anybatch.planner.measure import probe
from anybatch.planner.trace import Trace, trace
from anybatch.state.objects import Remembered

TABLE: dict[str, Any] = {}
CALLS = 0


class Plain:
    kept: Any = None
    shared: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.value = 1


class Slotted:
    __slots__ = ("one", "other")

    def __init__(self) -> None:
        self.one = 1


class Named(dict[str, Any]):
    """A dict that runs code when it is asked."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(key)


class Holder(nn.Module):
    """Keeps things in every place there is; `change` touches one of them."""

    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.kept = kept
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return self.layer(x)

    def count(self) -> None:
        global CALLS
        CALLS += 1
        TABLE["x"] = CALLS
        type(self).made = CALLS  # pyright: ignore

    @functools.lru_cache  # noqa: B019
    def table(self) -> int:
        return 1


def held_in(kept: Any) -> Any:
    """What it holds, to be compared."""
    if isinstance(kept, np.random.Generator):
        return str(kept.bit_generator.state)
    if isinstance(kept, np.random.RandomState):
        return str(kept.get_state())
    if isinstance(kept, torch.Generator):
        return kept.get_state().tolist()
    if isinstance(kept, random.Random):
        return kept.getstate()
    if isinstance(kept, Slotted):
        return [getattr(kept, name, None) for name in ("one", "other")]
    if isinstance(kept, Plain):
        return dict(vars(kept)), list(kept.shared), type(kept).kept
    if isinstance(kept, dict):
        return list(kept.items())
    return [one.copy() if isinstance(one, list) else one for one in kept]


def fill_slots(kept: Slotted) -> None:
    kept.other, kept.one = 2, 3


def fill_plain(kept: Plain) -> None:
    kept.value, kept.more = 2, 3  # pyright: ignore
    kept.shared.append(1)
    Plain.kept = 4


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list": (lambda: [1, 2], lambda kept: kept.append(3)),
    "inner list": (lambda: ([1],), lambda kept: kept[0].append(3)),
    "dict": (lambda: {"a": 1}, lambda kept: kept.update(b=2)),
    "order": (lambda: OrderedDict(a=1, b=2), lambda kept: kept.move_to_end("a")),
    "default": (lambda: defaultdict(int), lambda kept: kept["a"]),
    "counter": (lambda: Counter(a=1), lambda kept: kept.update("a")),
    "own dict": (lambda: Named(a=1), lambda kept: kept.update(a=2)),
    "set": (lambda: {1}, lambda kept: kept.add(2)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda kept: kept.append(3)),
    "object": (Plain, fill_plain),
    "slots": (Slotted, fill_slots),
    "torch generator": (torch.Generator, lambda kept: torch.rand(1, generator=kept)),
    "generator": (lambda: np.random.default_rng(0), lambda kept: kept.random()),
    "old generator": (lambda: np.random.RandomState(0), lambda kept: kept.rand()),
    "random": (lambda: random.Random(0), lambda kept: kept.random()),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_module_keeps_is_put_back_in_place(case: str) -> None:
    build, change = CASES[case]
    model = Holder(build())
    kept, before = model.kept, held_in(model.kept)
    noted = Remembered([model])
    for _ in range(2):  # as often as wanted
        change(kept)
        assert held_in(kept) != before
        model.kept = None
        noted.put_back()
        assert model.kept is kept
        assert held_in(kept) == before


def test_globals_and_classes_that_methods_name_are_put_back() -> None:
    noted = Remembered([Holder()])
    Holder()(torch.ones(1, 2))
    assert TABLE
    assert Holder.made == CALLS  # pyright: ignore
    noted.put_back()
    assert (TABLE, CALLS, hasattr(Holder, "made")) == ({}, 0, False)


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
    noted = Remembered([model, loss])
    model(torch.ones(1, 2)).sum().backward()
    loss(1)
    assert all(seen.values())
    assert calls == 1
    noted.put_back()
    assert not any(seen.values())
    assert calls == 0
    assert model.layer.weight.grad is None


def test_what_was_cached_meanwhile_is_dropped() -> None:
    model = Holder()
    noted = Remembered([model])
    model.table()
    noted.put_back()
    assert Holder.table.cache_info().currsize == 0
    model.table()
    noted = Remembered([model])
    model.table()  # known
    noted.put_back()
    assert Holder.table.cache_info().currsize == 1
    Holder.table.cache_clear()


def test_other_modules_are_found() -> None:
    one, other = nn.Linear(1, 1), nn.BatchNorm1d(1)
    found = Remembered([lambda x: other(one(x))]).modules  # pyright: ignore
    assert set(found) == {one, other}


def test_values_are_put_back_where_it_is_said() -> None:
    model = Holder([torch.zeros(2), torch.zeros(2), np.zeros(2)])
    first, second, array = model.kept
    for but_for, expected in ((None, [1, 1, 0]), ([second], [0, 1, 0])):
        for one in model.kept:
            one[...] = 0
        noted = Remembered([model], but_for=but_for)
        for one in model.kept:
            one += 1
        noted.put_back()
        assert [float(one[0]) for one in (first, second, array)] == expected


def test_a_walk_over_many_modules_is_quick() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Tanh()) for _ in range(48)])
    Remembered([model])
    took: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        Remembered([model]).put_back()
        took.append(time.perf_counter() - start)
    assert min(took) < 0.05


TABLES: dict[str, Tensor] = {}


class Keeper(nn.Module):
    """Keeps tensors that it made, where no module's attributes are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.box = nn.Linear(3, 3), 0, SimpleNamespace(made=None)
        self.generator = torch.Generator()

    @functools.lru_cache  # noqa: B019
    def table(self, rows: int) -> Tensor:
        return torch.ones(rows, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.box.made is None:
            self.box.made = TABLES["x"] = torch.ones(3)
        noise = torch.rand(3, generator=self.generator)
        return self.layer(x) * self.table(len(x)) * self.box.made * TABLES["x"] + noise


@pytest.mark.parametrize("run", [trace, probe])
def test_nothing_is_left_in_caches(run: Callable[..., Trace]) -> None:
    seen: list[Tensor] = []
    model = Keeper()
    model.register_forward_hook(lambda *found: seen.append(found[2]))
    stream = model.generator.get_state()
    step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), check=False)
    run(step.plan(8), step.task(), TensorBatch((torch.ones(8, 3), torch.ones(8, 3))))
    assert (seen, TABLES, model.calls) == ([], {}, 0)
    assert model.box.made is None
    assert model.table.cache_info().currsize == 0
    assert torch.equal(model.generator.get_state(), stream)
