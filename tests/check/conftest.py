"""The self-test takes as long as it needs: what it finds does not depend on how busy the machine is."""

import math
import sys
from typing import Any

import pytest

from anybatch import check
from anybatch.check import prepare


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: Any) -> None:
    """No limit of time; tests of a limit set it themselves."""
    for name in ("CUTTING_S", "CHECK_S"):
        monkeypatch.setattr(sys.modules[check.__module__], name, math.inf)
    for name in ("BUDGET_S", "WIDE_S"):
        monkeypatch.setattr(prepare, name, 1e9)
