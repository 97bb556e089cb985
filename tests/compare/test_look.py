"""Before the first cut a few rows must give the same loss and gradient for every split."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.errors import LossError
from anybatch.memory.meter import Meter
from tests.corpus.faults import Bent
from tests.options import flat
from tests.snapshots import assert_same, same_as_before, snapshot
from tests.zoo import Made, Perceptron, dropout, own_loss

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


def less_mean(x: Tensor) -> Tensor:
    return x - x.mean(0)


def test_only_the_gradient_may_tell() -> None:
    """The value of the loss is the same for every split."""
    crossed = Meeting(lambda x: Bent.apply(x, less_mean), 12).requires_grad_(False)
    with pytest.raises(LossError, match=r"gradients that differ by .*, most in 0\.weight"):
        look(nn.CrossEntropyLoss(), model=nn.Sequential(nn.Linear(4, 12, bias=False), crossed))


@pytest.mark.parametrize("micro_batch", [1, 12])
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


def test_a_wrong_term_is_named() -> None:
    loss = ab.Terms(lambda model, micro: {"right": by_labels(model, micro), "wrong": by_rows(model, micro)})
    with pytest.raises(LossError, match="'wrong'"):
        look(loss)


def test_samples_whole_batch_losses_and_windows_are_looked_at_too() -> None:
    loss = ab.WholeBatch(lambda out: (out @ out.T).logsumexp(1).mean())
    look(loss, batch=(make_batch()[0],))
    for micro_batch in (3, 4, 6):
        with pytest.raises(LossError, match="Rows affect"):
            look(loss, batch=(5 * make_batch()[0],), model=Meeting(less_mean), micro_batch=micro_batch)
    samples = list(zip(*make_batch(), strict=True))
    look(by_labels, batch=samples, collate=torch.utils.data.default_collate)
    with pytest.raises(LossError, match="padded places"):
        look(by_rows, batch=samples, collate=torch.utils.data.default_collate)
    window = make(Meeting(less_mean), nn.CrossEntropyLoss(), None).window()
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

    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls, self.seen = self.calls + 1, self.seen + len(x)
        self.key.data.mul_(0.9).add_(self.body[0].weight.data.mean(0), alpha=0.1)
        return self.body(x) * (1 + random.random())

    found = []
    for check in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        key = nn.Parameter(torch.ones(4), requires_grad=False)
        model: Any = Made(forward, key=key, body=dropout(4, 3), calls=0, seen=torch.zeros(()))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        step, _ = step_on(model, nn.CrossEntropyLoss(), make_batch(), check=check)
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
    step, _ = step_on(Meeting(less_mean), nn.CrossEntropyLoss(), masked)
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
        look(loss, batch=batch, model=Meeting(less_mean))
    assert ab.check(Perceptron(4, 3), loss, batch, rows=8).exact


def test_lazy_parameters_become_what_they_are_in_the_step() -> None:
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Linear(5, 3))
    step, _ = step_on(model, nn.CrossEntropyLoss(), make_batch(), 5, batch_norm="micro")
    assert not step(make_batch()).checked
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
        model, (x, labels) = own_loss(Perceptron(4, 3)), make_batch()
        batch = {"x": x, "labels": labels}
        step, report = step_on(model, ab.ModelLoss(), batch, check=check)
        found.append((report.loss, step(batch).loss, next(model.parameters()).detach().clone()))
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2])
