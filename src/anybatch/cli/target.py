"""The target of `anybatch check` and `anybatch plan`: a function of your own, or a recipe."""

import importlib
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core import Collate, PlanError, tree
from anybatch.data import load
from anybatch.recipes import find_recipe, recipe_names

FIRST_ROWS = 64  # of a recipe's data; the check chooses from them

HINT = (
    "Name a function as in package.module:function that returns (model, loss, batch), after which a collate "
    "and an optimizer may follow, or a recipe"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """Model, loss and batch, as for `anybatch.check`, and perhaps a collate and an optimizer."""

    model: nn.Module
    loss: Any
    batch: Any
    collate: Collate | None = None
    optimizer: Optimizer | None = None  # what `anybatch plan` plans for; None for one of its own choice

    def to(self, device: torch.device) -> "Target":
        """The same on a device; samples stay where they are, to be moved by their `collate`."""
        loss = self.loss.to(device) if isinstance(self.loss, nn.Module) else self.loss
        batch = self.batch
        if self.collate is None:
            batch = tree.map_leaves(lambda leaf: leaf.to(device), batch)
        return replace(self, model=self.model.to(device), loss=loss, batch=batch)


def find(name: str, data_name: str) -> Target:
    """Read a target."""
    if ":" not in name:
        return _from_recipe(name, data_name)
    with _importable_from_here():
        returned = _function(name)()
    given: list[Any] = list(cast("list[Any]", returned)) if isinstance(returned, tuple | list) else []
    parts = [part for part in given if not isinstance(part, Optimizer)]
    optimizers = [part for part in given if isinstance(part, Optimizer)]
    if len(optimizers) > 1 or len(parts) not in (3, 4) or not isinstance(parts[0], nn.Module):
        kinds = [type(part).__name__ for part in given] or type(returned).__name__
        raise PlanError(
            f"Expected {name} to return (model, loss, batch) and perhaps a collate, got {kinds}. {HINT}."
        )
    model, loss, batch = parts[:3]
    collate = parts[3] if len(parts) == 4 else None
    optimizer = optimizers[0] if optimizers else None
    return Target(model=model, loss=loss, batch=batch, collate=collate, optimizer=optimizer)


def _from_recipe(name: str, data_name: str) -> Target:
    if name not in recipe_names():
        raise PlanError(f"Expected a target, got {name!r}. {HINT}: {', '.join(recipe_names())}.")
    recipe = find_recipe(name)
    train = load(data_name).train
    return Target(
        model=recipe.build_model(train, torch.Generator().manual_seed(0)),
        loss=recipe.build_loss(0.0),
        batch=(train.inputs[:FIRST_ROWS], train.targets[:FIRST_ROWS]),
    )


def _function(name: str) -> Callable[[], Any]:
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise PlanError(
            f"Expected a module that can be imported, got {module_name!r} ({error}). {HINT}."
        ) from None
    except (ValueError, TypeError) as error:  # an empty or a relative name
        raise PlanError(f"Expected the name of a module, got {module_name!r} ({error}). {HINT}.") from None
    function = getattr(module, function_name, None)
    if function is None:
        raise PlanError(
            f"Expected a function, got {function_name!r}, which {module_name} does not have. {HINT}."
        )
    if not callable(function):
        raise PlanError(
            f"Expected a function, got {name}, which is of type {type(function).__name__}. {HINT}."
        )
    return function


@contextmanager
def _importable_from_here() -> Generator[None]:
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before
