"""The front door: which batches it takes, how it cuts them, what it reads anew at every step."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Plan, Step, Terms, Total
from anybatch.core.errors import LossError
from anybatch.testing import (
    GradientRecorder,
    Perceptron,
    Transformer,
    reference_step,
    relative_error,
    tolerance,
)
from tests.snapshots import changes, make_batch, make_step, snapshot


def collate(samples: list[Any]) -> Any:
    """Pad token rows to the longest of the micro-batch; 0 is padding, -100 a masked target."""
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(one) for one in samples], batch_first=True)
    return tokens, torch.where(tokens == 0, -100, tokens)


# ---- which batches it takes

X = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randint(4, (10,), generator=torch.Generator().manual_seed(1))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron(3, 4)

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return self.inner(a if b is None else a - b)


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


@pytest.mark.parametrize("micro_batch", [None, 1, 4, 10])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_batches_of_every_form_are_exact_in_every_cut(batch: Any, micro_batch: int | None) -> None:
    model = TwoInputs().double()
    recorder = GradientRecorder(model)
    report = Step(model, nn.CrossEntropyLoss(), recorder, micro_batch=micro_batch)(batch)
    expected = reference_step(model, nn.CrossEntropyLoss(), batch)
    limit = tolerance(torch.float64, terms=10)
    assert relative_error(recorder.gradients, expected.gradients) <= limit
    assert relative_error(report.loss, expected.loss) <= limit
    assert report.rows == report.weights["loss"] == 10


@pytest.mark.parametrize("micro_batch", [None, 1, 3, 7])
def test_samples_are_padded_per_micro_batch_and_stay_exact(micro_batch: int | None) -> None:
    samples = [[3], [1, 2, 3, 4], [5, 6], [1] * 7, [2, 2], [4, 3, 2], [6]]
    model = Transformer(7).double()
    recorder = GradientRecorder(model)
    step = Step(model, nn.CrossEntropyLoss(), recorder, micro_batch=micro_batch, collate=collate)
    report = step(samples)
    expected = reference_step(model, nn.CrossEntropyLoss(), samples, collate=collate)
    assert report.weights == {"loss": sum(map(len, samples))}
    limit = tolerance(torch.float64, terms=len(samples))
    assert relative_error(recorder.gradients, expected.gradients) <= limit
    assert relative_error(report.loss, expected.loss) <= limit


# ---- how it cuts them


def test_plan_says_how_a_batch_will_be_cut() -> None:
    step = make_step(micro_batch=4, clip_norm=2.0, accumulate=torch.float64, compensated=True)
    settings = {"clip_norm": 2.0, "accumulate": "float64", "compensated": True, "batch_norm": "micro"}
    assert step.plan(100) == Plan(rows=100, micro_batch=4, **settings)
    for rows, count in ((3, 1), (4, 1), (10, 3)):
        assert step(make_batch(rows=rows)).micro_batches == step.plan(rows).micro_batches == count


# ---- what it reads anew at every step


def test_several_optimizers_make_one_update_each() -> None:
    torch.manual_seed(0)
    together, apart = Perceptron(3, 4), Perceptron(3, 4)
    apart.load_state_dict(together.state_dict())
    first, last = apart.layers[0], apart.layers[2]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (first, last)]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in optimizers]
    step = Step(apart, nn.CrossEntropyLoss(), optimizers, scheduler=schedulers, micro_batch=3, clip_norm=0.1)
    one = torch.optim.SGD(together.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5)
    twin = Step(together, nn.CrossEntropyLoss(), one, scheduler=scheduler, micro_batch=3, clip_norm=0.1)
    for seed in range(3):
        assert step(make_batch(seed)) == twin(make_batch(seed))
    for a, b in zip(apart.parameters(), together.parameters(), strict=True):
        assert torch.equal(a, b)


def test_lazy_modules_are_made_by_the_first_step() -> None:
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Linear(5, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(model, nn.CrossEntropyLoss(), optimizer, micro_batch=3, batch_norm="micro")
    assert step(make_batch()).updated
    assert model[0].weight.shape == (5, 3)
    assert model[1].num_batches_tracked == 3


def mean_of_means(model: nn.Module, micro: Any) -> Total:
    return Total(F.cross_entropy(model(micro[0]), micro[1]), 1)


def test_a_loss_that_does_not_add_up_is_refused_before_the_first_update() -> None:
    model = Perceptron(3, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(model, mean_of_means, optimizer, micro_batch=3)
    before = snapshot(step)
    for _ in range(2):  # and it stays refused
        with pytest.raises(LossError, match=r"mean_of_means for every split.*check=False"):
            step((X, Y))
        assert changes(before, snapshot(step)) == []
    window = Step(model, mean_of_means, optimizer).window()
    window.add((X[:1], Y[:1]))  # a single row tells nothing
    with pytest.raises(LossError, match="for every split"):
        window.add((X[1:], Y[1:]))
    window.discard()
    assert Step(model, mean_of_means, optimizer)((X, Y)).updated  # uncut, nothing is added up
    assert Step(model, mean_of_means, optimizer, micro_batch=3, check=False)((X, Y)).updated


def test_parts_that_change_count_from_the_next_step() -> None:
    """What does not change is gathered once; what the caller changes must not be missed."""
    model, loss = nn.Linear(3, 2), nn.CrossEntropyLoss()
    step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch=2)
    batch = torch.randn(4, 3), torch.randint(2, (4,))
    for _ in range(5):  # the first steps gather anew in any case
        step(batch)
    model.bias.requires_grad_(False)
    before, other = model.bias.detach().clone(), nn.Parameter(torch.ones(2))
    loss.reduction = "sum"
    assert step(batch).weights == {"loss": 1.0}
    assert torch.equal(model.bias, before)
    model.register_parameter("other", other)
    model.register_forward_hook(lambda module, inputs, output: output * module.other)
    step.optimizers[0].add_param_group({"params": [other]})
    step(batch)
    assert not torch.equal(other, torch.ones(2))


def test_settings_of_the_loss_may_change_between_steps() -> None:
    loss = nn.CrossEntropyLoss()
    step = make_step(loss, micro_batch=3)
    step(make_batch())
    loss.label_smoothing = 0.3
    twin = make_step(nn.CrossEntropyLoss(), micro_batch=3)
    twin(make_batch())
    twin.loss.label_smoothing = 0.3  # type: ignore[attr-defined]
    torch.manual_seed(3)
    report = step(make_batch())
    torch.manual_seed(3)
    assert report == twin(make_batch())


def test_loss_may_have_parameters_of_its_own() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, model: nn.Module, micro: Any) -> Total:
            return Total((self.scale * model(micro[0])).square().sum(), len(micro[0]))

    model, loss = nn.Linear(3, 1), Learned()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    step = Step(model, Terms(loss), optimizer, micro_batch=3)
    step(make_batch())
    assert loss.scale.item() != 2.0
    assert loss.scale.grad is None
