"""What is known: which updates are due, what is saved of it, and what was moved or heard on the way."""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import LossError
from anybatch.engine import is_due
from tests.faults.faulty import scarce_in_passes
from tests.zoo import Made, Perceptron


def make(model: nn.Module, loss: Any = None, **options: Any) -> ab.Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return ab.Step(
        model, loss or nn.CrossEntropyLoss(), optimizer, micro_batch=4, options=ab.Options(**options)
    )


def rows(count: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4), torch.randint(3, (count,))


def test_the_calendar() -> None:
    assert [one for one in range(1, 1100) if is_due(one)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
        512,
        768,
        1024,
    ]
    assert [one for one in range(1, 20) if is_due(one, 7)] == [1, 2, 4, 7, 8, 14, 16]
    step = make(Perceptron(4, 3))
    assert [step(rows()).compared for _ in range(9)] == [1, 2, 2, 4, 4, 4, 4, 8, 8]
    often = make(Perceptron(4, 3), check=3)
    assert [often(rows()).compared for _ in range(7)] == [1, 2, 3, 4, 4, 6, 6]


def test_what_is_known_prints_and_is_saved() -> None:
    step = make(Perceptron(4, 3))
    assert "nothing was compared yet" in str(step.known)
    for _ in range(3):
        step(rows())
    step((torch.randn(16, 2, 4).mean(1), torch.randint(3, (16,))))  # as many axes: the same kind
    assert len(str(step.known).splitlines()) == 1
    assert "up to 16 rows, parts from 4: a few compared at update 4, the loss of all at update 4" in str(
        step.known
    )
    held = io.BytesIO()
    torch.save(step.state_dict(), held)
    held.seek(0)
    again = make(Perceptron(4, 3))
    again.load_state_dict(torch.load(held))
    assert "a few compared at update 4, the loss of all at update 4, largest" in str(again.known)
    assert again(rows()).compared == 5  # its attributes are still to be compared
    assert [again(rows()).compared for _ in range(3)] == [5, 5, 8]


def test_limits_of_memory_are_known() -> None:
    step = make(Perceptron(4, 3), check=False)
    with scarce_in_passes({2}):
        assert step(rows()).too_large
    assert "memory ran out: 2 rows fit" in str(step.known)


def hardest(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses.topk(min(16, len(losses))).values.mean()


def images(draw: Any = lambda x: x) -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)
    )
    return Made(lambda self, x: self.body(draw(x)), body=body)


@pytest.mark.parametrize("draw", [lambda x: x, lambda x: x + 0.1 * torch.randn_like(x)], ids=["", "noise"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss: ab.ModelLoss(call=loss),
        lambda loss: lambda m, b: ab.Total(loss(m, b) * len(b[0]), len(b[0])),
    ],
    ids=["own", "terms"],
)
def test_the_hardest_of_many_large_rows_are_seen_in_small_parts(draw: Any, wrap: Any) -> None:
    step = make(images(draw), wrap(hardest))
    with pytest.raises(LossError, match="Expected the same loss from 48 rows as 48 and as 4"):
        step((torch.randn(48, 3, 96, 96), torch.randint(3, (48,))))
    assert not step.model._forward_hooks  # also after a failure


class TimeFirst(nn.Module):
    """Outputs of shape (time, rows, classes), where both are multiples of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(9, 5), nn.GRU(5, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.words(tokens).transpose(0, 1))[0]


def of_time(model: nn.Module, batch: Any) -> ab.Total:
    scores = model(batch[0])
    loss = F.cross_entropy(scores.flatten(0, 1), batch[1].T.flatten(), reduction="sum")
    return ab.Total(loss, batch[1].numel())


def twice(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]).softmax(1), model(batch[0] + 1).softmax(1))


def scaled() -> nn.Module:
    model = Perceptron(4, 3)
    model.register_forward_hook(lambda module, args, output: 3 * output)
    return model


@dataclass
class Output:
    """No tree of torch's, and compared entry by entry."""

    scores: Tensor


def views(model: nn.Module, batch: Any) -> ab.Total:
    """Rows of two views, one after another."""
    one, other = model(torch.cat([batch[0], batch[0] + 1])).chunk(2)
    return ab.Total((one - other).square().sum() + F.cross_entropy(one, batch[1], reduction="sum"), len(one))


def counted(self: Any, x: Tensor) -> Tensor:
    self.count = len(x)
    return self.body(x)


def by_count(model: Any, batch: Any) -> ab.Total:
    return ab.Total(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), model.count)


def of_words(model: nn.Module, batch: Any) -> ab.Total:
    scores = model(batch[0])
    return ab.Total(F.cross_entropy(scores, batch[1].T.reshape(-1), reduction="sum"), len(scores))


