"""What surrounds every test: one thread, one seed, nothing left behind."""

import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed

# What libraries set once and keep. "Dummy-" is a thread that Python did not start, such as autograd's.
VARIABLES = [
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
]
THREADS = ("Dummy-", "TMonitor", "tqdm_monitor", "QueueFeederThread")

#: What a test leaves as it found it, and how to read it.
STATE: dict[str, Callable[[], set[Any]]] = {
    "environment": lambda: {item for item in os.environ.items() if item[0] not in VARIABLES},
    "threads": lambda: {one for one in threading.enumerate() if not one.name.startswith(THREADS)},
    "child processes": lambda: {child.pid for child in multiprocessing.active_children()},
    "process group": lambda: {torch.distributed.is_available() and torch.distributed.is_initialized()},
    "default dtype": lambda: {torch.get_default_dtype()},
    "default device": lambda: {torch.get_default_device()},
    "grad mode": lambda: {torch.is_grad_enabled()},
    "anomaly mode": lambda: {torch.is_anomaly_enabled()},
    "deterministic algorithms": lambda: {torch.are_deterministic_algorithms_enabled()},
    "number of threads": lambda: {torch.get_num_threads()},
    "root logger": lambda: {logging.root.level, len(logging.root.handlers)},
}


class TorchRandom:
    """torch's generator as hypothesis wants it, so that every example starts from the same random state."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # hypothesis keeps only a weak reference


def pytest_addoption(parser: pytest.Parser) -> None:
    help_ = "device on which tests make their tensors, such as sim, the simulated one; also ACCELERATOR=NAME"
    parser.addoption("--device", metavar="NAME", default=os.environ.get("ACCELERATOR", "cpu"), help=help_)


def pytest_configure(config: pytest.Config) -> None:
    """Once: one thread (with more, a busy small machine crawls), hypothesis without clocks, and Ctrl-C."""
    torch.set_num_threads(1)
    if config.getoption("--device") != "cpu":
        from tests import device

        device.use(config.getoption("--device"))  # before tests are imported, and before the first backward
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.register_random(TORCH_RANDOM)
    options: Any = {
        "derandomize": "CI" in os.environ,
        "suppress_health_check": [hypothesis.HealthCheck.too_slow],
    }
    hypothesis.settings.register_profile("house", deadline=None, print_blob=True, **options)
    hypothesis.settings.load_profile("house")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a changed environment, a thread or a changed switch of torch."""
    before = {name: read() for name, read in STATE.items()}
    yield
    for thread in STATE["threads"]() - before["threads"]:
        thread.join(timeout=20)  # one that is about to end is not left behind
    after = {name: read() for name, read in STATE.items()}
    changed = {name: (before[name] - after[name], after[name] - before[name]) for name in STATE}
    left = [f"{name}: {old or ''} -> {new or ''}" for name, (old, new) in changed.items() if old or new]
    assert not left, "left behind: " + "; ".join(left)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Start every test from seed 0 and give the global random states back."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that were answered by traces."""
    from anybatch.planner import budget

    asked: list[Any] = []
    choose: Callable[[Any], Any] = budget.choose

    def noted(request: Any) -> Any:
        asked.append(request)
        return choose(request)

    monkeypatch.setattr(budget, "choose", noted)
    return asked


@pytest.fixture(scope="session")
def two() -> Iterator[Any]:
    """Two ranks for all tests of a process: to load torch for each file would take a minute."""
    from tests.parallel.spawned import spawned

    with spawned(2) as group:
        yield group


@pytest.fixture(scope="session")
def four() -> Iterator[Any]:
    """Four ranks, likewise."""
    from tests.parallel.spawned import spawned

    with spawned(4) as group:
        yield group


@pytest.fixture(scope="session")
def sim() -> Iterator[Callable[..., Any]]:
    """Call functions in the process of the simulated accelerator; skip where it cannot be built."""
    from tests.accelerator.simulated import BuildError, build, process

    try:
        build()
    except BuildError as error:
        pytest.skip(f"the simulated accelerator cannot be built: {error}")
    with process() as call:
        yield call


@pytest.fixture(scope="session")
def ray() -> None:
    """Skip where Ray is not there, or where this machine cannot start it: tried once, without anybatch."""
    if find_spec("ray") is None:
        pytest.skip("needs Ray: anybatch[server]")
    start = "ray.init('local', include_dashboard=False, num_cpus=1, log_to_driver=False)"
    code = f"import ray; {start}; assert ray.get(ray.remote(lambda: 7).remote()) == 7; ray.shutdown()"
    try:
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("this machine cannot start Ray within 120 s")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine cannot start Ray: {error.stderr[-500:]}")
