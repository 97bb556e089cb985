"""Every loss of torch once: the function, what a model gives it, and its targets."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.testing import Perceptron

ROWS, CLASSES = 7, 3
_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=_GENERATOR)
OTHER = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=_GENERATOR)
CLASS = torch.tensor([0, 2, -100, 1, 1, -100, 2])
WEIGHTS = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
_SEQUENCES = torch.ones(ROWS, 2).long(), torch.full((ROWS,), 6), torch.tensor([1, 2, 1, 2, 2, 0, 1])
_HINGES = torch.tensor([[0, 2, -1], [1, -1, -1], [-1, 0, 1], [2, 1, 0], [2, -1, 0], [0, 1, -1], [1, 0, 2]])


def _pair(x: Tensor) -> Any:
    return x, x.cos()


def _three(x: Tensor) -> Any:
    return x, x.cos(), -x.sin()


def _in_time(x: Tensor) -> Tensor:
    return (torch.arange(1, 7)[:, None, None] * x).log_softmax(-1)


#: By the name of the function: the loss, what the model makes of its scores, and the targets.
TORCH: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Any], tuple[Tensor, ...]]] = {
    "cross_entropy": (F.cross_entropy, torch.sin, (CLASS,)),
    "cross_entropy, weighted": (partial(F.cross_entropy, weight=WEIGHTS), torch.sin, (CLASS,)),
    "cross_entropy, soft": (nn.CrossEntropyLoss(label_smoothing=0.1), torch.sin, (OTHER.softmax(1),)),
    "cross_entropy, sum": (partial(F.cross_entropy, reduction="sum"), torch.sin, (CLASS,)),
    "nll_loss": (F.nll_loss, partial(torch.log_softmax, dim=1), (CLASS,)),
    "binary_cross_entropy": (nn.BCELoss(), torch.sigmoid, (OTHER.sigmoid(),)),
    "binary_cross_entropy_with_logits": (
        partial(F.binary_cross_entropy_with_logits, weight=WEIGHTS),
        torch.sin,
        (OTHER.sigmoid(),),
    ),
    "mse_loss": (nn.MSELoss(), torch.sin, (OTHER,)),
    "l1_loss": (F.l1_loss, torch.sin, (OTHER,)),
    "smooth_l1_loss": (partial(F.smooth_l1_loss, beta=0.3), torch.sin, (OTHER,)),
    "huber_loss": (F.huber_loss, torch.sin, (OTHER,)),
    "soft_margin_loss": (F.soft_margin_loss, torch.sin, (OTHER.sign(),)),
    "hinge_embedding_loss": (F.hinge_embedding_loss, torch.sin, (OTHER.sign(),)),
    "margin_ranking_loss": (F.margin_ranking_loss, _pair, (OTHER.sign(),)),
    "poisson_nll_loss": (F.poisson_nll_loss, torch.sin, (OTHER.exp(),)),
    "gaussian_nll_loss": (F.gaussian_nll_loss, lambda x: (x, x.exp()), (OTHER,)),
    "gaussian_nll_loss, shared": (F.gaussian_nll_loss, lambda x: (x, x[:, :1].exp()), (OTHER,)),
    "gaussian_nll_loss, constant": (partial(F.gaussian_nll_loss, var=2.0), torch.sin, (OTHER,)),
    "kl_div": (F.kl_div, partial(torch.log_softmax, dim=1), (OTHER.softmax(1),)),
    "kl_div, batchmean": (
        nn.KLDivLoss(reduction="batchmean"),
        partial(torch.log_softmax, dim=1),
        (OTHER.softmax(1),),
    ),
    "ctc_loss": (F.ctc_loss, _in_time, _SEQUENCES),
    "cosine_embedding_loss": (F.cosine_embedding_loss, _pair, (OTHER[:, 0].sign(),)),
    "triplet_margin_loss": (nn.TripletMarginLoss(), _three, ()),
    "triplet_margin_loss, many": (
        F.triplet_margin_loss,
        lambda x: (x[:, None], x[:, None].cos(), x[:, None].sin() * WEIGHTS[:, None]),
        (),
    ),
    "triplet_margin_with_distance_loss": (F.triplet_margin_with_distance_loss, _three, ()),
    "multi_margin_loss": (F.multi_margin_loss, torch.sin, (CLASS.clamp(min=0),)),
    "multilabel_margin_loss": (F.multilabel_margin_loss, torch.sin, (_HINGES,)),
    "multilabel_soft_margin_loss": (
        nn.MultiLabelSoftMarginLoss(weight=WEIGHTS),
        torch.sin,
        (OTHER.sigmoid().round(),),
    ),
}


class Scores(nn.Module):
    """Scores of rows, or what a loss wants in their place."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.make = Perceptron(CLASSES, CLASSES).double(), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.net(x))


class Inside(Scores):
    """The same, with the loss inside."""

    def __init__(self, loss: Callable[..., Tensor], make: Callable[[Tensor], Any]) -> None:
        super().__init__(make)
        self.loss = loss

    def forward(self, x: Tensor, *targets: Tensor) -> Tensor:
        made = super().forward(x)
        first, *others = made if isinstance(made, tuple) else (made,)
        is_gaussian = getattr(self.loss, "__name__", "").startswith("gaussian")  # its variance comes last
        return self.loss(first, *targets, *others) if is_gaussian else self.loss(first, *others, *targets)
