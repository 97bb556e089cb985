"""What can be reached from a block."""

import random
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anybatch.state.reach import MOST_ITEMS, Inside, ways


def holder(**held: Any) -> nn.Module:
    module = nn.Linear(1, 1)
    vars(module).update(held)
    return module


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator).item()
    return generator.random() if hasattr(generator, "random") else generator.rand()


GENERATORS = [torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)]


@pytest.mark.parametrize("generator", GENERATORS, ids=["torch", "numpy", "old numpy", "python"])
def test_generators_are_found_wherever_they_are(generator: Any) -> None:
    for held in (generator, [generator], {"a": (generator,)}, SimpleNamespace(one=generator)):
        assert Inside.of(holder(held=held)).generators == (generator,)
    assert Inside.of(nn.Tanh()).joined([torch.ones(1), {"a": generator}]).generators == (generator,)
    read, put = ways(generator)
    state, first = read(), draw(generator)
    put(state)
    assert draw(generator) == first


def test_modules_in_containers_are_found() -> None:
    norm, other = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
    assert norm in Inside.of(holder(norms=[norm])).modules
    assert other in Inside.of(nn.Tanh()).joined([other]).modules


def test_containers_and_values() -> None:
    log, ema = [1], torch.zeros(1)
    batch = UserDict(x=1)
    inside = Inside.of(holder(log=log, ema=ema, batch=batch))
    assert any(one is log for one in inside.containers)
    assert any(one is batch.data for one in inside.containers)
    assert inside.values == (ema,)


def test_circles_and_data_are_not_gone_through() -> None:
    module = holder(data=[nn.Tanh()] * (MOST_ITEMS + 1))
    module.this = [module]  # pyright: ignore
    assert Inside.of(module).modules == (module,)
