"""Random streams: a replay repeats them, an observer does not move them, purposes do not share them."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
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
