import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import ModelLoss, Step, Terms, Total
from anybatch.core.batch import OpenBatch, SampleBatch, TensorBatch
from anybatch.core.errors import LossError
from anybatch.losses import additivity as additive
from anybatch.losses.additivity import refuse_what_does_not_add_up
from anybatch.losses.resolve import resolve
from anybatch.memory.meter import Meter
from anybatch.state import rng
from anybatch.testing import Perceptron

ROWS = 7


def make_batch() -> tuple[Tensor, Tensor]:
    labels = torch.randint(3, (ROWS,))
    labels[::3] = -100
    return torch.randn(ROWS, 4), labels


def by_labels(model: nn.Module, micro: Any) -> Total:
    losses = F.cross_entropy(model(micro[0]), micro[1], reduction="sum")
    return Total(losses, (micro[1] != -100).sum())


def by_rows(model: nn.Module, micro: Any) -> Total:
    return Total(F.cross_entropy(model(micro[0]), micro[1]) * len(micro[0]), len(micro[0]))


def look(loss: Any, *, model: nn.Module | None = None, batch: Any = None, micro_batch: int = 4) -> None:
    model = Perceptron(4, 3) if model is None else model
    given = TensorBatch(make_batch()) if batch is None else batch
    refuse_what_does_not_add_up(resolve(loss), model, list(model.modules()), given, micro_batch)


def test_a_loss_that_adds_up_passes() -> None:
    look(by_labels)
    look(Terms(lambda model, micro: {"a": by_labels(model, micro), "b": Total(1.0, 1)}))
    look(nn.CrossEntropyLoss())


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 100])
def test_a_wrong_weight_is_refused(micro_batch: int) -> None:
    with pytest.raises(LossError, match="totals of by_rows to add up"):
        look(by_rows, micro_batch=micro_batch)


def test_one_wrong_term_is_named() -> None:
    loss = Terms(lambda model, micro: {"right": by_labels(model, micro), "wrong": by_rows(model, micro)})
    with pytest.raises(LossError, match="'wrong'"):
        look(loss)


def test_samples_are_looked_at_too() -> None:
    def collate(samples: list[Any]) -> Any:
        return tuple([torch.stack(part) for part in zip(*samples, strict=True)])

    batch = SampleBatch(list(zip(*make_batch(), strict=True)), collate)
    look(by_labels, batch=batch)
    with pytest.raises(LossError, match="add up"):
        look(by_rows, batch=batch)


def test_rows_that_meet_in_the_model_are_refused() -> None:
    class Centre(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    with pytest.raises(LossError, match="rows meet"):
        look(by_labels, model=nn.Sequential(Centre(), Perceptron(4, 3)))


class Jitter(nn.Module):
    """Random in evaluation mode too."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * self.draw()


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random], ids=["torch", "python"])
def test_what_draws_random_numbers_is_left_alone(draw: Any) -> None:
    model, batch = nn.Sequential(Jitter(draw), Perceptron(4, 3)), TensorBatch(make_batch())
    before = rng.capture_process()
    look(by_labels, model=model, batch=batch)
    assert not rng.has_moved(before)


def test_dropout_and_batch_norm_do_not_disturb() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), Perceptron(4, 3))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    look(by_labels, model=model)
    look(by_labels, model=nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), Perceptron(4, 3)))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_buffers_come_back() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    model = nn.Sequential(Counter(), Perceptron(4, 3))
    look(by_labels, model=model)
    assert model[0].calls == 0


def test_what_fails_is_left_to_the_step() -> None:
    def penalty(model: nn.Module, micro: Any) -> Total:
        x = micro[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)  # needs a graph
        return Total(slope.square().sum(), len(x))

    look(penalty)


def test_masked_rows_and_single_rows_are_no_fault() -> None:
    x, y = make_batch()
    look(by_labels, batch=TensorBatch((x, torch.full_like(y, -100))))
    look(by_rows, batch=TensorBatch((x[:1], y[:1])))
    look(by_rows, batch=OpenBatch())


class OwnMean(nn.Module):
    """Computes its own loss, and divides the mean once more by the rows."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.body, self.twice = Perceptron(4, 3), twice

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.body(x), y)
        return loss / len(y) if self.twice else loss


