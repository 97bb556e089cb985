"""The self-test takes as long as it needs: what it finds does not depend on how busy the machine is."""

import sys
from typing import Any

import pytest

from anybatch import check
from anybatch.check import prepare


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: Any) -> None:
    """No limit of time; tests of a limit set it themselves."""
    monkeypatch.setattr(sys.modules[check.__module__], "CHECK_S", 1e9)
    monkeypatch.setattr(prepare, "WIDE_S", 1e9)
