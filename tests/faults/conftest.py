"""Where memory runs out a step collects garbage; what was there before the test need not be walked again."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()
