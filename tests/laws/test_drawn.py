"""The five laws, and the look before the first split, on a few cases each; `make soak` draws hundreds."""

import pytest

from tests.laws import planted
from tests.laws.check import ADVICE
from tests.laws.drawn import LAWS, run


@pytest.mark.filterwarnings(ADVICE)
@pytest.mark.parametrize("name", LAWS)
def test_law(name: str) -> None:
    run(LAWS[name], seed=0, examples=LAWS[name].few)


@pytest.mark.parametrize("seed", range(80))
def test_nothing_wrong_is_silent(seed: int) -> None:
    planted.assert_said(seed)
