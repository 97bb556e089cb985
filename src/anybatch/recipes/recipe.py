"""A recipe: model, loss and rows under a name of the command line."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from anybatch.core import Batch, Collate, DataError, PlanError, SampleBatch, TensorBatch, tree
from anybatch.data import DataSplit, hold_out_rows
from anybatch.state import rng
from anybatch.step import DEFAULT, Options

OptimizerName = Literal["sgd", "adamw"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Training:
    """A model, its loss and its rows: the parts of a training except the optimizer."""

    model: nn.Module  # with its initial weights
    loss: Any  # as for a step
    train: Any  # tensors with rows first, nested in any way, or samples if there is a collate
    test: Any = None  # held-out rows, in the same form; None for none
    name: str = "training rows"  # for reports
    vocabulary: str = ""  # digest of the meaning of numbers in the rows, on which a trained model depends
    # Takes the model's outputs, returns scores of shape (rows, classes, ...); None if there is no accuracy.
    scores: Callable[[Any], torch.Tensor] | None = None
    options: Options = DEFAULT  # of the step
    collate: Collate | None = None  # builds tensors from samples; None if rows are tensors
    optimizer: Optimizer | None = None  # comes with the model; None for one from the options

    def to(self, device: torch.device, *, rows: bool = False) -> "Training":
        """Return the training on a device; with `rows` also its training rows, if they are tensors."""
        loss = self.loss.to(device) if isinstance(self.loss, nn.Module) else self.loss
        train = self.train
        if rows and self.collate is None:  # else the collate must move them
            train = tree.map_leaves(lambda leaf: leaf.to(device), train)
        return replace(self, model=self.model.to(device), loss=loss, train=train)

    def first(self, rows: int) -> Any:
        """Return the first training rows, as a batch for a step."""
        batch = self._batch()
        return batch.only(range(min(rows, batch.rows))).given

    def hold_out(self, fraction: float, seed: int) -> tuple[Any, Any]:
        """Split validation rows off the training rows, in order; raise DataError if that is not possible."""
        if isinstance(self.train, DataLoader) or not hasattr(self.train, "__len__"):
            raise DataError(
                f"Expected rows that can be counted to hold some out, got {type(self.train).__name__}. "
                "Return validation rows from the function instead."
            )
        batch = self._batch()
        stay, held_out = hold_out_rows(batch.rows, fraction, seed, name=self.name)
        return batch.only(stay.tolist()).given, batch.only(held_out.tolist()).given

    def _batch(self) -> Batch:
        return TensorBatch(self.train) if self.collate is None else SampleBatch(self.train, self.collate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A function that makes a training, with its default settings."""

    name: str  # on the command line
    make: Callable[..., Training]  # takes the name or path of a data set, and options with defaults
    data: str = "digits"  # the default data set, which needs no download
    optimizer: OptimizerName = "sgd"
    lr: float = 0.01

    @property
    def options(self) -> Mapping[str, Any]:
        """The recipe's own options and their defaults."""
        parameters = [*inspect.signature(self.make).parameters.values()][1:]
        return {parameter.name: parameter.default for parameter in parameters}

    def prepare(self, data: str | None = None, *, seed: int = 0, **asked: Any) -> Training:
        """Read the rows and build model and loss from the options asked for. The random state is unchanged.

        The seed is that of the initial weights, and of masks.
        """
        if unknown := sorted(asked.keys() - self.options.keys()):
            raise PlanError(
                f"Expected options of {self.name} ({', '.join(map(_dashed, self.options)) or 'none'}), got "
                f"{', '.join(map(_dashed, unknown))}. Leave it out, or choose another recipe."
            )
        with rng.preserved():
            torch.manual_seed(seed)
            return self.make(self.data if data is None else data, **asked)


def classifier(
    rows: DataSplit, model: nn.Module, label_smoothing: float, options: Options = DEFAULT
) -> Training:
    """Return the training of a model whose outputs are scores of the classes."""
    train, test = [(part.inputs, part.targets) for part in rows]
    return Training(
        model=model,
        loss=nn.CrossEntropyLoss(label_smoothing=label_smoothing),
        train=train,
        test=test,
        name=rows.train.name,
        scores=lambda scores: scores,
        options=options,
    )


def one_of(name: str, value: str, choices: Mapping[str, Any]) -> Any:
    """Return the choice of this name; raise PlanError if there is none."""
    if value not in choices:
        raise PlanError(f"Expected {_dashed(name)} to be one of {list(choices)}, got {value!r}. Choose one.")
    return choices[value]


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"
