"""Testing: a slow and obvious reference step, the one tolerance table, toy models."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.check import Recorder, named_parameters, relative_error, tolerance
from anybatch.core import Collate, Total, tree
from anybatch.losses import Terms, call_model, resolve, split_batch, summed_loss
from anybatch.state import rng

__all__ = [
    "ConvNet",
    "GradientRecorder",
    "Perceptron",
    "Reference",
    "Transformer",
    "reference_step",
    "relative_error",
    "tolerance",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """What the whole batch at once gives, in float64."""

    loss: float  # NaN where no row has weight
    gradients: Mapping[str, Tensor]  # by name in the model; parameters of the loss stand under `loss.`


def reference_step(
    model: nn.Module, loss: object, batch: Any, *, collate: Collate | None = None
) -> Reference:
    """One forward and one backward on the whole batch, in float64, of a deep copy: slow and obvious.

    Torch's own losses are called as they are, with their own reduction: nothing here knows what they divide
    by. Totals of a function of yours are divided term by term, once. Model, loss, batch and random state stay
    as they are.

    The arguments are those of `anybatch.Step`; `model` may have any floating dtype.

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
    named = named_parameters(model, loss)
    for parameter in named.values():
        parameter.grad = None
    whole = tree.map_leaves(_widen, batch if collate is None else collate(list(batch)))
    with rng.preserved():
        value = _whole_loss(model, loss, whole)
        if value.requires_grad:
            value.backward()
    gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    return Reference(loss=value.item(), gradients=gradients)


class GradientRecorder(Recorder):
    """An optimizer that changes nothing: it keeps a copy of the gradients that it is given.

    Args:
        model: its trainable parameters are recorded by name.
        loss: likewise, under `loss.`, where the loss is or holds a module with parameters.

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
        super().__init__(named_parameters(model, loss))


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
        itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
        visible = (tokens != self.pad)[:, None, :] | itself
        hidden = hidden + self.mix(F.scaled_dot_product_attention(query, key, value, attn_mask=visible))
        hidden = hidden + self.feed(self.feed_norm(hidden))
        return F.linear(hidden, self.embedding.weight).transpose(1, 2)


def _widen(value: Tensor) -> Tensor:
    return value.detach().double() if value.is_floating_point() else value


def _in_float64(loss: object) -> Any:
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).double()
    if isinstance(loss, partial):
        settings: dict[str, Any] = dict(loss.keywords)
        settings |= {name: _widen(one) for name, one in settings.items() if isinstance(one, Tensor)}
        return partial(cast("Any", loss.func), *loss.args, **settings)
    if hasattr(loss, "function"):  # ab.Terms, ab.WholeBatch
        held = cast("Any", loss)
        return replace(held, function=_in_float64(held.function))
    return loss


def _whole_loss(model: nn.Module, loss: Any, whole: Any) -> Tensor:
    known = summed_loss(loss)
    if known is not None:  # asked only for where its arguments come from
        inputs, targets = split_batch(whole, has_target=known.kind.has_target)
        return loss(*known.kind.arrange(call_model(model, inputs), targets))
    if not callable(loss) and not isinstance(loss, Terms):  # ab.WholeBatch and ab.ModelLoss, as they are
        return torch.stack([*resolve(loss).uncut().evaluate(model, whole).sums.values()]).sum()
    function, coefficients = (loss.function, loss.coefficients) if isinstance(loss, Terms) else (loss, {})
    totals = function(model, whole)
    named = {"loss": totals} if isinstance(totals, Total) else cast("Mapping[str, Total]", totals)
    if not any(total.weight > 0 for total in named.values()):
        return torch.tensor(math.nan)
    scaled: list[Tensor] = []
    for name, total in named.items():
        mean = torch.as_tensor(total.mean() if total.weight > 0 else 0 * total.sum, dtype=torch.float64)
        scaled.append(coefficients.get(name, 1.0) * mean)
    return torch.stack(scaled).sum()
