"""The five laws, on a few cases each; `make soak` draws hundreds."""

import pytest

from tests.laws.check import ADVICE
from tests.laws.drawn import LAWS, run


@pytest.mark.filterwarnings(ADVICE)
@pytest.mark.parametrize("name", LAWS)
def test_law(name: str) -> None:
    run(LAWS[name], seed=0, examples=LAWS[name].few)
