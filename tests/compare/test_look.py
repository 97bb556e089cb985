"""Before the first cut a few rows must give the same loss and gradient for every split."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.errors import LossError
from anybatch.memory.meter import Meter
from tests.options import flat
from tests.snapshots import assert_same, same_as_before, snapshot
from tests.zoo import Perceptron

ROWS = 13


def make_batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    labels = torch.randint(3, (rows,))
    labels[::3] = -100
    return torch.randn(rows, 4), labels


def make(model: nn.Module, loss: Any, micro_batch: int | None = 4, **options: Any) -> ab.Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Step(model, loss, optimizer, micro_batch=micro_batch, **flat(options))


def step_on(model: nn.Module, loss: Any, batch: Any, micro_batch: int = 4, **options: Any) -> Any:
    step = make(model, loss, micro_batch, **options)
    return step, step(batch)


def look(loss: Any, *, model: nn.Module | None = None, batch: Any = None, **options: Any) -> None:
    step_on(Perceptron(4, 3) if model is None else model, loss, batch or make_batch(), **options)


def by_labels(model: nn.Module, micro: Any) -> ab.Total:
    losses = F.cross_entropy(model(micro[0]), micro[1], reduction="sum")
    return ab.Total(losses, (micro[1] != -100).sum())


def by_rows(model: nn.Module, micro: Any) -> ab.Total:
    return ab.Total(F.cross_entropy(model(micro[0]), micro[1]) * len(micro[0]), len(micro[0]))


def mean_of_means(model: nn.Module, micro: Any) -> ab.Total:
    return ab.Total(model(micro[0]).square().mean(), 1)


def broadcast(model: nn.Module, micro: Any) -> ab.Total:
    errors = (model(micro[0])[:, :1] - micro[1].float()).square()  # (rows, 1) and (rows,)
    return ab.Total(errors.sum(), errors.numel())


class Meeting(nn.Module):
    """A function over rows between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor], inputs: int = 4) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(inputs, 4), function, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class WrongAxis(nn.MultiheadAttention):
    """Attention that takes rows for places."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore
        x = x[:, None] * torch.ones(1, 3, 1)
        return super().forward(x, x, x, need_weights=False)[0].mean(1)


MEETINGS = {
    "mean": lambda x: x - x.mean(0),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "shuffled": lambda x: x.flip(0),
    "largest": lambda x: x / x.detach().abs().max(),
    "attention": WrongAxis(4, 2, dropout=0.1),
    "in training": lambda x: x + 0.3 * x.mean(0, keepdim=True) if x.requires_grad else x,
}
LOSSES = {"torch": nn.CrossEntropyLoss(), "own": by_labels, "function": partial(F.cross_entropy)}


@pytest.mark.parametrize(
    ("loss", "micro_batch"),
    [*[(LOSSES["own"], size) for size in (1, 2, 5, 12)], (LOSSES["torch"], 3), (LOSSES["function"], 3)],
)
@pytest.mark.parametrize("meeting", MEETINGS.values(), ids=MEETINGS)
def test_rows_that_meet_in_the_model_are_refused(meeting: Any, loss: Any, micro_batch: int) -> None:
    with pytest.raises(LossError, match="Rows affect"):
        look(loss, model=Meeting(meeting), micro_batch=micro_batch)


def test_only_the_gradient_may_tell() -> None:
    """The value of the loss is the same for every split."""

    class Crossed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
            return grad - grad.mean(0)

    model = nn.Sequential(nn.Linear(4, 12, bias=False), Meeting(Crossed.apply, 12).requires_grad_(False))
    with pytest.raises(LossError, match=r"gradients that differ by .*, most in 0\.weight"):
        look(nn.CrossEntropyLoss(), model=model)


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 12])
@pytest.mark.parametrize("loss", [by_rows, mean_of_means, broadcast])
def test_a_wrong_weight_is_refused_where_the_batch_is_cut(loss: Any, micro_batch: int) -> None:
    model, batch = Perceptron(4, 3), make_batch()
    step = make(model, loss, micro_batch)
    for _ in range(2):  # and it stays refused
        with (
            same_as_before(step),
            pytest.raises(LossError, match=rf"{loss.__name__} for every split.*check=False"),
        ):
            step(batch)
    for allowed in ({"micro_batch": None}, {"check": False}):
        assert make(model, loss, **allowed)(make_batch(12)).updated


class Queue(nn.Module):
    """Keeps its last outputs and computes with them, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.register_buffer("queue", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        self.queue = self.queue + out.detach().sum(0)
        return out * self.queue


def test_a_refusal_says_what_is_likely() -> None:
    with pytest.raises(LossError, match="The forward changes 'queue'"):
        look(nn.CrossEntropyLoss(), model=Queue())


def test_a_wrong_term_is_named() -> None:
    loss = ab.Terms(lambda model, micro: {"right": by_labels(model, micro), "wrong": by_rows(model, micro)})
    with pytest.raises(LossError, match="'wrong'"):
        look(loss)


def test_samples_whole_batch_losses_and_windows_are_looked_at_too() -> None:
    loss = ab.WholeBatch(lambda out: (out @ out.T).logsumexp(1).mean())
    look(loss, batch=(make_batch()[0],))
    for micro_batch in (3, 4, 6):
        with pytest.raises(LossError, match="Rows affect"):
            look(loss, batch=(5 * make_batch()[0],), model=Meeting(MEETINGS["mean"]), micro_batch=micro_batch)
    samples = list(zip(*make_batch(), strict=True))
    look(by_labels, batch=samples, collate=torch.utils.data.default_collate)
    with pytest.raises(LossError, match="padded places"):
        look(by_rows, batch=samples, collate=torch.utils.data.default_collate)
    window = make(Meeting(MEETINGS["mean"]), nn.CrossEntropyLoss(), None).window()
    window.add(make_batch())  # alone it is no cut
    with pytest.raises(LossError, match="Rows affect"):
        window.add(make_batch())
    window = make(Perceptron(4, 3), mean_of_means, None).window()
    window.add(make_batch(1))  # a single row tells nothing
    with pytest.raises(LossError, match="for every split"):
        window.add(make_batch())


def collate_boxes(samples: list[Any]) -> Any:
    """Stack images; concatenate their boxes, of which an image may have none."""
    places = torch.cat([torch.full((len(boxes),), place) for place, (_, boxes) in enumerate(samples)])
    return torch.stack([x for x, _ in samples]), torch.cat([boxes for _, boxes in samples]), places


def of_boxes(model: nn.Module, micro: Any) -> ab.Total:
    x, boxes, places = micro
    return ab.Total((model(x)[places] - boxes).square().sum(), len(boxes))


@pytest.mark.parametrize("options", [{}, {"order": "length"}, {"micro_batch": None, "memory": "1GiB"}])
def test_samples_with_an_empty_tensor_are_looked_at(options: dict[str, Any]) -> None:
    samples = [(torch.randn(4), torch.rand(row % 3, 3)) for row in range(ROWS)]
    step = make(Perceptron(4, 3), of_boxes, collate=collate_boxes, **options)
    assert step(samples).checked
    assert ab.check(Perceptron(4, 3), of_boxes, samples[:4], collate=collate_boxes).exact


class OwnLoss(nn.Module):
    """A model whose own loss is one of its scores and labels."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.body, self.loss = nn.Linear(4, 3), loss

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {"loss": self.loss(self.body(x), x, y)}


def distance(model: nn.Module, micro: Any) -> ab.Total:
    """Of a distribution to itself: nothing but rounding."""
    likely = model(micro[0]).log_softmax(1)
    return ab.Total(F.kl_div(likely, model(micro[0] * 1).softmax(1), reduction="sum"), len(micro[0]))


def cancelling(model: nn.Module, micro: Any) -> ab.Total:
    return ab.Total((model(micro[0]) - model(micro[0] * (1 + 1e-7))).sum(), len(micro[0]))


def in_float32(model: nn.Module, micro: Any) -> ab.Total:
    losses = F.cross_entropy(model(micro[0].double()).float(), micro[1], reduction="sum")
    return ab.Total(losses, (micro[1] != -100).sum())


def penalty(model: nn.Module, micro: Any) -> ab.Total:
    x = micro[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return ab.Total(slope.square().sum(), len(x))


class Random(nn.Module):
    """Random in ways that differ from cut to cut."""

    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.draw, self.last = draw, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x * self.draw(x))


class Dropped(nn.Module):
    """Leaves a layer out for all rows at once, and the other one for others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if torch.rand(()) < 0.5 else x
        return self.last(x)


OWN = torch.Generator().manual_seed(0)
SOUND = {
    "dropout": (nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.5), nn.Linear(9, 3)), nn.CrossEntropyLoss()),
    "torch's numbers": (Random(lambda x: torch.rand_like(x)), nn.CrossEntropyLoss()),
    "steps of noise": (Random(lambda x: torch.randint(9, (len(x), 1)) / 9), nn.CrossEntropyLoss()),
    "layers left out": (Dropped(), nn.CrossEntropyLoss()),
    "Python's numbers": (Random(lambda x: random.random()), nn.CrossEntropyLoss()),
    "an own generator's": (Random(lambda x: torch.rand(x.shape, generator=OWN)), nn.CrossEntropyLoss()),
    "bfloat16": (nn.Sequential(nn.Linear(4, 99), nn.Tanh(), nn.Linear(99, 3)).bfloat16(), in_float32),
    "next to nothing": (Perceptron(4, 3), distance),
    "what cancels": (Perceptron(4, 3), cancelling),
    "float32 in float64": (Perceptron(4, 3).double(), in_float32),
    "a gradient in the loss": (Perceptron(4, 3), penalty),
    "micro statistics": (nn.Sequential(nn.BatchNorm1d(4), Perceptron(4, 3)), nn.CrossEntropyLoss()),
    "sparse": (nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), Perceptron(4, 3)), nn.CrossEntropyLoss()),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_passes(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    model, loss = SOUND[name]
    x, y = make_batch()
    x = torch.randint(9, (ROWS, 5)) if name == "sparse" else x
    if name == "bfloat16":
        loss = lambda model, micro: by_labels(model, (micro[0].bfloat16(), micro[1]))  # noqa: E731
    is_random = name in ("Python's numbers", "an own generator's")
    with pytest.warns(UserWarning, match="random numbers") if is_random else nullcontext():
        _, report = step_on(model, loss, (x, y), 5, batch_norm="micro")
    assert report.checked == (not is_random and name != "micro statistics")


def mixed_up(model: nn.Module, micro: Any) -> ab.Total:
    x, y = micro
    share, other = torch.rand(()), torch.randperm(len(x))
    out = model(share * x + (1 - share) * x[other])
    losses = share * F.cross_entropy(out, y.clamp(0)) + (1 - share) * F.cross_entropy(out, y.clamp(0)[other])
    return ab.Total(losses * len(x), len(x))


def of_negatives(model: nn.Module, micro: Any) -> ab.Total:
    out = model(micro[0])
    far = (out - out[torch.randint(len(out), (len(out),))]).square().sum(1)
    return ab.Total(F.relu(1 - far).sum(), len(out))


def noisy_and_wrong(model: nn.Module, micro: Any) -> ab.Total:
    return by_rows(model, (micro[0] + 1e-6 * torch.randn_like(micro[0]), micro[1]))


@pytest.mark.parametrize("micro_batch", [1, 2, 5, 12])
@pytest.mark.parametrize(
    ("loss", "words"),
    [(mixed_up, "draws random numbers"), (of_negatives, "draws random"), (noisy_and_wrong, "Rows affect")],
)
def test_a_loss_that_draws_and_mixes_rows_is_named_as_such(loss: Any, words: str, micro_batch: int) -> None:
    with pytest.raises(LossError, match=words):
        look(loss, micro_batch=micro_batch)
    assert not ab.check(Perceptron(4, 3), loss, make_batch(40)).exact


@pytest.mark.parametrize("options", [{"memory": "64MB"}, {"micro_batch": 4}])
def test_it_adds_nothing_to_gradients_of_the_batch(options: Any) -> None:
    model = nn.Linear(3, 2)
    x, target = torch.randn(16, 3, requires_grad=True), torch.randint(2, (16,))
    ab.Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.0), **flat(options))(
        (x, target)
    )
    (expected,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), target), [x])
    assert x.grad is not None
    assert torch.allclose(x.grad, expected)


