"""A loss that moves what it computes with is refused at once; what nothing reads may move."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.errors import LossError
from anybatch.state import Reachable
from anybatch.testing import relative_error
from tests.zoo import Perceptron

RATE, WIDTH = 0.004, 600  # a teacher of more bytes than are copied beforehand
Loss = Callable[[nn.Module, Any], ab.Total]


def make() -> nn.Module:
    return nn.Sequential(Perceptron(6, WIDTH, width=WIDTH), nn.Linear(WIDTH, 4))


def move(old: Sequence[Tensor], model: nn.Module) -> None:
    with torch.no_grad():
        for one, new in zip(old, model.parameters(), strict=True):
            one.lerp_(new, RATE)


def replace(old: Sequence[Tensor], model: nn.Module) -> None:
    """As MoCo does."""
    for one, new in zip(old, model.parameters(), strict=True):
        one.data = one.data * (1 - RATE) + new.data * RATE


def moved(held: Any, model: nn.Module, batch: Any, moves: Any = move) -> ab.Total:
    """How far the model is from a teacher of these tensors, which are moved."""
    tensors = [*held.values()] if isinstance(held, dict) else held
    moves(tensors, model)
    named = dict(zip(dict(model.named_parameters()), tensors, strict=True))
    aim = torch.func.functional_call(model, named, (batch[0],))
    return ab.Total((model(batch[0]) - aim - batch[1]).square().mean(1).sum(), len(aim))


def in_closure(student: nn.Module, moves: Any = move) -> Loss:
    teacher = copy.deepcopy(student).requires_grad_(False)
    return lambda model, batch: moved([*teacher.parameters()], model, batch, moves)


HOLDERS: dict[str, Callable[[nn.Module], Loss]] = {
    "closure": in_closure,
    "closure, by .data": partial(in_closure, moves=replace),
    "dict": lambda student: partial(moved, {name: one.clone() for name, one in student.state_dict().items()}),
}


@pytest.mark.parametrize("where", HOLDERS)
def test_a_teacher_that_the_loss_moves_is_refused_while_it_is_its_students_copy(where: str) -> None:
    model = make()
    loss = HOLDERS[where](model)
    held = [one for one in Reachable([loss]).values if isinstance(one, Tensor)]
    assert held
    places, values = [one.data_ptr() for one in held], [one.detach().clone() for one in held]
    step = ab.Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), micro_batch=6)
    with pytest.raises(LossError, match=r"The forward changes .*a tensor of shape .* after the step"):
        step((torch.randn(24, 6), torch.randn(24, 4)))
    assert [one.data_ptr() for one in held] == places
    assert all(map(torch.equal, held, values))


def counts() -> Loss:
    count, mean = torch.zeros((), dtype=torch.long), torch.zeros(())

    def loss(model: nn.Module, batch: Any) -> ab.Total:
        out = model(batch[0])
        count.add_(len(out))
        mean.lerp_(out.detach().mean().to(mean), 0.1)
        return ab.Total((out - batch[1]).square().mean(1).sum(), len(out))

    return loss


@pytest.mark.filterwarnings("error")
def test_what_nothing_reads_is_exact() -> None:
    student = make().double()
    results: list[list[Tensor]] = []
    given = [(torch.randn(24, 6).double(), torch.randn(24, 4).double()) for _ in range(3)]
    for micro_batch in (None, 6):
        model = copy.deepcopy(student)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = ab.Step(model, counts(), optimizer, micro_batch=micro_batch)
        assert all(step(batch).checked or micro_batch is None for batch in given)
        results.append([*model.parameters()])
    assert relative_error(*results) < 1e-12
