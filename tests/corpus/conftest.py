"""The corpus is checked without a limit of time."""

from tests.check.conftest import unhurried as unhurried
