"""What surrounds a step and a micro-batch of it."""

import torch
from torch import nn

from anybatch.before import AtHand, Before
from anybatch.surroundings import Untouched
from anybatch.task import Task
from tests.test_execute import make_task


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
