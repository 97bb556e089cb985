"""The law in float64: every loss, every cut, every mask, against one whole-batch backward of torch's own loss."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.laws.cases import Case
from tests.laws.check import ADVICE, check, collated, cut, reference, windowed
from tests.laws.draw import MASKS
from tests.laws.losses import CASES
from tests.laws.totals import TOTALS

MOST_ROWS = 6

pytestmark = pytest.mark.filterwarnings(ADVICE)


@pytest.mark.parametrize("case", [*CASES, *TOTALS], ids=lambda case: case.name)
@example(form=0, sizes=[1], mask="none", seed=0)
@example(form=1, sizes=[2, 1, 2], mask="one", seed=0)
@given(
    form=st.integers(0, 2),
    sizes=st.lists(st.integers(1, MOST_ROWS), min_size=1, max_size=MOST_ROWS).filter(lambda s: sum(s) <= MOST_ROWS),
    mask=st.sampled_from(MASKS),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=3, derandomize=True)
def test_any_cut_gives_the_whole_batch(case: Case, form: int, sizes: list[int], mask: str, seed: int) -> None:
    rows = sum(sizes)
    problem = case.problem(list(case.forms)[form % len(case.forms)], rows, seed=seed, mask=mask)
    whole = reference(problem)
    check(cut(problem, None), whole)
    for micro_batch in range(1, rows + 1):
        check(cut(problem, micro_batch), whole)
    if not case.is_per_row:
        check(windowed(problem, sizes), whole)
        check(collated(problem, sizes[0]), whole)
