"""Sharded models within a memory budget: each rank keeps to its own, and the update is the whole batch's."""

from tests.parallel import budgeted
from tests.parallel.spawned import Ranks

ROWS = 6
SECONDS = 300.0  # on a machine with load


def test_a_gpt_keeps_to_its_budget_and_holds_gradients_where_they_fit(two: Ranks) -> None:
    """Held or reduced as the budget demands; 3 % are what a later step may exceed it by."""
    plain = max(two.run(budgeted.within, ROWS, None, seconds=SECONDS)[0]["heap"][1:])
    refused = two.run(budgeted.within, ROWS, int(0.15 * plain), seconds=SECONDS)
    smallest = [one["smallest"] for one in refused]
    assert all(str(least) in one["said"] for one, least in zip(refused, smallest, strict=True))
    for memory, is_held in [(0.9 * plain, True), (0.6 * plain, None), (1.01 * max(smallest), False)]:
        for one in two.run(budgeted.within, ROWS, int(memory), seconds=SECONDS):
            assert one["error"] < 1e-12
            assert is_held is None or one["held"][-1] is is_held, one
            assert 1 < max(map(len, one["cut"])) <= ROWS
            assert max(one["heap"][1:]) < 1.03 * memory, (one, memory)


def test_ranks_with_other_budgets_rows_and_faults_make_one_update_or_none(two: Ranks, four: Ranks) -> None:
    for ranks, seed, count in ((two, 100, 10), (four, 300, 4)):
        for told in zip(*ranks.run(budgeted.several, seed, count, seconds=SECONDS), strict=True):
            failed = [rank for rank, one in enumerate(told) if not one.startswith("[")]
            first = [rank for rank in failed if not told[rank].startswith("RankError")]
            assert len(failed) in (0, len(told)), told
            assert bool(first) == bool(failed), told
            assert all(rank in first or f"on rank {first[0]}" in told[rank] for rank in failed), told
