"""What a recipe is: a model, a loss and the options it is known to work with."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from anybatch.data import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a recipe trains unless the caller says otherwise: SGD with momentum.

    Args:
        epochs: passes over the training rows.
        batch_size: rows of one update.
        lr: learning rate.
        momentum: what SGD keeps of the last update.
    """

    epochs: int
    batch_size: int
    lr: float
    momentum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model, its loss and its options, under the name that `anybatch train NAME` knows.

    Args:
        name: the name on the command line.
        build_model: makes the model for rows like those of a data set, from its random numbers.
        build_loss: makes the loss, called as `loss(model(inputs), targets)`.
        options: what it trains with unless told otherwise.
        data: options that suit a data set better, by the source that `anybatch.data.load` takes.
        source: where the recipe comes from.
    """

    name: str
    build_model: Callable[[Dataset, torch.Generator], nn.Module]
    build_loss: Callable[[], nn.Module]
    options: Options
    data: dict[str, Options] = field(default_factory=dict[str, Options])
    source: str
