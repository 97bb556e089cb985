"""The front door: which batches it takes, how it cuts them, what it reads anew at every step."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from anybatch import Options, Step, Total
from anybatch.engine import Plan
from anybatch.testing import GradientRecorder, reference_step, relative_error, tolerance
from tests.snapshots import make_batch, make_step
from tests.zoo import Made, Perceptron

X = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randint(4, (10,), generator=torch.Generator().manual_seed(1))


@dataclass
class Pair:
    a: Tensor
    target: Tensor


BATCHES: dict[str, Any] = {
    "pair": (X, Y),
    "list": [X, Y],
    "nested pair": ((X, X.flip(0)), Y),
    "more inputs": (X, X.flip(0), Y),
    "dict": {"a": X, "labels": Y},
    "keywords": {"a": X, "b": X.flip(0), "target": Y},
    "None among them": {"a": X, "b": None, "y": Y},
    "UserDict": UserDict({"a": X, "label": Y}),
    "dataclass": Pair(X, Y),
}


@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_batches_of_every_form_are_exact_in_every_cut(batch: Any, micro_batch: int | None) -> None:
    inner = Perceptron(3, 4).double()
    model = Made(lambda self, a, b=None: self.inner(a if b is None else a - b), inner=inner)
    recorder = GradientRecorder(model)
    report = Step(model, nn.CrossEntropyLoss(), recorder, micro_batch=micro_batch)(batch)
    expected = reference_step(model, nn.CrossEntropyLoss(), batch)
    limit = tolerance(torch.float64, terms=10)
    assert relative_error(recorder.gradients, expected.gradients) <= limit
    assert relative_error(report.loss, expected.loss) <= limit
    assert report.rows == report.weights["loss"] == 10


def test_plan_says_how_a_batch_will_be_cut() -> None:
    step = make_step(micro_batch=4, clip_norm=2.0, accumulate=torch.float64)
    settings = {"clip_norm": 2.0, "accumulate": "float64", "batch_norm": "micro"}
    assert step.plan(100) == Plan(rows=100, micro_batch=4, **settings)
    for rows, count in ((3, 1), (4, 1), (10, 3)):
        assert step(make_batch(rows=rows)).micro_batches == step.plan(rows).micro_batches == count


def test_several_optimizers_make_one_update_each() -> None:
    """As one optimizer of all parameters makes it."""

    def made(*, apart: bool) -> Step:
        torch.manual_seed(0)
        model = Perceptron(3, 4)
        parts = [model.layers[0], model.layers[2]] if apart else [model]
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in parts]
        options = Options(scheduler=[StepLR(one, 1, gamma=0.5) for one in optimizers])
        loss = nn.CrossEntropyLoss()
        return Step(model, loss, optimizers, options=options, micro_batch=3, clip_norm=0.1)

    apart, together = made(apart=True), made(apart=False)
    for seed in range(3):
        assert apart(make_batch(seed)) == together(make_batch(seed))
    assert all(map(torch.equal, apart.model.parameters(), together.model.parameters()))


def test_parts_that_change_count_from_the_next_step() -> None:
    model, loss, other = nn.Linear(3, 2), nn.CrossEntropyLoss(), nn.Parameter(torch.ones(2))
    step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch=2)
    batch = torch.randn(4, 3), torch.randint(2, (4,))
    for _ in range(5):  # the first steps gather anew in any case
        step(batch)
    model.bias.requires_grad_(False)
    before, loss.reduction, loss.label_smoothing = model.bias.detach().clone(), "sum", 0.3
    expected = loss(model(batch[0]), batch[1])
    assert relative_error(step(batch).loss, expected) <= tolerance(torch.float32, terms=4)
    assert torch.equal(model.bias, before)
    model.bias.requires_grad_(True)
    model.register_parameter("other", other)
    model.register_forward_hook(lambda module, inputs, output: output * module.other)
    step.optimizers[0].add_param_group({"params": [other]})
    step(batch)
    assert not torch.equal(model.bias, before)
    assert not torch.equal(other, torch.ones(2))


@pytest.mark.parametrize("micro_batch", [None, 4])
def test_the_critic_of_a_generators_loss_keeps_its_gradients(micro_batch: int | None) -> None:
    generator, critic, x = nn.Linear(3, 2), nn.Linear(2, 1), torch.randn(10, 3)
    fooled = lambda model, micro: Total(critic(model(micro)).exp().sum(), len(micro))  # noqa: E731
    step = Step(generator, fooled, torch.optim.SGD(generator.parameters(), lr=0.1), micro_batch=micro_batch)
    critic.weight.grad = found = torch.ones_like(critic.weight)
    step(x)
    assert critic.weight.grad is found
    assert found.eq(1).all()
    assert critic.bias.grad is None
