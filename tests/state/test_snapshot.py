import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anybatch.state import rng
from anybatch.state.snapshot import EVERY, Streams, Surroundings, evaluating, held, of_process


class Restless(nn.Module):
    """Changes one buffer in place, and puts another tensor in the place of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inside", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.inside += 1
        self.replaced = self.replaced + 1
        return x * self.weight + torch.rand(2) + random.random() + np.random.rand()


def test_buffers_and_random_state_come_back() -> None:
    model = Restless()
    before, replaced, random_state = Surroundings([model]), model.replaced, torch.get_rng_state()
    model(torch.ones(2))
    before.put_back()
    assert torch.equal(model.inside, torch.zeros(2))
    assert model.replaced is replaced
    assert torch.equal(torch.get_rng_state(), random_state)


def test_buffers_alone_come_back() -> None:
    model = Restless()
    before, random_state = Surroundings([model]), torch.get_rng_state()
    model(torch.ones(2))
    before.put_buffers_back()
    assert torch.equal(model.inside, torch.zeros(2))
    assert not torch.equal(torch.get_rng_state(), random_state)


def test_streams_come_back_where_they_were_noted() -> None:
    model = Restless()
    streams = rng.capture_process()
    before = Surroundings([model], streams=of_process())
    assert not before.is_process_moved()
    model(torch.ones(2))
    assert before.is_process_moved()
    before.put_back()
    assert not rng.has_moved(streams)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_each_stream_of_the_process_is_looked_at(draw: Callable[[], float]) -> None:
    before = Surroundings([], streams=of_process())
    draw()
    assert before.is_process_moved()


def test_only_some_steps_look_until_something_has_moved() -> None:
    streams, looked = Streams(), []
    for _ in range(2 * EVERY + 1):
        streams.begin([])
        looked.append(streams.is_looking)
        streams.look(Surroundings([], streams=of_process()))
    assert [number for number, is_looking in enumerate(looked) if is_looking] == [0, 1, 2, EVERY, 2 * EVERY]
    assert (streams.are_moved, streams.is_torchs_moved) == (False, False)
    since = Surroundings([], streams=of_process())
    random.random()
    streams.look(since)
    assert (streams.are_moved, streams.is_torchs_moved) == (True, False)
    torch.rand(1)
    streams.look(since)
    streams.begin([])
    assert not streams.is_looking
    assert streams.are_torchs_noted
    assert streams.to_note(draws=False) == of_process()


def test_copied_streams_look_afresh() -> None:
    model = nn.Dropout()
    model.generator = torch.Generator()
    streams = Streams()
    streams.begin([model])
    streams.are_moved = True
    copied = copy.deepcopy(streams)
    assert copied.to_note(draws=False) == ()
    assert not copied.are_moved


def test_generators_of_modules_are_found() -> None:
    model = nn.Dropout()
    model.ours, model.theirs = np.random.RandomState(0), np.random.default_rng(0)
    model.pythons, model.systems = random.Random(0), random.SystemRandom()
    model.torches = torch.Generator()
    noted = [(put, read()) for read, put in held([model])]
    draws: list[Callable[[], float]] = [
        model.ours.rand,
        model.theirs.random,
        model.pythons.random,
        lambda: torch.rand((), generator=model.torches).item(),
    ]
    first = [draw() for draw in draws]
    for put, state in noted:
        put(state)
    assert len(noted) == len(draws)
    assert [draw() for draw in draws] == first


def test_an_evaluation_leaves_no_trace() -> None:
    model = nn.Sequential(Restless(), nn.Dropout())
    model[1].training = False
    gradient = model[0].weight.grad = torch.ones(2)
    streams, replaced = rng.capture_process(), model[0].replaced
    with evaluating([*model.modules()]):
        assert not any(module.training for module in model.modules())
        assert not model(torch.ones(2)).requires_grad
        model.zero_grad()
    assert [module.training for module in model.modules()] == [True, True, False]
    assert model[0].weight.grad is gradient
    assert model[0].replaced is replaced
    assert torch.equal(model[0].inside, torch.zeros(2))
    assert not rng.has_moved(streams)


def test_an_evaluation_comes_back_after_errors() -> None:
    model = Restless()
    try:
        with evaluating([model]):
            raise RuntimeError("tripped")
    except RuntimeError:
        assert model.training
        assert torch.is_grad_enabled()


def test_weights_cast_without_graph_are_not_used_again() -> None:
    model = nn.Linear(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with evaluating([model]):
            model(torch.ones(1, 2))
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
