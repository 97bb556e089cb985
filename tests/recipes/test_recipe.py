"""A recipe is a frozen value, found by its name."""

import dataclasses

import pytest

from anybatch.core.errors import PlanError
from anybatch.recipes import find_recipe, recipe_names


def test_recipes_are_found_by_their_names() -> None:
    assert recipe_names()
    for name in recipe_names():
        assert find_recipe(name).name == name


@pytest.mark.parametrize("name", ["lenet", "LeNet5", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        find_recipe(name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in recipe_names())


def test_recipes_cannot_be_changed() -> None:
    recipe = find_recipe("lenet5")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = "other"  # type: ignore[misc]
    assert hash(recipe) == hash(dataclasses.replace(recipe))


def test_every_recipe_says_where_it_comes_from() -> None:
    assert all(find_recipe(name).source for name in recipe_names())