def test_it_changes_nothing() -> None:
    """One step with the look gives the very weights, buffers and numbers of one without it."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key = nn.Parameter(torch.ones(4), requires_grad=False)
            self.body, self.calls = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.5), nn.Linear(9, 3)), 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen = self.seen + len(x)
            self.key.data.mul_(0.9).add_(self.body[0].weight.data.mean(0), alpha=0.1)
            return self.body(x) * (1 + random.random())

    found = []
    for check in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        model, batch = Counting(), make_batch()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        step, _ = step_on(model, nn.CrossEntropyLoss(), batch, check=check)
        assert (model.calls, model.seen) == (4, ROWS)
        found.append({name: one for name, one in snapshot(step).items() if "identity" not in name})
    assert_same(*found)


@pytest.mark.parametrize("micro_batch", [1, 2, 5, 10])
@pytest.mark.parametrize(("room", "most"), [(1 << 30, 8), (1, 0)])
def test_eight_rows_go_through_together_if_they_fit(
    micro_batch: int, room: int, most: int, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anybatch.compare.look.parse_memory", lambda *_: room)
    for way in ("whole", "refuse"):
        monkeypatch.setattr(f"anybatch.compare.Witness.{way}", lambda *_: None)

    def loss(model: nn.Module, micro: Tensor) -> ab.Total:
        print(len(micro))  # a list would be put back
        return ab.Total(model(micro).square().sum(), len(micro))

    step, report = step_on(nn.Linear(4, 1), loss, torch.randn(20, 4), micro_batch=micro_batch)
    looked = [*map(int, capsys.readouterr().out.split())][: -report.micro_batches]
    assert max(looked) == (most or max(2, min(8, micro_batch + (micro_batch == 2))))
    looks = []
    for _ in range(7):
        again = step(torch.randn(20, 4))
        looks.append(len(capsys.readouterr().out.split()) > again.micro_batches)
    assert looks == [True, False, True, False, False, False, True]  # updates 2, 4 and 8


def test_a_hook_on_a_parameter_is_named_as_a_cause() -> None:
    model = Perceptron(4, 3)
    name, weight = next(iter(model.named_parameters()))
    weight.register_hook(lambda gradient: gradient / gradient.norm())
    with pytest.raises(LossError, match=rf"a hook on '{name}' changes the gradient of each micro-batch"):
        look(by_labels, model=model)


def by_all(model: nn.Module, micro: Tensor) -> ab.Total:
    out = model(micro).square()
    return ab.Total(out.sum(), out.numel())


def test_rows_of_another_kind_are_looked_at_again_and_so_are_others_where_some_cannot_tell() -> None:
    model = Meeting(lambda x: x - x.mean(0) if x.dim() == 3 else x)
    step, _ = step_on(model, by_all, torch.randn(9, 4))
    step(torch.randn(7, 4))
    with pytest.raises(LossError, match="Rows affect"):
        step(torch.randn(9, 5, 4))
    masked = torch.ones(6, 4), torch.full((6,), -100)
    step, _ = step_on(Meeting(MEETINGS["mean"]), nn.CrossEntropyLoss(), masked)
    with pytest.raises(LossError, match="Rows affect"):
        step(make_batch())


def test_it_keeps_little() -> None:
    """Of two sets of gradients only a sketch of one is kept, beside what a micro-batch takes."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    batch = torch.randn(16, 256), torch.randn(16, 256)
    peaks = []
    for check in (True, False):
        step = make(model, nn.MSELoss(), 8, check=check)
        with Meter(model) as meter:
            step(batch)
        peaks.append(meter.peak - meter.held)
    assert peaks[0] < 1.2 * peaks[1]


