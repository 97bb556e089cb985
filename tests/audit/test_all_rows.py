"""The loss of all rows, compared with that of the micro-batches: what it sees, and what it takes."""

import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import TensorBatch
from anybatch.core.errors import LossError
from anybatch.memory import Following
from tests.audit.test_again import DOORS
from tests.zoo import Made, Perceptron


def hardest(model: nn.Module, micro: Any) -> Tensor:
    losses = F.cross_entropy(model(micro[0]), micro[1], reduction="none")
    return losses.topk(min(9, len(losses))).values.mean()


def residual(model: nn.Module, micro: Any) -> Tensor:
    x = micro[0].detach().requires_grad_()
    (slopes,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slopes.square().sum(1).topk(min(9, len(x))).values.mean()


def drawing(draw: Callable[[Tensor], Tensor]) -> nn.Module:
    return Made(lambda self, x: self.body(draw(x)), body=Perceptron(4, 3))


def unused(x: Tensor) -> Tensor:
    torch.rand(1)
    return x


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("draw", "loss"),
    [
        (lambda x: x + 1e-3 * torch.randn_like(x), hardest),
        (unused, hardest),
        (lambda x: x * (torch.rand(()) > 0.2), hardest),
        (lambda x: x, residual),
        (lambda x: x + 1e-3 * torch.randn_like(x), residual),
    ],
    ids=["noise", "an unused draw", "one draw for all rows", "differentiates inside", "both"],
)
def test_rows_that_meet_only_among_many_are_seen(door: Any, draw: Any, loss: Any) -> None:
    update = door(drawing(draw), ab.ModelLoss(call=loss))
    batch = torch.randn(60, 4), torch.randint(3, (60,))
    with pytest.raises(LossError, match="Expected the same loss from 60 rows"):
        update(batch)


def test_a_few_more_rows_run_where_a_graph_saves_little() -> None:
    def hard(model: nn.Module, micro: Any) -> ab.Total:
        losses = F.cross_entropy(model(micro[0]), micro[1], reduction="none")
        count = min(16, len(losses))
        return ab.Total(losses.topk(count).values.sum(), count)

    body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(body.requires_grad_(False), nn.Linear(16, 3))
    step = ab.Step(model, hard, torch.optim.SGD(model[1].parameters(), lr=0.1), micro_batch=16)
    with pytest.raises(LossError, match="Expected the same loss from 64 rows as 64 and as 16"):
        step((torch.randn(64, 3, 64, 64), torch.randint(3, (64,))))


