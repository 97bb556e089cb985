"""Testing: a slow and obvious reference step, the one tolerance table, toy models."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch import rng, tree
from anybatch.batch import Collate
from anybatch.gradients import accumulation_dtype
from anybatch.losses.convention import forward, split
from anybatch.losses.summed import summed_loss
from anybatch.losses.terms import Terms
from anybatch.total import Total

# What one forward and backward may lose, in roundings. Measured on the losses and models of the laws: some 5,
# and 100 where distances nearly cancel. Long mantissas leave room for deeper networks; short ones have none
# to give, 16 roundings in bfloat16 are 6 % already.
_ROUNDINGS = {torch.float64: 2**12, torch.float32: 2**7, torch.float16: 2**4, torch.bfloat16: 2**4}


def tolerance(dtype: torch.dtype, terms: int) -> float:
    """How far a gradient or loss may lie from its reference in float64: the one table of tolerances.

    Two errors add up. Forward and backward round in the parameters' dtype: a fixed number of roundings,
    because errors of different rows average out. The sum over micro-batches rounds once per addition in the
    dtype it is accumulated in (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 4.2).
    That is the bound that always holds: equal addends all round to the same side, so the milder one that
    grows like the square root of their number does not.

    Compare with `relative_error`. Additions in the same order need no tolerance: use `torch.equal`.

    Args:
        dtype: of the parameters.
        terms: how many numbers are added up: micro-batches, or rows where one micro-batch is all.

    Returns:
        A relative error. In float64 it stays below 1e-12 up to 4,000 terms.

    Raises:
        KeyError: a dtype in which nothing is trained.

    Example:
        >>> [f"{tolerance(dtype, 100):.0e}" for dtype in (torch.float64, torch.float32, torch.bfloat16)]
        ['5e-13', '1e-05', '6e-02']
    """
    return _ROUNDINGS[dtype] * _rounding(dtype) + terms * _rounding(accumulation_dtype(dtype))


def relative_error(actual: object, expected: object) -> float:
    """The 2-norm of the difference over the 2-norm of the expected, all tensors as one long vector.

    Args:
        actual: a number, a tensor, or nested ones such as the gradients of all parameters by name.
        expected: the same nest, the reference.

    Returns:
        The error in float64; 0 where both are zero. Infinity where only the expected is zero, where an entry
        is not finite, or where the nests differ.

    Example:
        >>> relative_error({"weight": torch.tensor([3.0, 4.5])}, {"weight": torch.tensor([3.0, 4.0])})
        0.1
        >>> relative_error(math.nan, 1.0)
        inf
    """
    there, wanted = tree.flatten(_as_tensors(actual)), tree.flatten(_as_tensors(expected))
    shapes = [[leaf.shape for leaf in nest.leaves] for nest in (there, wanted)]
    if there.paths != wanted.paths or shapes[0] != shapes[1]:
        return math.inf
    pairs = [
        (a.detach().double().cpu(), e.detach().double().cpu())
        for a, e in zip(there.leaves, wanted.leaves, strict=True)
    ]
    difference = math.hypot(*[(a - e).norm().item() for a, e in pairs])
    size = math.hypot(*[e.norm().item() for _, e in pairs])
    if not math.isfinite(difference) or not math.isfinite(size):
        return math.inf
    return difference / size if size else (math.inf if difference else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """What the whole batch at once gives, in float64.

    Attributes:
        loss: the loss of the whole batch; NaN where no row has weight.
        gradients: the gradient of each parameter that got one, by its name in the model; parameters of the
            loss itself stand under `loss.`.
    """

    loss: float
    gradients: Mapping[str, Tensor]


def reference_step(
    model: nn.Module, loss: object, batch: Any, *, collate: Collate | None = None
) -> Reference:
    """One forward and one backward on the whole batch, in float64, of a deep copy: slow and obvious.

    Torch's own losses are called as they are, with their own reduction: nothing here knows what they divide
    by. Totals of a function of yours are divided term by term, once. Model, loss, batch and random state stay
    as they are.

    Args:
        model: of any floating dtype.
        loss: as for `anybatch.Step`.
        batch: as for `anybatch.Step`.
        collate: as for `anybatch.Step`: builds the whole batch from a list of samples.

    Returns:
        Loss and gradients.

    Example:
        >>> import anybatch as ab
        >>> model = nn.Linear(2, 1)
        >>> batch = torch.ones(4, 2), torch.zeros(4, 1)
        >>> recorder = GradientRecorder(model)
        >>> report = ab.Step(model, nn.MSELoss(), recorder, micro_batch=3)(batch)
        >>> expected = reference_step(model, nn.MSELoss(), batch)
        >>> relative_error(recorder.gradients, expected.gradients) <= tolerance(torch.float32, 2)
        True
    """
    model, loss = copy.deepcopy(model).double(), _in_float64(loss)
    named = dict(model.named_parameters())
    if isinstance(loss, nn.Module):
        named |= {f"loss.{name}": parameter for name, parameter in loss.named_parameters()}
    for parameter in named.values():
        parameter.grad = None
    whole = tree.map_leaves(_widen, batch if collate is None else collate(list(batch)))
    with rng.preserved():
        value = _whole_loss(model, loss, whole)
        if value.requires_grad:
            value.backward()
    gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    return Reference(loss=value.item(), gradients=gradients)


class GradientRecorder(Optimizer):
    """An optimizer that changes nothing: it keeps a copy of the gradients that it is given.

    Args:
        model: its trainable parameters are recorded by name.
        loss: likewise, under `loss.`, where the loss is a module with parameters.

    Example:
        >>> import anybatch as ab
        >>> model = nn.Linear(1, 1, bias=False)
        >>> recorder = GradientRecorder(model)
        >>> batch = torch.ones(2, 1), model.weight.detach() - torch.ones(2, 1)
        >>> _ = ab.Step(model, nn.MSELoss(reduction="sum"), recorder)(batch)
        >>> recorder.gradients
        {'weight': tensor([[4.]])}
    """

    def __init__(self, model: nn.Module, loss: object = None) -> None:
        named = dict(model.named_parameters())
        if isinstance(loss, nn.Module):
            named |= {f"loss.{name}": parameter for name, parameter in loss.named_parameters()}
        self._named = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self.gradients: dict[str, Tensor] = {}
        super().__init__(list(self._named.values()), {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore
        """Keep the gradients; parameters stay as they are."""
        self.gradients = {name: p.grad.clone() for name, p in self._named.items() if p.grad is not None}


class Perceptron(nn.Module):
    """A smooth network of two layers, along the last axis of its input.

    Smooth, because a kink (ReLU) within rounding of 0 turns a rounding error into a wrong gradient.

    Args:
        features: size of the input's last axis.
        outputs: size of the output's last axis.
        width: hidden units.

    Example:
        >>> Perceptron(3, 2)(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(self, features: int, outputs: int, *, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, ..., features) to (rows, ..., outputs)."""
        return self.layers(x)


class ConvNet(nn.Module):
    """Two convolutions that keep the image's size: one score per class and pixel, as dense targets need them.

    Example:
        >>> ConvNet(1, 3)(torch.zeros(2, 1, 4, 5)).shape
        torch.Size([2, 3, 4, 5])
    """

    def __init__(self, channels: int, classes: int, *, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1), nn.Tanh(), nn.Conv2d(width, classes, 1)
        )

    def forward(self, image: Tensor) -> Tensor:
        """(rows, channels, height, width) to (rows, classes, height, width)."""
        return self.layers(image)


class Transformer(nn.Module):
    """One block of attention and feed-forward over tokens; padding is seen by no other token.

    Input and output embeddings are one parameter (tied), as in most language models.

    Args:
        vocabulary: number of tokens.
        width: size of an embedding.
        pad: the token that fills short rows up.

    Example:
        >>> Transformer(7)(torch.tensor([[1, 2, 3], [4, 0, 0]])).shape
        torch.Size([2, 7, 3])
    """

    def __init__(self, vocabulary: int, *, width: int = 8, pad: int = 0) -> None:
        super().__init__()
        self.pad = pad
        self.embedding = nn.Embedding(vocabulary, width)
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, length) of int64 to (rows, vocabulary, length), as `cross_entropy` reads it."""
        hidden = self.embedding(tokens)
        query, key, value = self.query_key_value(self.attention_norm(hidden)).chunk(3, dim=-1)
        # Every token sees itself, so that a row of padding alone has something to look at, and no NaN.
        visible = (tokens != self.pad)[:, None, :] | torch.eye(
            tokens.shape[1], dtype=torch.bool, device=tokens.device
        )
        hidden = hidden + self.mix(F.scaled_dot_product_attention(query, key, value, attn_mask=visible))
        hidden = hidden + self.feed(self.feed_norm(hidden))
        return F.linear(hidden, self.embedding.weight).transpose(1, 2)


def _rounding(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def _as_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_tensors(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_as_tensors(item) for item in cast("Sequence[Any]", value)]
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _widen(value: Tensor) -> Tensor:
    return value.detach().double() if value.is_floating_point() else value


def _in_float64(loss: object) -> Any:
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).double()
    if isinstance(loss, partial):
        settings = {
            name: _widen(value) if isinstance(value, Tensor) else value
            for name, value in loss.keywords.items()
        }
        return partial(cast("Any", loss.func), *loss.args, **settings)
    return loss


def _whole_loss(model: nn.Module, loss: Any, whole: Any) -> Tensor:
    known = summed_loss(loss)
    if known is not None:  # asked only for where its arguments come from
        inputs, targets = split(whole, has_target=known.kind.has_target)
        return loss(*known.kind.arrange(forward(model, inputs), targets))
    function, coefficients = (loss.function, loss.coefficients) if isinstance(loss, Terms) else (loss, {})
    totals = function(model, whole)
    named: Mapping[str, Total] = {"loss": totals} if isinstance(totals, Total) else totals
    if not any(total.weight > 0 for total in named.values()):
        return torch.tensor(math.nan)
    means = {name: total.mean() if total.weight > 0 else 0 * total.sum for name, total in named.items()}
    scaled = [coefficients.get(name, 1.0) * _as_tensors(mean) for name, mean in means.items()]
    return torch.stack(scaled).sum()
