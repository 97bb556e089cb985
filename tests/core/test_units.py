"""What a person reads: units, right at every border, and errors, each documented."""

import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import anybatch
from anybatch.core import errors
from anybatch.core.errors import AnybatchError, PlanError
from anybatch.core.units import format_bytes, format_seconds, parse_bytes
from tests.check.conftest import unhurried as unhurried

SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


BYTES = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 99.96 * 2**10: "100 KiB", -2e5: "-195 KiB"}
SECONDS = {0.1234: "0.123 s", 59.4: "59.4 s", 60: "1 min 00 s", 119.6: "2 min 00 s", 3599.6: "1 h 00 min"}
READ = {"12gb": 12 * 10**9, "12GiB": 12 * 2**30, " 1.5 KiB ": 1536, ".5k": 500, "77": 77, "77B": 77, 78: 78}


def test_bytes_and_seconds() -> None:
    assert {number: format_bytes(number) for number in BYTES} == BYTES
    assert {number: format_seconds(number) for number in SECONDS} == SECONDS
    assert {text: parse_bytes(text) for text in READ} == READ


@given(st.integers(0, 2**60))
def test_bytes_read_back(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    number, unit = re.fullmatch(r"(\d{1,4}(?:\.\d)?) (\w+)", text).groups()  # type: ignore[union-attr]
    assert abs(float(number) * SIZES[unit] - num_bytes) * 20 <= num_bytes  # 1.0 is the coarsest
    assert float(number) < 1024 or unit == "PiB"


@pytest.mark.parametrize(
    "text", ["", "GB", "1.2.3GB", "12 gigs", "-1GB", "0.0", "0.0001B", "iB", "1iB", 0, -3, True, 2.0, None]
)
def test_other_bytes_are_refused(text: object) -> None:
    with pytest.raises(PlanError, match="Expected a number of bytes above 0, got "):
        parse_bytes(text)  # type: ignore[arg-type]


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