def first(model: nn.Module, batch: Any) -> ab.Total:
    return ab.Total(F.cross_entropy(model(batch[0])[0], batch[1], reduction="sum"), len(batch[0]))


@pytest.mark.parametrize(("model", "loss", "batch"), [
    (TimeFirst(), of_time, (torch.randint(9, (16, 8)), torch.randint(6, (16, 8)))),
    (Perceptron(4, 3), ab.ModelLoss(call=twice), rows()),
    (scaled(), ab.ModelLoss(call=lambda m, b: F.cross_entropy(m(b[0]), b[1])), rows()),
    (Made(lambda self, x: {"a": self.body(x), "n": 3}, body=Perceptron(4, 3)),
     ab.PerRow(lambda out, y: F.cross_entropy(out["a"], y, reduction="none") * out["n"]), rows()),
    (Perceptron(4, 3), views, rows()),
    (Made(counted, body=Perceptron(4, 3), count=0), by_count, rows()),
    (Made(lambda self, x: self.body(x).flatten(0, 1), body=TimeFirst()), of_words,
     (torch.randint(9, (16, 8)), torch.randint(6, (16, 8)))),
    (Made(lambda self, x: Output(self.body(x)), body=Perceptron(4, 3)),
     ab.PerRow(lambda out, y: F.cross_entropy(out.scores, y, reduction="none")), rows()),
    (Made(lambda self, x: (self.body(x), torch.eye(2).to_sparse()), body=Perceptron(4, 3)), first, rows()),
], ids=["time", "twice", "a hook", "a mapping", "views", "beside", "flat", "no tree", "sparse"])  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_outputs_are_joined_rightly(model: nn.Module, loss: Any, batch: Any) -> None:
    step = make(model.double(), loss, check="always")
    batch = [one.double() if one.is_floating_point() else one for one in batch]
    assert [step(tuple(batch)).compared for _ in range(4)] == [1, 2, 3, 4]


def test_a_teacher_does_not_run_on_all_rows(capsys: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        print(len(x))
        return self.body(x)

    teacher = Made(forward, body=images()).requires_grad_(False)

    def distilled(model: nn.Module, batch: Any) -> ab.Total:
        return ab.Total((model(batch[0]) - teacher(batch[0])).square().sum(), len(batch[0]))

    make(images(), distilled)((torch.randn(64, 3, 64, 64), torch.zeros(64)))
    assert max(map(int, capsys.readouterr().out.split())) < 64


def moving(uses: Any) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return uses(self, self.body(x))

    return Made(forward, body=Perceptron(4, 3), calls=0, ready=5)


def test_a_number_that_a_forward_moves_and_computes_with_is_refused_by_name() -> None:
    step = make(moving(lambda self, out: out * (2.0 if self.calls > 10 else 1.0)))
    with pytest.raises(LossError, match=r"once 'calls' has moved on .* after the step"):
        any(step(rows(12)).loss < 0 for _ in range(3))
    assert step.model.calls < 10
    harmless = make(moving(lambda self, out: out))
    assert all(harmless(rows()).checked for _ in range(5))


def test_the_own_zero_grad_of_an_optimizer_is_called() -> None:
    class Counting(torch.optim.SGD):
        cleared = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.cleared += 1
            super().zero_grad(set_to_none)

    model = Perceptron(4, 3)
    optimizer = Counting(model.parameters(), lr=0.1)
    step = ab.Step(model, nn.CrossEntropyLoss(), optimizer, micro_batch=4)
    for _ in range(3):
        step(rows())
    assert optimizer.cleared == 3


def test_draws_of_numpy_in_a_loss_are_told_and_not_refused() -> None:
    def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.randn(len(outputs), 3)).to(outputs)
        return (outputs - noise).square().sum(1)

    step = make(Perceptron(4, 3), ab.PerRow(noisy))
    with pytest.warns(UserWarning, match="draws random numbers"):
        reports = [step(rows()) for _ in range(4)]
    assert not any(one.checked for one in reports)


def test_a_router_that_counts_its_load_is_seen() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        best, out = self.gate(x).argmax(1), torch.zeros(len(x), 3)
        for at in range(2):
            taken = (best == at).nonzero()[:, 0][:16]
            self.load[at] += len(taken)
            out = out.index_add(0, taken, self.body(x[taken]) * (at + 1))
        return out

    model = Made(forward, gate=nn.Linear(4, 2), body=Perceptron(4, 3))
    model.register_buffer("load", torch.zeros(2), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = ab.Step(model, nn.CrossEntropyLoss(), optimizer, micro_batch=16)
    with pytest.raises(LossError, match="Expected the same loss from 64 rows"):
        step(rows(64))
