"""Losses as public programs write them, in a wrapper: exact in every cut, or refused."""

import math
import re
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Additive, BatchLoss, ModelLoss, PerRow, Step
from anybatch.check import named_parameters
from anybatch.core import tree
from anybatch.core.errors import LossError
from anybatch.testing import GradientRecorder, relative_error
from tests import zoo
from tests.losses.test_contract import double as double
from tests.snapshots import same_as_before

ROWS, TIME, CLASSES = 11, 6, 4
LIMIT = 1e-12  # relative, float64


def beta_vae(model: nn.Module, micro: Any) -> Any:
    recon, mu, log_var = model(*micro)
    kld = torch.mean(-0.5 * torch.sum(1 + log_var - mu**2 - log_var.exp(), dim=1), dim=0)
    return {"loss": F.mse_loss(recon, micro[0]) + 0.005 * kld, "KLD": -kld.detach()}


def dice(logits: Tensor, target: Tensor) -> Tensor:
    p, target = logits.sigmoid().flatten(1), target.flatten(1)
    return 1 - (2 * (p * target).sum(1) + 1) / (p.sum(1) + target.sum(1) + 1)


def smoothed(model: nn.Module, micro: Any, tokens: int, eps: float = 0.1) -> Tensor:
    """As in fairseq: summed over valid tokens, and divided by their number in the batch."""
    lprobs, target = model(micro[0]).log_softmax(-1), micro[1][..., None]
    nll = -lprobs.gather(-1, target.clamp(min=0)).masked_fill(target.eq(-100), 0.0).sum()
    smooth = -lprobs.sum(-1, keepdim=True).masked_fill(target.eq(-100), 0.0).sum()
    return ((1 - eps) * nll + eps / CLASSES * smooth) / tokens


def pairwise(scores: Tensor, relevance: Tensor) -> Tensor:
    """RankNet, over the pairs of candidates of a row."""
    better = relevance[:, :, None] > relevance[:, None, :]
    margins = F.logsigmoid(scores - scores.transpose(1, 2)) * better
    return -margins.sum((1, 2)) / better.sum((1, 2)).clamp(min=1)


