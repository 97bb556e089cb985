"""The token of a parameter server is private before Ray starts, and the environment is left as it was."""

import os
import stat
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from anybatch.parallel.on_ray import RayCluster


@pytest.mark.parametrize("found", [None, "", "secret"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_token_is_private_and_the_environment_as_before(
    found: str | None, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "made" / "auth_token"
    if found is not None:
        path.parent.mkdir()
        path.write_text(found)
        path.chmod(0o644)
    modes: list[tuple[int, bool]] = []

    def init(**_: Any) -> None:
        modes.append((stat.S_IMODE(path.stat().st_mode), bool(path.read_text())))
        if fails:
            raise ConnectionError("no")

    ray: Any = ModuleType("ray")
    ray.is_initialized, ray.init, ray.shutdown = (lambda: False), init, lambda: None
    ray.exceptions = SimpleNamespace(AuthenticationError=KeyError)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    before = dict(os.environ)
    if fails:
        with pytest.raises(Exception, match="Ray cluster"):
            RayCluster()
    else:
        RayCluster().close()
    assert modes == [(0o600, True)]
    assert path.read_text() == found or len(path.read_text()) == 64
    assert dict(os.environ) == before
