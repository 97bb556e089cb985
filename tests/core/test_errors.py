"""Errors: each is documented, and is caught as what its documentation says."""

from pathlib import Path

import anybatch
from anybatch.core import errors
from anybatch.core.errors import AnybatchError

TREE = {name: one for name, one in vars(errors).items() if isinstance(one, type)}


def test_every_error_is_public_and_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/errors.md").read_text(encoding="utf-8")
    assert [name for name in TREE if f"`{name}`" not in page and f"ab.{name}" not in page] == []
    assert anybatch.errors is errors


def test_bad_values_are_value_errors_and_a_wrong_order_is_not() -> None:
    wrong_order = {name for name, one in TREE.items() if not issubclass(one, ValueError)}
    assert wrong_order == {"AnybatchError", "OutOfMemoryError", "RankError", "WindowError", "ReadOnlyError"}
    assert anybatch.BudgetError is errors.BudgetError
    assert anybatch.AnybatchError is AnybatchError
    assert issubclass(errors.WindowError, RuntimeError)
    assert issubclass(errors.OutOfMemoryError, MemoryError)
    assert issubclass(errors.ReadOnlyError, AttributeError)
    assert all(issubclass(one, AnybatchError) for one in TREE.values())
