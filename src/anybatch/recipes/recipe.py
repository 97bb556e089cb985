"""What a recipe is: a model and a loss under the name that the command line knows."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from anybatch.data import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model and its loss, built for the rows of a data set.

    Attributes:
        name: the name on the command line.
        build_model: makes the model for rows like those of a data set; its initial weights come from the
            generator alone.
        build_loss: makes the loss, from the label smoothing asked for.
        source: where the recipe comes from.
    """

    name: str
    build_model: Callable[[Dataset, torch.Generator], nn.Module]
    build_loss: Callable[[float], nn.Module]
    source: str
