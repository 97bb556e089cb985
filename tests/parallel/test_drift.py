"""Ranks stay alike: drifts are noticed, process groups used, and what else a wrapper was told refused."""

import pytest

from anybatch.testing import tolerance
from tests.parallel import drifting
from tests.parallel.spawned import Ranks


@pytest.mark.parametrize("name", drifting.DRIFTS)
def test_a_drift_is_noticed_on_all_ranks_before_the_update(name: str, two: Ranks) -> None:
    found = two.run(drifting.noticed, name)
    assert found[0] == found[1]
    after, said = found[0]
    assert 0 <= after <= drifting.DRIFTS[name][1]
    assert name.split(" by ")[0].split(" in ")[0] in said or "weights" in said
    assert "No update was made" in said


def test_a_drift_in_the_first_step_is_noticed_at_once_and_none_where_none_is(two: Ranks) -> None:
    for name in ("weights", "loss", "buffers", "optimizer"):
        assert [after for after, _ in two.run(drifting.noticed, name, 0)] == [0, 0]
    assert two.run(drifting.noticed, "") == [(-1, "")] * 2


def test_the_same_rows_on_all_ranks_are_warned_of(two: Ranks) -> None:
    assert all("made of copies" in said for said in two.run(drifting.same_rows))


def test_the_group_of_a_wrapper_is_used(four: Ranks) -> None:
    assert max(four.run(drifting.in_a_half)) < tolerance(drifting.torch.float64, 10)
