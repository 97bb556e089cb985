"""Random streams: a replay repeats them, an observer does not move them, purposes do not share them."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from anybatch.state import rng


def draw() -> list[float]:
    return [*torch.rand(3).tolist(), *nn.functional.dropout(torch.ones(20)).tolist()]


def test_preserved_gives_the_stream_back_also_after_an_error() -> None:
    before = torch.get_rng_state()
    for error in (None, KeyboardInterrupt):
        with suppress(KeyboardInterrupt), rng.preserved():
            draw()
            if error:
                raise error
        assert torch.equal(torch.get_rng_state(), before)


@given(st.integers(0, 2**63), st.text(), st.integers(0, 10**6))
def test_seed_is_a_function_of_its_purpose(seed: int, purpose: str, number: int) -> None:
    derived = rng.derive_seed(seed, purpose, number)
    assert 0 <= derived < 2**63
    assert derived == rng.derive_seed(seed, purpose, number)
    others = [(seed + 1, purpose, number), (seed, purpose + "x", number), (seed, purpose, number + 1)]
    others += [(seed, purpose), (seed, purpose, str(number))]
    assert derived not in [rng.derive_seed(*other) for other in others]
    assert rng.derive_seed(0, "order", 1) == 1332101017241992705  # what checkpoints and logs rely on


@pytest.mark.parametrize("capture", [rng.capture, rng.capture_process])
def test_replay_repeats_the_streams(capture: Callable[[], Any]) -> None:
    def draw_all() -> list[float]:
        others = [random.random(), np.random.rand()] if capture is rng.capture_process else []
        return draw() + others

    draw_all()
    before = torch.get_rng_state()
    state = capture()
    assert torch.equal(torch.get_rng_state(), before)  # and it moves nothing
    first, second = draw_all(), draw_all()
    assert first != second
    (rng.restore if capture is rng.capture else rng.restore_process)(state)
    assert [draw_all(), draw_all()] == [first, second]


def test_all_generators_are_captured_and_told_apart() -> None:
    own, other = torch.Generator(), np.random.default_rng(0)
    generators = (*rng.of_process(), own, other)
    draws: dict[Any, Callable[[], float]] = {
        random: random.random,
        np.random: np.random.rand,
        own: lambda: torch.rand((), generator=own).item(),
        other: lambda: float(other.random()),
    }
    assert list(draws) == [*generators]
    for generator, draw_one in draws.items():
        state = rng.capture(generators)
        first = draw_one()
        now = rng.capture(generators)
        assert not rng.is_same(state, now)
        assert [one for one in generators if not rng.is_same(state, now, of=(one,))] == [generator]
        rng.restore(state)
        assert rng.is_same(state, rng.capture(generators))
        assert draw_one() == first


def test_seeds_of_the_process_wait_for_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else CUDA's stream, once it is initialised, would begin at a seed that is not the caller's."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda *args, **kwargs: pytest.fail("seeded later"))
    with rng.preserved():
        rng.seed_process(3)
        first = torch.rand(1).item(), random.random(), np.random.rand()
        rng.seed_process(3)
        assert (torch.rand(1).item(), random.random(), np.random.rand()) == first
