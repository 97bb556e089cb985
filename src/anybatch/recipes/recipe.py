"""What a recipe is: model, loss and rows under the name that the command line knows."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from anybatch.batchnorm import BatchNormChoice
from anybatch.core import Collate, DataError, PlanError, tree
from anybatch.data import hold_out_rows
from anybatch.state import rng

OptimizerName = Literal["sgd", "adamw"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Training:
    """A model, its loss and its rows: what a training needs besides an optimizer.

    Attributes:
        model: the model, with its initial weights.
        loss: as for a step.
        train: training rows: tensors with rows first, nested in any way, or samples if there is a collate.
        test: rows held out, in the same form. None for none.
        name: what the rows are, for reports.
        vocabulary: a digest of what numbers in the rows stand for, which a trained model depends on; "" where
            it is the rows' own business.
        scores: takes the model's outputs, returns scores of shape (rows, classes, ...), of which the largest
            is the answer. None if there is no accuracy.
        order: of the rows within a step.
        batch_norm: what a step does with BatchNorm.
        collate: builds tensors from samples. None if rows are tensors.
        optimizer: one that comes with the model. None for the one that is chosen.
    """

    model: nn.Module
    loss: Any
    train: Any
    test: Any = None
    name: str = "training rows"
    vocabulary: str = ""
    scores: Callable[[Any], torch.Tensor] | None = None
    order: Literal["length"] | None = None
    batch_norm: BatchNormChoice | None = None
    collate: Collate | None = None
    optimizer: Optimizer | None = None

    def first(self, rows: int) -> Any:
        """The first training rows, as a batch for a step."""
        return self._take(torch.arange(min(rows, self._rows())))

    def hold_out(self, fraction: float, seed: int) -> tuple[Any, Any]:
        """Split validation rows off the training rows; both keep the order they had.

        Raises:
            DataError: there are too few, or they can only be iterated.
        """
        if isinstance(self.train, DataLoader) or not hasattr(self.train, "__len__"):
            raise DataError(
                f"Expected rows that can be counted to hold some out, got {type(self.train).__name__}. "
                "Return validation rows from the function instead."
            )
        stay, held_out = hold_out_rows(self._rows(), fraction, seed, name=self.name)
        return self._take(stay), self._take(held_out)

    def _rows(self) -> int:
        return len(self.train if self.collate is not None else tree.flatten(self.train).leaves[0])

    def _take(self, chosen: torch.Tensor) -> Any:
        if self.collate is not None:
            return [self.train[row] for row in chosen.tolist()]
        return tree.map_leaves(lambda leaf: leaf[chosen.to(leaf.device)], self.train)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A way to make a training, with the settings that suit it.

    Attributes:
        name: the name on the command line.
        make: takes the name or path of a data set, and the recipe's own options as keywords with defaults.
        data: the data set where none is named. It needs no download.
        optimizer, lr: the optimizer and its learning rate where none are named.
    """

    name: str
    make: Callable[..., Training]
    data: str = "digits"
    optimizer: OptimizerName = "sgd"
    lr: float = 0.01

    @property
    def options(self) -> Mapping[str, Any]:
        """The recipe's own options and their defaults.

        Example:
            >>> from anybatch.recipes import find_recipe
            >>> dict(find_recipe("lenet5").options)
            {'label_smoothing': 0.0}
        """
        parameters = [*inspect.signature(self.make).parameters.values()][1:]
        return {parameter.name: parameter.default for parameter in parameters}

    def prepare(self, data: str | None = None, *, seed: int = 0, **asked: Any) -> Training:
        """Read the rows and build model and loss. Random streams are left as they were.

        Args:
            data: name or path of a data set. None for the recipe's own.
            seed: determines the initial weights, and masks where there are any.
            asked: options that are not to have their defaults.

        Raises:
            PlanError: the recipe has no such option, or not this value of it.
            DataError: the data set cannot be read, or does not suit the recipe.

        Example:
            >>> from anybatch.recipes import find_recipe
            >>> training = find_recipe("lenet5").prepare("digits", label_smoothing=0.1)
            >>> training.loss, len(training.train[0])
            (CrossEntropyLoss(), 1352)
        """
        if unknown := sorted(asked.keys() - self.options.keys()):
            raise PlanError(
                f"Expected options of {self.name} ({', '.join(map(_dashed, self.options)) or 'none'}), got "
                f"{', '.join(map(_dashed, unknown))}. Leave it out, or choose another recipe."
            )
        with rng.preserved():
            torch.manual_seed(seed)
            return self.make(self.data if data is None else data, **asked)


def one_of(name: str, value: str, choices: Mapping[str, Any]) -> Any:
    """What an option's value stands for; a PlanError where it stands for nothing."""
    if value not in choices:
        raise PlanError(f"Expected {_dashed(name)} to be one of {list(choices)}, got {value!r}. Choose one.")
    return choices[value]


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"