def test_pairs_by_place_in_a_whole_batch_loss_are_left_together() -> None:
    def nearest(out: Tensor) -> Tensor:
        """The positive of row i is row i + N, as in SimCLR."""
        scores = (out @ out.T).fill_diagonal_(-torch.inf)
        return F.cross_entropy(scores, (torch.arange(len(out)) + len(out) // 2) % len(out))

    look(ab.WholeBatch(nearest), batch=(torch.randn(16, 4),), micro_batch=8)


def by_numbers(out: Tensor, numbers: Tensor) -> Tensor:
    return F.cross_entropy(out @ out.T, numbers)


@pytest.mark.parametrize(
    "numbers",
    [torch.arange(40), torch.arange(40).roll(20), torch.arange(40) ^ 1, torch.arange(40).clamp(max=33)],
    ids=["each its own", "halves", "pairs", "some the same"],
)
@pytest.mark.parametrize("options", [{"micro_batch": 8}, {"micro_batch": None, "memory": "1GiB"}])
def test_targets_that_number_the_rows_number_those_that_are_compared(numbers: Tensor, options: Any) -> None:
    """A number of a row that is not there is an error, and on an accelerator the end of the process."""
    batch, loss = (torch.randn(40, 4), numbers), ab.WholeBatch(by_numbers)
    assert make(Perceptron(4, 3), loss, **options)(batch).checked
    with pytest.raises(LossError, match="Rows affect"):
        look(loss, batch=batch, model=Meeting(MEETINGS["mean"]))
    assert ab.check(Perceptron(4, 3), loss, batch, rows=8).exact


def test_lazy_parameters_become_what_they_are_in_the_step() -> None:
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Linear(5, 3))
    step, _ = step_on(model, nn.CrossEntropyLoss(), make_batch(), 5, batch_norm="micro")
    assert step(make_batch()).updated
    assert model[0].weight.shape == (5, 4)
    assert model[1].num_batches_tracked == 2 * 3


def test_a_model_stays_compiled() -> None:
    compiled: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        return lambda *args: compiled.append(1) or module(*args)

    model = torch.compile(nn.Sequential(nn.Linear(4, 3)), backend=backend)
    step_on(model, nn.CrossEntropyLoss(), make_batch(16))
    assert len(compiled) == 4  # of the step; the look runs it as it is written
    torch.compiler.reset()


def test_a_models_own_loss_is_read_as_if_nobody_had_looked() -> None:
    found = []
    for check in (True, False):
        torch.manual_seed(0)
        model, (x, y) = OwnLoss(lambda scores, x, y: F.cross_entropy(scores, y)), make_batch()
        step, report = step_on(model, ab.ModelLoss(), {"x": x, "y": y}, check=check)
        found.append((report.loss, step({"x": x, "y": y}).loss, model.body.weight.detach().clone()))
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2])
