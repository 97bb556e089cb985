"""Where memory runs out a step collects garbage; what was there before the first test need not be walked."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def frozen() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
