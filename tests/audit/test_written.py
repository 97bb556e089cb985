"""A loss moves nothing that it computes with; what nothing reads may move; ordinary programs are exact."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


def batch(rows: int = 24) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8), torch.randint(3, (rows,))


def step(model: nn.Module, loss: Any, **options: Any) -> ab.Step:
    return ab.Step(model, loss, torch.optim.SGD(model.parameters(), 0.1), micro_batch=4, **options)


@pytest.mark.parametrize("policy", ["recompute", "selective", "offload"])
def test_dropout_in_a_block_that_runs_again_hides_no_loss_whose_rows_meet(policy: str) -> None:
    def meets(model: nn.Module, rows: Any) -> ab.Total:
        out = model(rows[0])
        return ab.Total(F.cross_entropy(out - out.mean(0), rows[1], reduction="sum"), len(out))

    def build(loss: Any) -> ab.Step:
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1)), nn.Linear(8, 3))
        return step(model, loss, options=ab.Options(recompute={"0": policy}))

    sound = build(nn.CrossEntropyLoss())
    assert all(sound(batch()).checked for _ in range(4))
    with pytest.raises(LossError):
        build(meets)(batch())


@pytest.mark.parametrize("check", [True, "always"])
def test_large_values_that_cancel_in_the_mean_are_rounding(check: Any) -> None:
    def surrogate(model: nn.Module, rows: Any) -> Tensor:
        chosen = model(rows[0]).log_softmax(-1).gather(1, rows[1][:, None])
        return -((chosen - chosen.detach()).exp()[:, 0] * rows[2]).mean()

    for seed in range(10):
        torch.manual_seed(seed)
        returns = 1000 * torch.randn(64)
        made = step(nn.Linear(8, 3), ab.ModelLoss(call=surrogate), options=ab.Options(check=check))
        assert made((*batch(64), returns - returns.mean())).compared == 1
