"""What memory teaches: start at what fits, try more later, wait twice as long after each failure."""

from anybatch.step.limits import PATIENCE, Limits


def test_nothing_is_limited_at_first() -> None:
    limits = Limits()
    limits.learn("rows", 32, largest=32, failed=0)
    assert limits.size("rows", 32) == 32
    assert not limits.known


def test_a_failure_is_learned_for_its_kind_of_row_only() -> None:
    limits = Limits()
    limits.learn("long", 32, largest=16, failed=16)
    assert limits.size("long", 32) == 8
    assert limits.size("long", 4) == 4
    assert limits.size("short", 32) == 32


def test_more_is_tried_after_some_clean_steps_and_kept_if_it_fits() -> None:
    limits = Limits()
    limits.learn("rows", 32, largest=32, failed=32)
    for _ in range(PATIENCE):
        assert limits.size("rows", 32) == 16
        limits.learn("rows", 32, largest=16, failed=0)
    assert limits.size("rows", 32) == 24
    limits.learn("rows", 32, largest=24, failed=0)
    assert limits.size("rows", 32) == 24
    assert limits.known["rows"].clean == 0


def test_each_failure_doubles_the_patience_and_what_fits_is_remembered() -> None:
    limits = Limits()
    limits.learn("rows", 32, largest=32, failed=32)
    for _ in range(PATIENCE):
        limits.learn("rows", 32, largest=16, failed=0)
    limits.learn("rows", 32, largest=24, failed=24)
    for _ in range(2 * PATIENCE):
        assert limits.size("rows", 32) == 16  # not the half of 24
        limits.learn("rows", 32, largest=16, failed=0)
    assert limits.size("rows", 32) == 24
    limits.learn("rows", 32, largest=16, failed=16)  # what used to fit does no longer
    assert limits.size("rows", 32) == 8
