"""The target of a command: a user's function, or a recipe."""

import importlib
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from anybatch.core import PlanError
from anybatch.recipes import RECIPES, Training, find_recipe

FIRST_ROWS = 64  # rows of a recipe's data from which the check chooses

HINT = (
    "Name a function as in package.module:function that returns (model, loss, batch), after which validation "
    "rows, a collate and an optimizer may follow, or a recipe"
)


def find(name: str, data_name: str | None, asked: Mapping[str, Any] | None = None) -> Training:
    """Return a target of `anybatch check` and `anybatch plan`, whose training rows are one batch."""
    is_recipe = ":" not in name
    if is_recipe and name not in RECIPES:
        raise PlanError(f"Expected a target, got {name!r}. {HINT}: {', '.join(RECIPES)}.")
    found = find_training(name, data_name if is_recipe else None, 0, asked or {})
    return replace(found, train=found.first(FIRST_ROWS)) if is_recipe else found


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
    more = [(_kind_of(part), part) for part in parts[3:]]
    if len(parts) < 3 or not isinstance(parts[0], nn.Module) or len(dict(more)) < len(more):
        kinds = [type(part).__name__ for part in parts] or type(returned).__name__
        raise PlanError(
            f"Expected {name} to return (model, loss, batch) and perhaps validation rows and a collate, got "
            f"{kinds}. {HINT}."
        )
    return Training(model=parts[0], loss=parts[1], train=parts[2], name=name, **dict(more))


def _kind_of(part: Any) -> str:
    """Return the field of a training for a part that may follow the batch."""
    if isinstance(part, Optimizer):
        return "optimizer"
    # Rows may be a callable mapping.
    return "collate" if callable(part) and not isinstance(part, Mapping) else "test"


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
    if not callable(function):
        got = f"{name}, which is of type {type(function).__name__}"
        if function is None:
            got = f"{function_name!r}, which {module_name} does not have"
        raise PlanError(f"Expected a function, got {got}. {HINT}.")
    return function


@contextmanager
def _importable_from_here() -> Generator[None]:
    before, sys.path[:0] = list(sys.path), [os.getcwd()]
    try:
        yield
    finally:
        sys.path[:] = before
