"""Modules that are loaded already: `sys.modules` may hold any object, also None."""

import sys
from types import ModuleType
from typing import Any


def loaded(name: str) -> Any:
    """Return the loaded module of this name; None if `sys.modules` has no module there."""
    found: object = sys.modules.get(name)
    return found if isinstance(found, ModuleType) else None
