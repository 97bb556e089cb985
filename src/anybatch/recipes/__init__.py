"""Recipes: a model and a loss on one screen each, found by name."""

from anybatch.core import PlanError
from anybatch.recipes.lenet5 import LENET5
from anybatch.recipes.recipe import Recipe

__all__ = ["Recipe", "find_recipe", "recipe_names"]

_RECIPES = {recipe.name: recipe for recipe in (LENET5,)}


def find_recipe(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        PlanError: there is none of that name; the message lists those there are.

    Example:
        >>> find_recipe("lenet5").name
        'lenet5'
    """
    if name not in _RECIPES:
        raise PlanError(f"Expected the name of a recipe, got {name!r}. Known: {', '.join(recipe_names())}.")
    return _RECIPES[name]


def recipe_names() -> tuple[str, ...]:
    """The names of all recipes.

    Example:
        >>> recipe_names()
        ('lenet5',)
    """
    return tuple(_RECIPES)
