"""Losses as public programs write them, in a wrapper: exact in every cut, or refused."""

import math
import re
from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Additive, BatchLoss, ModelLoss, PerRow, Step, Trainer, check, plan
from anybatch.check import named_parameters
from anybatch.core import tree
from anybatch.core.errors import LossError
from anybatch.losses import module_of
from anybatch.testing import GradientRecorder, reference_step, relative_error
from tests.snapshots import same_as_before
from tests.toys import Perceptron

ROWS, TIME, CLASSES = 11, 6, 4
LIMIT = 1e-12  # relative, float64


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, x: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x).chunk(2, 1)
        return self.decode(mu + eps * (0.5 * logvar).exp()).sigmoid(), mu, logvar


class Speech(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log_softmax(-1).transpose(0, 1)  # (time, rows, classes)


def vae(model: nn.Module, micro: Any) -> Tensor:
    """PyTorch's example, for a batch of known size: summed over the batch."""
    recon, mu, logvar = model(*micro)
    bce = F.binary_cross_entropy(recon, micro[0], reduction="sum")
    return (bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())) / ROWS


def beta_vae(model: nn.Module, micro: Any) -> Any:
    """As in PyTorch-VAE."""
    recon, mu, log_var = model(*micro)
    kld = torch.mean(-0.5 * torch.sum(1 + log_var - mu**2 - log_var.exp(), dim=1), dim=0)
    return {"loss": F.mse_loss(recon, micro[0]) + 0.005 * kld, "KLD": -kld.detach()}


