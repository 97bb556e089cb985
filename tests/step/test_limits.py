"""What memory teaches: start at what fits, try more later, wait twice as long after each failure."""

from anybatch.step.limits import PATIENCE, Limits


def test_more_is_tried_after_clean_steps_and_each_failure_doubles_the_patience() -> None:
    limits = Limits()
    limits.learn("rows", 32, largest=32, failed=0)
    assert not limits.known
    limits.learn("rows", 32, largest=32, failed=32)
    assert limits.size("other rows", 32) == 32
    assert limits.size("rows", 4) == 4
    for _ in range(PATIENCE):
        assert limits.size("rows", 32) == 16
        limits.learn("rows", 32, largest=16, failed=0)
    assert limits.size("rows", 32) == 24
    limits.learn("rows", 32, largest=24, failed=24)
    for _ in range(2 * PATIENCE):
        assert limits.size("rows", 32) == 16  # not the half of 24
        limits.learn("rows", 32, largest=16, failed=0)
    limits.learn("rows", 32, largest=24, failed=0)
    assert (limits.size("rows", 32), limits.known["rows"].clean) == (24, 0)  # kept, as it fits
    limits.learn("rows", 32, largest=16, failed=16)  # what used to fit does no longer
    assert limits.size("rows", 32) == 8
