"""What the task pages say beside their programs: exact in every cut, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.testing import relative_error

EXACT, ROWS = 1e-12, 12


class Net(nn.Module):
    """A language model, a critic and a network for images, each with its own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Sequential(nn.Embedding(20, 8), nn.Tanh(), nn.Linear(8, 20))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.image = nn.Conv2d(3, 1, 3, padding=1)
        self.sounds = nn.Linear(6, 9)

    def forward(self, image: Tensor) -> Tensor:
        return self.image(image)


def columns() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    counts = torch.tensor([5, 1, 2, 5, 1, 3, 4, 2, 5, 1, 1, 3])
    ids, chosen, rejected = torch.randint(20, (3, ROWS, 6), generator=draw)
    real = torch.randn(18 * ROWS * 8, generator=draw, dtype=torch.float64).view(18, ROWS, 8)
    return {
        "ids": ids,
        "chosen": chosen,
        "rejected": rejected,
        "mask": torch.arange(5) < counts[:, None],
        "advantage": real[0, :, 0],
        "old": real[1, :, :5] / 9 - 3,
        "x": real[2, :, :4],
        "image": real[3:9].transpose(0, 1).reshape(ROWS, 3, 4, 4),
        "frames": real[9:].transpose(0, 1).reshape(ROWS, 12, 6),
        "target": torch.randint(1, 9, (ROWS, 5), generator=draw),
        "count": counts,
    }


def token_scores(model: Any, ids: Tensor) -> Tensor:
    return model.words(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def dpo(model: Any, b: Any) -> Tensor:
    return -F.logsigmoid(
        (token_scores(model, b["chosen"]) - token_scores(model, b["rejected"])).sum(1)
    ).mean()


def reward(model: Any, b: Any) -> Tensor:
    gain = model.words(b["chosen"])[:, -1, 0] - model.words(b["rejected"])[:, -1, 0]
    return -F.logsigmoid(gain).mean() + 0.01 * gain.square().mean()


def grpo(model: Any, b: Any) -> Tensor:
    ratio, gain = (token_scores(model, b["ids"]) - b["old"]).exp(), b["advantage"][:, None]
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)[b["mask"]].mean()


def r1(model: Any, b: Any) -> Tensor:
    x = b["x"].clone().requires_grad_()
    score = model.critic(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return F.softplus(-score).mean() + 5 * slope.square().sum(1).mean()


def dice(out: Tensor, mask: Tensor) -> Tensor:
    found = out.sigmoid()
    return 1 - (2 * (found * mask).sum((1, 2, 3)) + 1) / (found.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)


def dices(model: Any, b: Any) -> Tensor:
    return dice(model(b["image"]), b["image"].abs()[:, :1]).mean()


def ctc_sum(model: Any, b: Any) -> ab.Total:
    scores = model.sounds(b["frames"]).log_softmax(-1).transpose(0, 1)
    times = torch.full_like(b["count"], 12)
    return ab.Total(F.ctc_loss(scores, b["target"], times, b["count"], reduction="sum"), b["count"].sum())


def ctc(model: Any, b: Any) -> Tensor:
    return ctc_sum(model, b).mean()


def z_loss(model: Any, b: Any) -> Tensor:
    return model.words(b["ids"]).logsumexp(-1).square().mean()


Whole = Callable[[Any, Any], Tensor]
SAID: dict[str, tuple[Whole, Any]] = {
    "DPO, chosen and rejected as two columns": (dpo, ab.ModelLoss(call=dpo)),
    "a reward model": (reward, ab.ModelLoss(call=reward)),
    "GRPO, advantages in the batch, [mask].mean()": (grpo, ab.ModelLoss(call=grpo)),
    "R1, differentiated by the sum": (r1, ab.ModelLoss(call=r1)),
    "Dice of each image": (dices, lambda m, b: ab.PerRow(dice)(m, (b["image"], b["image"].abs()[:, :1]))),
    "CTC over all targets": (ctc, ctc_sum),
    "z-loss": (z_loss, ab.ModelLoss(call=z_loss)),
}


@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("name", SAID)
def test_it_is_exact(name: str, size: int) -> None:
    torch.manual_seed(0)
    model, batch, (whole, loss) = Net().double(), columns(), SAID[name]
    names = [name for name, _ in model.named_parameters()]
    found = torch.autograd.grad(whole(model, batch), [*model.parameters()], allow_unused=True)
    expected = {name: one for name, one in zip(names, found, strict=True) if one is not None}
    ab.BatchLoss(model, loss, micro_batch=size)(batch).backward()
    ours = {name: one.grad for name, one in model.named_parameters() if name in expected}
    assert relative_error(ours, expected) <= EXACT
