"""The law of bytes: what readings tell about sizes that were not read."""

import pytest

from anybatch.planner.law import Law

LIMIT = 1e-3  # relative


FORMS = {
    "rows": lambda m, n: 1e6 + 5e5 * m,
    "rows and length": lambda m, n: 1e6 + 3e3 * m * n,
    "attention": lambda m, n: 2e3 * m * n + 20 * m * n * n,
    "recurrent": lambda m, n: 1e5 * n + 2e3 * m * n,
}
READ = [(2, 64), (5, 64), (11, 64), (4, 96), (8, 32), (3, 120), (6, 50)]


@pytest.mark.parametrize("form", FORMS)
def test_sizes_that_were_not_read_follow_from_those_that_were(form: str) -> None:
    law = Law()
    for size in READ:
        law.add(size, FORMS[form](*size))
    for size in [(22, 64), (12, 120), (7, 90), (16, 30)]:
        true = FORMS[form](*size)
        assert law(size) == pytest.approx(true, rel=LIMIT)
        assert true < law.bound(size) < 1.25 * true
