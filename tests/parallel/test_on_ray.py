"""Parameter servers on Ray itself: processes that end, and the command, on this machine and on a cluster."""

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.parallel.on_ray import RayCluster
from tests.parallel.deadly import AGENTS, GONE_S, having, stay

TRIES = 600  # looks at what another process does, with a tenth of a second between them
TOKEN = "0123456789abcdef" * 4
PORT = "36379"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def marked(ray: None) -> Iterator[dict[str, str]]:
    """An environment for processes, none of which may stay."""
    mark = f"ANYBATCH_TEST={uuid.uuid4()}"
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    yield os.environ | dict([mark.split("=")]) | {"PYTHONPATH": path}
    left = stay(mark, GONE_S, AGENTS)
    for process in having(mark):  # the agents would stay for a minute
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert not left, f"processes stay: {left}"


@pytest.mark.slow
def test_workers_servers_and_the_driver_end_and_nothing_is_lost(marked: dict[str, str]) -> None:
    command = [sys.executable, "-m", "tests.parallel.deadly", "2", "1", "0.1"]
    done = subprocess.run(command, env=marked, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout.splitlines()[-1])["ended"]
    assert all(ended.values()), ended


@pytest.fixture
def cluster(marked: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """A cluster with a token, started as docs/cluster.md says; an environment that has the token."""
    variables = marked | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    start = ["start", "--head", "--port", PORT, "--include-dashboard=false", "--disable-usage-stats"]
    command = [sys.executable, "-m", "ray.scripts.scripts", *start]
    subprocess.run(command, env=variables | {"CLUSTER": str(tmp_path)}, check=True, capture_output=True)
    yield variables
    for process in having(f"CLUSTER={tmp_path}"):
        os.kill(process, signal.SIGKILL)


def started(options: list[str], folder: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "anybatch", "train", *options, "--quiet"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, cwd=folder, text=True, **pipes)


SERVED = shlex.split("lenet5 --servers 1 --workers 2 --epochs 1 --batch-size 512 --out run")


@pytest.mark.slow
def test_the_command_on_a_cluster_goes_on_and_the_cluster_stays(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    options = [*SERVED, "--cluster", f"127.0.0.1:{PORT}"]
    other = [*options[:-3], "other", *options[-2:]]
    refused = started(other, tmp_path, cluster | {"RAY_AUTH_TOKEN": TOKEN[::-1]})
    for going in (options, ["--resume", "run", "--epochs", "2"]):
        going = started(going, tmp_path, cluster)
        said = going.communicate()[1]
        assert going.returncode == 0, said
    for _ in range(TRIES):
        there = b" ".join(having(f"CLUSTER={tmp_path}").values())
        if b"ray::Worker" not in there and b"ray::ServerShard" not in there:
            break
        subprocess.run(["sleep", "0.1"], check=True)
    assert b"ray::Worker" not in there
    assert b"ray::ServerShard" not in there
    assert b"raylet" in there
    assert b"gcs_server" in there
    assert "set RAY_AUTH_MODE=token" in refused.communicate()[1]
    assert refused.returncode == 1
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_an_address_where_there_is_no_ray(marked: dict[str, str], tmp_path: Path) -> None:
    refused = started([*SERVED, "--cluster", "127.0.0.1:9"], tmp_path, marked)  # a port that nobody has
    said = refused.communicate()[1]
    assert "Expected a Ray cluster at 127.0.0.1:9, got none" in said
    assert "Connection refused" in said
    assert refused.returncode == 1
    assert not (tmp_path / "run").exists()


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ab.AnybatchError, match="pip install"):
        RayCluster()


class Echo:
    def back(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for value in values:
            if value.layout is torch.strided:
                value.fill_(1)  # a forward may write to its input
        return values


def sent_and_back() -> None:
    """In a process of its own, as Ray leaves variables behind."""
    sent = [torch.ones(3, 2).bfloat16(), torch.tensor(True), torch.ones(0, 3), torch.eye(2).to_sparse()]
    sent += [torch.ones(4, 2).t(), torch.tensor(1 + 0j), torch.ones(3, requires_grad=True)]
    cluster, other = RayCluster(), RayCluster()  # as for the two steps of a GAN
    try:
        other.start(Echo)
        other.close()
        found = cluster.get(cluster.call(cluster.start(Echo), "back", *sent)[0])
        with pytest.raises(ab.AnybatchError, match=r"that can be pickled, got .*lock"):
            cluster.put(threading.Lock())
    finally:
        cluster.close()
    for one, other in zip(found, sent, strict=True):
        assert (one.dtype, one.layout, one.shape) == (other.dtype, other.layout, other.shape)
        assert torch.equal(one.to_dense(), other.to_dense())


@pytest.mark.slow
def test_tensors_of_every_kind_arrive(marked: dict[str, str]) -> None:
    code = "from tests.parallel import test_on_ray; test_on_ray.sent_and_back()"
    subprocess.run([sys.executable, "-c", code], env=marked, check=True)


@pytest.mark.parametrize("found", [None, "", "secret"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_token_is_private_and_the_environment_as_before(
    found: str | None, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, modes = tmp_path / "auth_token", list[tuple[int, bool]]()
    if found is not None:
        path.write_text(found)
        path.chmod(0o644)

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
    with pytest.raises(Exception, match="Ray cluster") if fails else nullcontext():
        RayCluster().close()
    assert modes == [(0o600, True)]
    assert path.read_text() == found or len(path.read_text()) == 64
    assert dict(os.environ) == before