def test_a_model_that_computes_its_own_loss_is_looked_at_too() -> None:
    """Micro-batches of one size show the same factor, so that nothing else would tell."""
    look(ModelLoss(), model=OwnMean(twice=False))
    with pytest.raises(LossError, match="OwnMean"):
        look(ModelLoss(), model=OwnMean(twice=True))


def test_everything_is_as_it_was_found() -> None:
    """Buffers that a forward replaces, gradients that a loss clears, modes of a model with its own eval()."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Perceptron(4, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return self.body(x)

        def train(self, mode: bool = True) -> nn.Module:
            raise AssertionError("some models change their weights here")

    def clearing(model: nn.Module, micro: Any) -> Total:
        model.zero_grad()
        return by_labels(model, micro)

    model = Own()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = model.calls
    look(clearing, model=model)
    assert model.calls is before
    assert before == 0
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())


def test_models_without_floating_parameters_are_no_fault() -> None:
    class Integers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Perceptron(4, 3)
            self.packed = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    look(by_labels, model=Integers())
    look(lambda model, micro: Total(model(micro[0]).sum(), len(micro[0])), model=nn.Identity())


def distance(model: nn.Module, micro: Any) -> Total:
    """Of a distribution to itself: nothing but rounding."""
    likely = model(micro[0]).log_softmax(1)
    return Total(F.kl_div(likely, model(micro[0] * 1).softmax(1), reduction="sum"), len(micro[0]))


def in_float32(model: nn.Module, micro: Any) -> Total:
    losses = F.cross_entropy(model(micro[0].double()).float(), micro[1], reduction="sum")
    return Total(losses, (micro[1] != -100).sum())


def cancelling(model: nn.Module, micro: Any) -> Total:
    return Total((model(micro[0]) - model(micro[0] * (1 + 1e-7))).sum(), len(micro[0]))


@pytest.mark.parametrize("seed", range(5))
def test_rounding_is_no_fault(seed: int) -> None:
    torch.manual_seed(seed)
    look(distance)
    look(cancelling)
    look(in_float32, model=Perceptron(4, 3).double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        look(lambda model, micro: Total(-model(micro[0]).sum(), len(micro[0])))


def test_a_loss_that_is_not_the_same_twice_is_left_alone() -> None:
    own = torch.Generator().manual_seed(0)

    def noisy(model: nn.Module, micro: Any) -> Total:
        noise = torch.randn(micro[0].shape, generator=own)
        return Total(model(micro[0] + noise).square().sum(), len(micro[0]))

    look(noisy)


def test_it_says_whether_the_rows_could_tell() -> None:
    def asked(loss: Any, batch: Any) -> bool:
        model = Perceptron(4, 3)
        return refuse_what_does_not_add_up(
            resolve(loss), model, list(model.modules()), TensorBatch(batch), len(batch[0])
        )

    x, y = make_batch()
    assert asked(nn.CrossEntropyLoss(), (x, y))
    assert asked(by_labels, (x, y))
    assert not asked(by_labels, (x[:1], y[:1]))
    assert not asked(by_labels, (x, torch.full_like(y, -100)))


class Scores(nn.Module):
    """A model whose own loss is one of its scores and labels."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.body, self.loss = nn.Linear(4, 3), loss

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {"loss": self.loss(self.body(x), x, y)}


def contrastive(scores: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores @ x[:, :3].T, torch.arange(len(x)))


def weighted_by_hand(scores: Tensor, x: Tensor, y: Tensor) -> Tensor:
    weights = 1 / (torch.bincount(y.clamp(min=0), minlength=3) + 1.0)
    return (F.cross_entropy(scores, y.clamp(min=0), reduction="none") * weights[y.clamp(min=0)]).mean()


