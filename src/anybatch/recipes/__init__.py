"""Recipes: a model, a loss and rows on one screen each, found by name."""

from anybatch.core import PlanError
from anybatch.recipes.bert import BERT
from anybatch.recipes.clip import CLIP
from anybatch.recipes.gpt import GPT
from anybatch.recipes.lenet5 import LENET5
from anybatch.recipes.recipe import Recipe as Recipe, Training as Training
from anybatch.recipes.resnet import RESNET18, RESNET50

RECIPES = {recipe.name: recipe for recipe in (LENET5, RESNET18, RESNET50, BERT, GPT, CLIP)}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of this name; raise PlanError if there is none."""
    if name not in RECIPES:
        raise PlanError(f"Expected the name of a recipe, got {name!r}. Known: {', '.join(RECIPES)}.")
    return RECIPES[name]
