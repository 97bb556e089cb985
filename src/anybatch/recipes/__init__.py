"""Recipes: a model and a loss on one screen each, found by name."""

from anybatch.errors import PlanError
from anybatch.recipes.lenet5 import LENET5
from anybatch.recipes.recipe import Recipe

__all__ = ["Recipe", "find", "names"]

_RECIPES = {recipe.name: recipe for recipe in (LENET5,)}


def find(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        PlanError: there is none of that name; the message lists those there are.

    Example:
        >>> find("lenet5").name
        'lenet5'
    """
    if name not in _RECIPES:
        raise PlanError(f"Expected the name of a recipe, got {name!r}. There are: {', '.join(names())}.")
    return _RECIPES[name]


def names() -> tuple[str, ...]:
    """The names of all recipes.

    Example:
        >>> names()
        ('lenet5',)
    """
    return tuple(_RECIPES)