def test_a_penalty_of_gradients_is_compared_with_its_graph() -> None:
    def critic(model: nn.Module, micro: Any) -> ab.Total:
        x = micro.detach().requires_grad_()
        scores = model(x)
        (slopes,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return ab.Total((scores[:, 0] + (slopes.flatten(1).norm(dim=1) - 1).square()).sum(), len(x))

    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    step = ab.Step(model, critic, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=8)
    report = step(torch.randn(32, 3, 64, 64))  # a micro-batch takes more than small models may
    assert report.checked
    assert report.compared == 1


def test_a_loss_may_do_more_where_gradients_are_enabled() -> None:
    def penalised(model: nn.Module, micro: Any) -> Tensor:
        outputs = model(micro[0])
        loss = F.cross_entropy(outputs, micro[1])
        return loss + outputs.square().mean() if torch.is_grad_enabled() else loss

    model = Perceptron(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ab.Step(model, ab.ModelLoss(call=penalised), optimizer, micro_batch=7)
    batch = torch.randn(40, 4), torch.randint(3, (40,))
    want = penalised(model, batch).item()
    report = step(batch)
    assert report.checked
    assert report.loss == pytest.approx(want)


def test_a_models_own_loss_builds_no_graph_of_all_rows(capsys: Any) -> None:
    def mean(model: nn.Module, micro: Any) -> Tensor:
        outputs = model(micro[0])
        print(len(outputs), outputs.requires_grad)  # a list would be put back
        return F.cross_entropy(outputs, micro[1])

    model = Perceptron(4, 3)
    step = ab.Step(
        model, ab.ModelLoss(call=mean), torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=20
    )
    assert step((torch.randn(60, 4), torch.randint(3, (60,)))).compared == 1
    seen = capsys.readouterr().out.splitlines()
    assert "60 False" in seen
    assert "60 True" not in seen


def test_draws_of_python_are_told() -> None:
    def negatives(model: nn.Module, micro: Any) -> ab.Total:
        out = model(micro[0])[:, 0]
        other = random.sample(range(len(out)), len(out))
        return ab.Total(F.relu(1 - out + out[other]).sum(), len(out))

    model = Perceptron(4, 3)
    step = ab.Step(model, negatives, torch.optim.SGD(model.parameters(), lr=1e-3), micro_batch=20)
    assert "Python or NumPy" in step((torch.randn(60, 4), torch.zeros(60))).unchecked


def test_an_error_of_all_rows_at_once_is_told() -> None:
    def at_most_30(model: nn.Module, micro: Any) -> ab.Total:
        if len(micro[0]) > 30:
            raise ValueError("too many")
        return ab.Total(model(micro[0]).square().sum(), len(micro[0]))

    model = Perceptron(4, 3)
    step = ab.Step(model, at_most_30, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=20)
    report = step((torch.randn(60, 4), torch.zeros(60)))
    assert not report.checked
    assert "too many" in report.unchecked


def images(rows: int) -> Any:
    return torch.randn(rows, 3, 24, 24), torch.arange(rows) % 4


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs @ outputs.T).logsumexp(1).mean() - outputs.square().sum(1).mean()


def of_text() -> tuple[nn.Module, Any, Any]:
    def forward(self: Any, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(self.words(tokens)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    body = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.1)
    model = Made(forward, words=nn.Embedding(50, 32), body=body, head=nn.Linear(32, 50))
    rows = lambda count: {name: torch.randint(50, (count, 64)) for name in ("tokens", "labels")}  # noqa: E731
    return model, ab.ModelLoss(), rows


def of_images(loss: Any, draw: Any = None) -> tuple[nn.Module, Any, Any]:
    wide = nn.Conv2d(3, 32, 3, padding=1), nn.Tanh(), nn.Conv2d(32, 32, 3, padding=1), nn.Tanh()
    net = nn.Sequential(*wide, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    return Made(lambda self, x: self.net(draw(x)), net=net) if draw else net, loss, images


@pytest.mark.parametrize(
    "make",
    [
        partial(of_images, nn.CrossEntropyLoss(), lambda x: x + 0.1 * torch.randn_like(x)),
        partial(of_images, ab.WholeBatch(contrast)),
        of_text,
    ],
    ids=["noise", "a loss over all rows", "a model's own loss"],
)
@pytest.mark.parametrize("door", ["step", "window"])
def test_a_comparison_takes_what_a_micro_batch_takes(make: Any, door: str) -> None:
    model, loss, rows = make()
    if door == "window" and isinstance(loss, ab.WholeBatch):
        pytest.skip("a window never has all rows")

    def update(step: ab.Step, batch: Any) -> Any:
        if door == "step":
            return step(batch)
        whole = TensorBatch(batch)
        with step.window() as window:
            for micro in whole.cut(8):
                window.add(micro)
        return window.report

    def peak(micro_batches: int, *, check: bool = True) -> int:
        optimizer, options = torch.optim.SGD(model.parameters(), lr=0.01), ab.Options(check=check)
        step = ab.Step(model, loss, optimizer, micro_batch=8, options=options)
        batch, most = rows(8 * micro_batches), 0
        for _ in range(2):
            following = Following({torch.device("cpu")})
            try:
                assert update(step, batch).checked is check
            finally:
                most = max(most, *accumulate(following()))
        return most

    few, many, plain = peak(4), peak(24), peak(24, check=False)
    assert many <= few + (2**17 if door == "step" else 2**21)  # a window keeps some rows
    assert many <= plain + 2**21
