"""What surrounds a step and a micro-batch of it."""

from typing import Any

import pytest
import torch
from torch import nn

from anybatch.engine.before import AtHand, Before
from anybatch.engine.task import Task
from anybatch.state.snapshot import Surroundings, Untouched
from tests.engine.test_execute import make_task


def make() -> tuple[Task, AtHand]:
    task = make_task(nn.MSELoss(), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    task.streams.begin(task.modules)
    return task, AtHand(task, Before(task))


def test_gradients_that_were_there_come_back_all_or_some() -> None:
    task = make_task(nn.MSELoss(), nn.Linear(2, 2))
    found = [torch.ones_like(p) for p in task.parameters]
    for parameter, gradient in zip(task.parameters, found, strict=True):
        parameter.grad = gradient
    before = Before(task)
    for parameter in task.parameters:
        parameter.grad = None
    before.put_gradients_back(task.parameters[:1])
    assert [p.grad is g for p, g in zip(task.parameters, found, strict=True)] == [True, False]
    before.put_gradients_back()
    assert all(p.grad is g for p, g in zip(task.parameters, found, strict=True))


def test_buffers_are_noted_as_each_micro_batch_begins() -> None:
    task, at_hand = make()
    norm = task.model[1]
    task.model(torch.randn(4, 2))
    at_hand.begin()
    between = norm.running_mean.clone()
    task.model(torch.randn(4, 2))
    at_hand.noted.put_back()
    assert torch.equal(norm.running_mean, between)


def test_what_it_writes_to_is_seen_while_steps_look() -> None:
    task, at_hand = make()
    at_hand.begin()
    assert at_hand.written() == []
    with torch.no_grad():
        task.parameters[1].mul_(2)
    assert [one is task.parameters[1] for one in at_hand.written()] == [True]
    at_hand.look()
    assert at_hand.written() == []
    at_hand.begin()
    kept = task.parameters[1].detach().clone()
    with torch.no_grad():
        task.parameters[1].mul_(2)
    at_hand.noted.put_back()
    assert torch.equal(task.parameters[1], kept)


def test_where_nothing_could_be_noted_nothing_is_put_back() -> None:
    task, at_hand = make()
    at_hand.noted = Untouched()
    mean = task.model[1].running_mean.clone()
    task.model(torch.randn(4, 2))
    at_hand.noted.put_back()
    assert not torch.equal(task.model[1].running_mean, mean)
    assert at_hand.is_random_known


class Full(Surroundings):
    """Memory runs out as it is noted anew."""

    def renewed(self, **_: Any) -> Surroundings:
        raise MemoryError("full")


def test_a_micro_batch_that_cannot_be_noted_puts_nothing_back_of_the_one_before() -> None:
    """Else what that one has done would be undone, though its rows are in the sums."""
    task, at_hand = make()
    at_hand.begin()
    norm = task.model[1]
    task.model(torch.randn(4, 2))
    after_the_first = norm.running_mean.clone()
    at_hand._before.__class__ = type("FullBefore", (Full, Before), {})
    with pytest.raises(MemoryError):
        at_hand.begin()
    at_hand.noted.put_back()
    assert torch.equal(norm.running_mean, after_the_first)
    assert at_hand.is_random_known


@pytest.mark.parametrize("told", [{"draws": True}, {"in_window": True}, {}], ids=str)
def test_torchs_stream_is_noted_where_it_may_be_drawn_from(told: dict[str, bool]) -> None:
    task, at_hand = make()
    task.streams.is_looking = False
    at_hand.begin(**told)
    there = torch.get_rng_state()
    torch.rand(1)
    assert at_hand.is_random_known == bool(told)
    if told:
        at_hand.noted.put_back()
        assert torch.equal(torch.get_rng_state(), there)


def test_a_stream_that_moved_before_a_micro_batch_that_never_began_is_no_harm() -> None:
    task, at_hand = make()
    task.streams.is_looking = False
    at_hand.begin()
    torch.rand(1)
    at_hand.noted = Untouched()
    assert at_hand.is_random_known