def divided_by_the_largest(scores: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores / (1 + scores.detach().abs().max()), y)


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize(
    "labels", [[0, 1, 1, 0, 0, 1], [0, 1, 2, 0, 1, 1, 2], [-100, -100, 2, 0, -100, 1, 2]]
)
@pytest.mark.parametrize("loss", [contrastive, weighted_by_hand, divided_by_the_largest])
def test_few_rows_do_not_hide_a_fault(loss: Any, labels: list[int], micro_batch: int) -> None:
    """Small micro-batches show no fault of their own, so more rows than that are looked at."""
    model, y = Scores(loss), torch.tensor(labels)
    step = Step(model, ModelLoss(), torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=micro_batch)
    with pytest.raises(LossError):
        step({"x": torch.randn(len(y), 4), "y": y})


@pytest.mark.parametrize("micro_batch", [1, 5])
@pytest.mark.parametrize(("asked", "most"), [(8, 8), (4, 4), (1, 3)])
def test_no_more_rows_are_looked_at_than_asked_for(asked: int, most: int, micro_batch: int) -> None:
    model, seen = nn.Linear(2, 1), [0]

    def loss(model: nn.Module, micro: Tensor) -> Total:
        seen.append(len(micro))
        return Total(model(micro).square().sum(), len(micro))

    rows, own = TensorBatch(torch.randn(20, 2)), resolve(loss)
    assert refuse_what_does_not_add_up(own, model, [model], rows, micro_batch, most=asked)
    assert max(seen) == most


@pytest.mark.parametrize("kept", [True, False])
def test_nothing_is_kept_of_a_look_at_a_models_own_loss(kept: bool, monkeypatch: Any) -> None:
    """Of sixteen layers a graph would hold sixteen activations."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)])

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.layers(inputs), labels)}

    if kept:
        monkeypatch.setattr(additive, "_nothing_kept", lambda loss: nullcontext())
    model = Own()
    rows = TensorBatch({"inputs": torch.randn(8, 64), "labels": torch.arange(8)})
    with Meter(model) as meter:
        assert refuse_what_does_not_add_up(resolve(ModelLoss()), model, [*model.modules()], rows, 4)
    assert (meter.peak - meter.held > 16 * rows.whole["inputs"].nbytes) is kept


class Heads(nn.Module):
    """Two losses, weighed by a table, and one of them scaled by how many rows come together."""

    def __init__(self, *, slopes: bool = False) -> None:
        super().__init__()
        self.layer, self.slopes = nn.Linear(4, 3), slopes

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layer(inputs)
        if self.slopes:  # a graph of its own
            inner = inputs.detach().requires_grad_()
            slope = torch.autograd.grad(self.layer(inner).tanh().sum(), inner)[0]
            scores = scores + slope.sum(1, keepdim=True)
        one, other = F.cross_entropy(scores, labels), F.mse_loss(scores, scores.detach() + 1)
        losses = torch.stack([one * len(inputs) / 4, other])
        return {"loss": (losses * torch.tensor([0.3, 0.7])).sum()}


@pytest.mark.parametrize("slopes", [False, True])
def test_a_fault_is_found_whatever_a_graph_is_needed_for(slopes: bool) -> None:
    batch = TensorBatch({"inputs": torch.randn(8, 4), "labels": torch.randint(3, (8,))})
    with pytest.raises(LossError):
        look(ModelLoss(), model=Heads(slopes=slopes), batch=batch)


def forces(model: nn.Module, micro: Any) -> Total:
    with torch.enable_grad():
        places = micro[0].detach().requires_grad_()
        force = torch.autograd.grad(model(places).tanh().sum(), places, create_graph=True)[0]
    return Total((force - 1).square().mean() + by_rows(model, micro).sum * 0, 1)


def test_a_loss_that_takes_a_gradient_of_its_own_is_looked_at() -> None:
    with pytest.raises(LossError):
        look(forces)
