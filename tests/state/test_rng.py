"""Random streams: a replay repeats them, an observer does not move them, purposes do not share them."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anybatch.state import rng


def draw() -> list[float]:
    return [*torch.rand(3).tolist(), *nn.functional.dropout(torch.ones(20)).tolist()]


def test_replay_repeats_the_stream() -> None:
    draw()
    state = rng.capture()
    first, second = draw(), draw()
    assert first != second
    rng.restore(state)
    assert [draw(), draw()] == [first, second]


def test_capture_is_a_copy_and_moves_nothing() -> None:
    before = torch.get_rng_state()
    state = rng.capture()
    assert torch.equal(torch.get_rng_state(), before)
    draw()
    assert torch.equal(state.cpu, before)
    assert not torch.equal(torch.get_rng_state(), before)


def test_preserved_gives_the_stream_back_also_after_an_error() -> None:
    before = torch.get_rng_state()
    with rng.preserved():
        draw()
    assert torch.equal(torch.get_rng_state(), before)
    try:
        with rng.preserved():
            draw()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert torch.equal(torch.get_rng_state(), before)


@given(st.integers(0, 2**63), st.text(), st.integers(0, 10**6))
def test_seed_is_a_function_of_its_purpose(seed: int, purpose: str, number: int) -> None:
    derived = rng.derive_seed(seed, purpose, number)
    assert 0 <= derived < 2**63
    assert derived == rng.derive_seed(seed, purpose, number)
    others = (
        rng.derive_seed(seed + 1, purpose, number),
        rng.derive_seed(seed, purpose + "x", number),
        rng.derive_seed(seed, purpose, number + 1),
        rng.derive_seed(seed, purpose),
        rng.derive_seed(seed, purpose, str(number)),
    )
    assert derived not in others


def test_seed_stays_the_same_from_run_to_run() -> None:
    assert rng.derive_seed(0, "order", 1) == 1332101017241992705  # what checkpoints and logs rely on


def draw_everywhere() -> tuple[float, float, list[float]]:
    return random.random(), float(np.random.rand()), draw()


def test_process_state_holds_every_stream() -> None:
    draw_everywhere()
    state = rng.capture_process()
    first = draw_everywhere()
    assert draw_everywhere() != first
    rng.restore_process(state)
    assert draw_everywhere() == first


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(1), random.random, np.random.rand], ids=["torch", "python", "numpy"]
)
def test_whether_a_stream_has_moved(draw: Callable[[], object]) -> None:
    state = rng.capture_process()
    assert not rng.has_moved(state)
    draw()
    assert rng.has_moved(state)
    rng.restore_process(state)
    assert not rng.has_moved(state)
