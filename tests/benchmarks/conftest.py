"""What the tests of the benchmarks share: torch's first dispatch mode has happened."""

import os
from collections.abc import Iterator

import pytest
import torch

from anybatch.memory.meter import Meter


@pytest.fixture(scope="session", autouse=True)
def first_dispatch_mode() -> Iterator[None]:
    """Let torch load its compiler, as it does at the first dispatch mode, setting an environment variable."""
    before = dict(os.environ)
    with Meter(torch.nn.Identity()):
        torch.zeros(1)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