def masked_regression(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return (output - target.nan_to_num()).square(), ~target.isnan()


def distilled(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The KL divergence of each token at temperature 2."""
    losses = F.kl_div((student / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="none")
    return 4 * losses.sum(-1), mask


def likelihood(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def dpo(model: nn.Module, micro: Any) -> Tensor:
    chosen, rejected = micro["chosen"], micro["rejected"]
    return -F.logsigmoid((likelihood(model, chosen) - likelihood(model, rejected)).sum(1)).mean()


def grpo(model: nn.Module, micro: Any) -> Tensor:
    """Advantages are in the batch; the mean is over the tokens that count."""
    ids, old, gain, mask = micro
    ratio = (likelihood(model, ids) - old).exp()
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)[mask].mean()


def r1(model: nn.Module, micro: Any) -> Tensor:
    """A penalty of the slope, differentiated by the sum of the rows."""
    x = micro[0].clone().requires_grad_()
    score = model(x)[:, 0]
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return F.softplus(-score).mean() + 5 * slope.square().sum(1).mean()


def case(name: str) -> tuple[Any, nn.Module, Any]:
    x, places, net = torch.rand(ROWS, 8), torch.randn(ROWS, TIME, 3), zoo.Perceptron(3, CLASSES)
    labels = torch.randint(CLASSES, (ROWS, TIME)).where(torch.rand(ROWS, TIME) < 0.6, -100)
    labels[0] = -100
    valid, maps = labels != -100, (torch.rand(ROWS, TIME, CLASSES) < 0.3).double()
    spoken = torch.randint(1, CLASSES, (ROWS, 3)), torch.full((ROWS,), TIME), torch.randint(2, 4, (ROWS,))
    spoken_of = zoo.Made(lambda self, x: self.net(x).log_softmax(-1).transpose(0, 1), net=net)  # time first
    texts, words = torch.randint(9, (2, ROWS, TIME)), nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    policy = (texts[0], torch.randn(ROWS, TIME - 1) / 9 - 2, torch.randn(ROWS, 1), valid[:, 1:])
    return {
        "beta-vae": (ModelLoss(call=beta_vae), zoo.vae(8), (x, torch.randn(ROWS, 3))),
        "dice": (PerRow(dice), net, (places, maps)),
        "smoothed": (Additive(partial(smoothed, tokens=int(valid.sum()))), net, (places, labels)),
        "pairwise": (PerRow(pairwise), zoo.Perceptron(3, 1), (places, torch.randint(3, (ROWS, TIME)))),
        "masked": (PerRow(masked_regression), net, (places, maps.where(maps > 0, math.nan))),
        "ctc": (PerRow(nn.CTCLoss(reduction="none")), spoken_of, (places, spoken)),
        "distilled": (PerRow(distilled), net, (places, (torch.randn(ROWS, TIME, CLASSES), valid))),
        "learned": (PerRow(nn.Bilinear(CLASSES, CLASSES, 1)), net, (places, maps)),
        "dpo": (ModelLoss(call=dpo), words, dict(zip(("chosen", "rejected"), texts, strict=True))),
        "grpo": (ModelLoss(call=grpo), words, policy),
        "r1": (ModelLoss(call=r1), net, (places[:, 0],)),
    }[name]


NAMES = "beta-vae dice smoothed pairwise masked ctc distilled learned dpo grpo r1"


def plain(loss: Any, model: nn.Module, batch: Any) -> Tensor:
    """The loss of the whole batch, as a program without anybatch computes it."""
    if isinstance(loss, PerRow):
        inputs, targets = batch
        values = loss.function(model(inputs), *([targets] if isinstance(targets, Tensor) else targets))
        return (values[0] * values[1]).sum() / values[1].sum() if isinstance(values, tuple) else values.mean()
    value = loss.call(model, batch) if isinstance(loss, ModelLoss) else loss.function(model, batch)
    return value["loss"] if isinstance(value, dict) else value


@pytest.mark.parametrize("name", NAMES.split())
def test_any_cut_and_window_is_the_plain_loop_and_uncut_it_is_so_to_the_bit(name: str) -> None:
    loss, model, batch = case(name)
    recorder, named = GradientRecorder(model, loss), named_parameters(model, loss)
    assert ("loss.weight" in named) is (name == "learned")
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


mean = lambda model, micro: F.cross_entropy(model(micro[0]), micro[1])  # noqa: E731
REFUSED: dict[str, tuple[Any, str]] = {
    "a mean": (PerRow(nn.CrossEntropyLoss()), "a value for each row .* got a tensor of shape ()"),
    "rows that meet": (PerRow(lambda out, y: (out - out.mean(0)).square()), "from <lambda> for every split"),
    "another mask": (PerRow(lambda out, y: (out, y > 0)), "of one shape .*(3,), torch.bool. mask.expand_as"),
    "a statistic": (ModelLoss(call=lambda m, b: m(b[0]).mean(0).square().mean()), "rows have met before it"),
    "own division": (ModelLoss(call=lambda m, b: m(b[0]).sum() / len(b[0])), "divided afterwards.*ab.PerRow"),
    "no scalar": (ModelLoss(call=lambda m, b: m(b[0])), "Loss(call=...), got a tensor of shape (3, 4)"),
    "a number": (ModelLoss(call=lambda m, b: 1.0), "in ab.ModelLoss(call=...), got float"),
    "a mean that adds up": (Additive(mean), "from <lambda> for every split, .*ab.Additive got a mean"),
    "a bare mean": (mean, "shape (), torch.float64. Wrap it: ab.PerRow.*ab.ModelLoss(call=fn).*ab.Additive"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_uses_are_refused_and_nothing_is_left(name: str) -> None:
    (loss, message), model = REFUSED[name], nn.Linear(3, CLASSES)
    x, optimizer = torch.randn(ROWS, 3), torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(model, loss, optimizer, micro_batch=3)
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with same_as_before(step), pytest.raises(LossError, match=pattern):
        step((x, x.argmax(1)))
