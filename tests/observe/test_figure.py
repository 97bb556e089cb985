"""Pictures written to files, and that of memory over a step."""

import builtins
from typing import Any

import pytest

from anybatch.core.errors import PlanError
from anybatch.observe.figure import checked, new_figure


@pytest.mark.parametrize("name", ["memory", "memory.jpeg", "memory.html"])
def test_other_endings_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match=rf"\.svg, \.pdf, got '{name}'"):
        checked(name)
    with pytest.raises(PlanError, match=r"Expected a folder .*, got nowhere, which does not exist"):
        checked("nowhere/a.png")


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(PlanError, match=r"pip install 'anybatch\[plot\]'"):
        new_figure(1, 1)