def focal(model: nn.Module, micro: Any) -> Tensor:
    """As in torchvision, with reduction="mean"."""
    inputs, targets = model(micro["image"]), micro["mask"]
    p = inputs.sigmoid()
    ce = F.binary_cross_entropy_with_logits(inputs, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    return ((0.25 * targets + 0.75 * (1 - targets)) * ce * (1 - p_t) ** 2).mean()


def dice(logits: Tensor, target: Tensor) -> Tensor:
    p, target = logits.sigmoid().flatten(1), target.flatten(1)
    return 1 - (2 * (p * target).sum(1) + 1) / (p.sum(1) + target.sum(1) + 1)


def smoothed(model: nn.Module, micro: Any, tokens: int, eps: float = 0.1) -> Tensor:
    """As in fairseq: summed over valid tokens, and divided by their number in the batch."""
    lprobs, target = model(micro[0]).log_softmax(-1), micro[1][..., None]
    pad = target.eq(-100)
    nll = -lprobs.gather(-1, target.clamp(min=0)).masked_fill(pad, 0.0).sum()
    smooth = -lprobs.sum(-1, keepdim=True).masked_fill(pad, 0.0).sum()
    return ((1 - eps) * nll + eps / CLASSES * smooth) / tokens


def pairwise(scores: Tensor, relevance: Tensor) -> Tensor:
    """RankNet, over the pairs of candidates of a row."""
    margins = scores - scores.transpose(1, 2)
    better = relevance[:, :, None] > relevance[:, None, :]
    return -(F.logsigmoid(margins) * better).sum((1, 2)) / better.sum((1, 2)).clamp(min=1)


def masked_regression(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    known = ~target.isnan()
    return (output - target.nan_to_num()).square(), known


def quantile(model: nn.Module, micro: Any) -> Tensor:
    """As in darts: the mean over rows of the sum over quantiles."""
    errors = micro[1][:, None] - model(micro[0])
    q = torch.tensor([0.1, 0.4, 0.6, 0.9])
    return torch.max((q - 1) * errors, q * errors).sum(-1).mean()


def triplet(model: nn.Module, micro: Any) -> Tensor:
    return F.triplet_margin_loss(*map(model, micro), margin=0.5)


def distilled(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The KL divergence of each token at temperature 2."""
    losses = F.kl_div((student / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="none")
    return 4 * losses.sum(-1), mask


class Uncertain(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.tensor(0.3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square() * (-self.log_variance).exp() + self.log_variance


def cases() -> Iterator[tuple[str, tuple[Any, nn.Module, Any]]]:
    x, places = torch.rand(ROWS, 8), torch.randn(ROWS, TIME, 3)
    labels = torch.randint(CLASSES, (ROWS, TIME))
    labels[torch.rand(ROWS, TIME) < 0.4] = -100
    labels[0] = -100
    tokens = int((labels != -100).sum())
    noise, maps = (x, torch.randn(ROWS, 3)), (torch.rand(ROWS, TIME, CLASSES) < 0.3).double()
    known = torch.randn(ROWS, TIME, CLASSES).where(maps > 0, math.nan)
    lengths = torch.randint(2, 4, (ROWS,))
    spoken = torch.randint(1, CLASSES, (ROWS, 3)), torch.full((ROWS,), TIME), lengths
    teacher = torch.randn(ROWS, TIME, CLASSES), labels != -100
    yield "vae", (Additive(vae), VAE(), noise)
    yield "beta-vae", (ModelLoss(call=beta_vae), VAE(), noise)
    yield "focal", (ModelLoss(call=focal), Perceptron(3, CLASSES), {"image": places, "mask": maps})
    yield "dice", (PerRow(dice), Perceptron(3, CLASSES), (places, maps))
    yield "smoothed", (Additive(partial(smoothed, tokens=tokens)), Perceptron(3, CLASSES), (places, labels))
    yield "pairwise", (PerRow(pairwise), Perceptron(3, 1), (places, torch.randint(3, (ROWS, TIME))))
    yield "masked", (PerRow(masked_regression), Perceptron(3, CLASSES), (places, known))
    yield "quantile", (ModelLoss(call=quantile), Perceptron(3, CLASSES), (places[:, 0], x[:, 0]))
    yield "ctc", (PerRow(nn.CTCLoss(reduction="none")), Speech(3, CLASSES), {"x": places, "targets": spoken})
    yield (
        "triplet",
        (ModelLoss(call=triplet), Perceptron(3, CLASSES), (places[:, 0], places[:, 1], places[:, 2])),
    )
    yield "distilled", (PerRow(distilled), Perceptron(3, CLASSES), (places, teacher))
    yield "uncertain", (PerRow(Uncertain()), Perceptron(3, CLASSES), (places, maps))


NAMES = "vae beta-vae focal dice smoothed pairwise masked quantile ctc triplet distilled uncertain"


def plain(loss: Any, model: nn.Module, batch: Any) -> Tensor:
    """The loss of the whole batch, as a program without anybatch computes it."""
    if isinstance(loss, PerRow):
        inputs, targets = batch.values() if isinstance(batch, dict) else batch
        targets = targets if isinstance(targets, tuple) else (targets,)
        values = loss.function(model(inputs), *targets)
        return (values[0] * values[1]).sum() / values[1].sum() if isinstance(values, tuple) else values.mean()
    value = loss.call(model, batch) if isinstance(loss, ModelLoss) else loss.function(model, batch)
    return value["loss"] if isinstance(value, dict) else value


@pytest.mark.parametrize("name", NAMES.split())
def test_any_cut_and_window_is_the_plain_loop_and_uncut_it_is_so_to_the_bit(name: str) -> None:
    loss, model, batch = dict(cases())[name]
    recorder = GradientRecorder(model, loss)
    named = named_parameters(model, loss)
    value = plain(loss, model, batch)
    expected = dict(zip(named, torch.autograd.grad(value, [*named.values()]), strict=True))
    for micro_batch in (1, 3, 7):
        report = Step(model, loss, recorder, micro_batch=micro_batch)(batch)
        assert report.checked
        assert report.micro_batches == -(-ROWS // micro_batch)
        assert relative_error(recorder.gradients, expected) <= LIMIT
        assert relative_error(report.loss, value.item()) <= LIMIT
    step = Step(model, loss, recorder)
    step(batch)
    assert recorder.gradients.keys() == expected.keys()
    assert all(torch.equal(recorder.gradients[key], expected[key]) for key in expected)
    window = step.window()
    for rows in (slice(0, 1), slice(1, 8), slice(8, ROWS)):
        window.add(tree.map_leaves(itemgetter(rows), batch))
    assert relative_error(window.close().loss, value.item()) <= LIMIT
    assert relative_error(recorder.gradients, expected) <= LIMIT
    BatchLoss(model, loss, micro_batch=3)(batch).backward()
    assert relative_error({key: one.grad for key, one in named.items()}, expected) <= LIMIT


@pytest.mark.parametrize("name", ["vae", "beta-vae", "masked", "uncertain"])
def test_check_plan_reference_and_validation_take_them(name: str) -> None:
    loss, model, batch = dict(cases())[name]
    optimizer = torch.optim.SGD([*model.parameters(), *module_of(loss).parameters()], lr=0.0)
    assert check(model, loss, batch).exact
    assert plan(model, loss, optimizer, batch, micro_batch=4).plan.micro_batches == 3
    value = plain(loss, model, batch).item()
    assert relative_error(reference_step(model, loss, batch).loss, value) <= LIMIT
    step = Step(model, loss, optimizer, micro_batch=3)
    trainer = Trainer(step, batch, batch_size=ROWS, progress=False)
    assert relative_error(trainer.evaluate(batch)["loss"], value) <= LIMIT


X = torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
BATCH = X, X.argmax(1)
REFUSED: dict[str, tuple[Any, str]] = {
    "a mean": (PerRow(nn.CrossEntropyLoss()), "CrossEntropyLoss to return a value for each row, .* got ()"),
    "no rows": (PerRow(lambda out, y: out.square().mean(0)), "a value for each row, .* got (4,)"),
    "places": (PerRow(lambda out, y: out.reshape(-1)), "a value for each row, .* got"),
    "rows that meet": (
        PerRow(lambda out, y: (out - out.mean(0)).square()),
        "gradient from <lambda> for every",
    ),
    "another mask": (PerRow(lambda out, y: (out, y > 0)), "of one shape, got .*expand_as"),
    "a weight with gradient": (PerRow(lambda out, y: (out, out.exp())), "a weight without gradient"),
    "no gradient": (PerRow(lambda out, y: out.detach()), "depends on the parameters"),
    "a statistic": (
        ModelLoss(call=lambda model, micro: model(micro[0]).mean(0).square().mean()),
        "rows have met before it",
    ),
    "an own division": (
        ModelLoss(call=lambda model, micro: model(micro[0]).square().sum() / len(micro[0])),
        "a sum that is divided afterwards.*ab.PerRow",
    ),
    "no scalar": (
        ModelLoss(call=lambda model, micro: model(micro[0])),
        "in a Tensor.*ab.ModelLoss(call=...) returns a mean",
    ),
    "a mean that adds up": (
        Additive(lambda model, micro: F.cross_entropy(model(micro[0]), micro[1])),
        "gradient from <lambda> for every split, .*ab.Additive got a mean",
    ),
    "values": (Additive(lambda model, micro: model(micro[0])), "scalar tensor, .* got shape (3, 4)"),
    "values, unwrapped": (nn.CrossEntropyLoss(reduction="none"), "got 'none'.*in ab.PerRow"),
    "a plain mean": (
        lambda model, micro: model(micro[0]).mean(),
        "shape (). Wrap it: ab.PerRow.*ab.ModelLoss(call=fn).*ab.Additive(fn)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_uses_are_refused_and_nothing_is_left(name: str) -> None:
    loss, message = REFUSED[name]
    model = nn.Linear(3, CLASSES)
    pattern = ".*".join(map(re.escape, message.split(".*")))
    if isinstance(loss, nn.Module):
        with pytest.raises(LossError, match=pattern):
            Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
        return
    step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=3)
    with same_as_before(step), pytest.raises(LossError, match=pattern):
        step(BATCH)


def test_a_function_of_outputs_and_targets_is_told_of_per_row_and_check_false_is_the_users_word() -> None:
    model = nn.Linear(3, CLASSES)
    with pytest.raises(TypeError) as caught:
        Step(model, lambda out, y: F.cross_entropy(out, y), GradientRecorder(model), micro_batch=3)(BATCH)
    assert "pass ab.PerRow(loss)" in caught.value.__notes__[0]
    mean = Additive(lambda model, micro: F.cross_entropy(model(micro[0]), micro[1]))
    report = Step(model, mean, GradientRecorder(model), micro_batch=3, check=False)(BATCH)
    means = [
        F.cross_entropy(model(BATCH[0][rows]), BATCH[1][rows]).item() for rows in torch.arange(ROWS).split(3)
    ]
    assert relative_error(report.loss, math.fsum(means)) <= LIMIT
