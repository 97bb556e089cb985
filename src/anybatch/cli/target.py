"""The target of a command: a user's function, or a recipe."""

import importlib
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core import Collate, PlanError, tree
from anybatch.recipes import RECIPES, Training, find_recipe
from anybatch.step import DEFAULT, Options

FIRST_ROWS = 64  # rows of a recipe's data from which the check chooses

HINT = (
    "Name a function as in package.module:function that returns (model, loss, batch), after which validation "
    "rows, a collate and an optimizer may follow, or a recipe"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """Model, loss and batch for `anybatch.check`, with an optional collate and optimizer."""

    model: nn.Module
    loss: Any
    batch: Any
    collate: Collate | None = None
    optimizer: Optimizer | None = None  # for `anybatch plan`; None for its default
    options: Options = DEFAULT  # of a recipe

    def to(self, device: torch.device) -> "Target":
        """Return the target on a device; samples are unchanged, as their `collate` must move them."""
        loss = self.loss.to(device) if isinstance(self.loss, nn.Module) else self.loss
        batch = self.batch
        if self.collate is None:
            batch = tree.map_leaves(lambda leaf: leaf.to(device), batch)
        return replace(self, model=self.model.to(device), loss=loss, batch=batch)


def find(name: str, data_name: str | None, asked: Mapping[str, Any] | None = None) -> Target:
    """Return a target of `anybatch check` and `anybatch plan` from the arguments of `find_training`."""
    if ":" not in name and name not in RECIPES:
        raise PlanError(f"Expected a target, got {name!r}. {HINT}: {', '.join(RECIPES)}.")
    is_own = ":" in name
    found = find_training(name, None if is_own else data_name, 0, asked or {})
    return Target(
        model=found.model,
        loss=found.loss,
        batch=found.train if is_own else found.first(FIRST_ROWS),
        collate=found.collate,
        optimizer=found.optimizer,
        options=found.options,
    )


def find_training(name: str, data_name: str | None, seed: int, asked: Mapping[str, Any]) -> Training:
    """Return the training of a recipe, or of a user's function `package.module:function` without options."""
    if ":" not in name:
        return find_recipe(name).prepare(data_name, seed=seed, **asked)
    if given := [*(["data"] if data_name is not None else []), *asked]:
        raise PlanError(
            f"Expected no options of recipes with {name}, got {', '.join(given)}. Leave them out: the "
            "function makes model and rows itself."
        )
    with _importable_from_here():
        returned = _function(name)()
    parts: list[Any] = list(cast("list[Any]", returned)) if isinstance(returned, tuple | list) else []
    optimizers = [part for part in parts if isinstance(part, Optimizer)]
    # A batch may be a callable mapping; a collate is callable and no mapping.
    collates = [part for part in parts[3:] if callable(part) and not isinstance(part, Mapping)]
    rest = [part for part in parts if not any(part is one for one in (*optimizers, *collates))]
    if (
        max(len(optimizers), len(collates)) > 1
        or len(rest) not in (3, 4)
        or not isinstance(rest[0], nn.Module)
    ):
        kinds = [type(part).__name__ for part in parts] or type(returned).__name__
        raise PlanError(
            f"Expected {name} to return (model, loss, batch) and perhaps validation rows and a collate, got "
            f"{kinds}. {HINT}."
        )
    return Training(
        model=rest[0],
        loss=rest[1],
        train=rest[2],
        test=rest[3] if len(rest) == 4 else None,
        name=name,
        collate=collates[0] if collates else None,
        optimizer=optimizers[0] if optimizers else None,
    )


def _function(name: str) -> Callable[[], Any]:
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; one of its imports does not
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
