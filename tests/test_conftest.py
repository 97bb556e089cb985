"""What surrounds every test can fail: each thing that a test may leave behind is left behind once."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import STATE

pytest_plugins = ["pytester"]

LEAKS = {
    "environment": "os.environ['ANYBATCH'] = '1'",
    "threads": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "child processes": "fork.Process(target=time.sleep, args=(60,), daemon=True).start()",
    "process group": "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
    "default dtype": "torch.set_default_dtype(torch.float64)",
    "default device": "torch.set_default_device('meta')",
    "grad mode": "torch.set_grad_enabled(False)",
    "anomaly mode": "torch.autograd.set_detect_anomaly(True)",
    "deterministic algorithms": "torch.use_deterministic_algorithms(True)",
    "number of threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "root logger": "logging.root.setLevel(logging.DEBUG)",
}

MODULE = """
import logging, multiprocessing, os, random, threading, time
import numpy as np, pytest, torch, torch.distributed as dist
fork = multiprocessing.get_context("fork")

@pytest.fixture(scope="module", autouse=True)
def outside():
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())

def test_clean():
    assert random.random() == random.Random(0).random()
    assert np.random.rand() == np.random.RandomState(0).rand()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
"""


@pytest.mark.slow
def test_each_leak_is_found_and_nothing_else(pytester: pytest.Pytester) -> None:
    assert STATE.keys() == LEAKS.keys()
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    tests = [f"def test_{name.replace(' ', '_')}():\n    {leak}\n" for name, leak in LEAKS.items()]
    pytester.makepyfile(MODULE + "".join(tests))
    result = pytester.runpytest_subprocess("--tb=line")
    result.assert_outcomes(passed=1 + len(LEAKS), errors=len(LEAKS))
    found = [line.split(":")[2].strip() for line in result.outlines if re.match("E .*left behind: ", line)]
    assert found == list(LEAKS)


def test_a_file_that_does_not_import_fails_the_run(tmp_path: Path) -> None:
    broken, root = tmp_path / "test_broken.py", Path(__file__).parents[1]
    broken.write_text("from os import no_such_name\n\ndef test_nothing():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(root / "pyproject.toml")]
    done = subprocess.run([*command, str(broken)], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert "cannot import name 'no_such_name'" in done.stdout
