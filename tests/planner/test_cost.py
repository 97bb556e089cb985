"""The greedy choice of policies: it holds the budget, and is about as fast as the best of all choices."""

from itertools import product

import numpy as np
import pytest

from anybatch.planner.cost import KEEP, Costs

BLOCKS = ("a", "b", "c", "d", "e")
POLICIES = (KEEP, "selective", "recompute")


def random_costs(seed: int) -> Costs:
    """Blocks of random sizes: a forward of one after the other, then their backwards, then an update."""
    draw = np.random.default_rng(seed)
    kept, passed = draw.uniform(1e3, 1e5, len(BLOCKS)), draw.uniform(1e2, 1e4, len(BLOCKS))
    took = draw.uniform(1.0, 5.0, len(BLOCKS))
    part = {KEEP: kept, "selective": kept * draw.uniform(0.3, 0.8, len(BLOCKS)), "recompute": 0 * kept}
    held: dict[str, np.ndarray] = {}
    for policy, each in part.items():
        rows = [np.where(np.arange(len(BLOCKS)) <= last, each + passed, 0.0) for last in range(len(BLOCKS))]
        backward = [
            row + np.where(np.arange(len(BLOCKS)) == at, kept - each, 0.0) for at, row in enumerate(rows)
        ]
        table = np.array([*rows, *backward[::-1], np.zeros(len(BLOCKS))])
        held[policy] = np.hstack([np.full((len(table), 1), 5e3), table])
    share = {KEEP: 0.0, "selective": draw.uniform(0.02, 0.1), "recompute": 1 / 3}
    extra = {policy: np.array([0.0, *(share[policy] * took * draw.uniform(0.8, 1.2))]) for policy in part}
    is_update = np.arange(2 * len(BLOCKS) + 1) == 2 * len(BLOCKS)
    return Costs(
        blocks=BLOCKS, start=0, held=held, extra=extra,
        kept_s=float(took.sum()), is_update=is_update,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_greedy_holds_the_budget_and_is_close_to_the_best_of_all_choices(seed: int) -> None:
    costs = random_costs(seed)
    every = [dict(zip(BLOCKS, one, strict=True)) for one in product(POLICIES, repeat=len(BLOCKS))]
    known = [(costs.peak(one), costs.seconds(one)) for one in every]
    rebuilt = dict.fromkeys(BLOCKS, "recompute")
    least, most = min(peak for peak, _ in known), costs.peak({})
    assert costs.peak(costs.smallest()) == least
    assert costs.fastest(least - 1) is None
    before = np.inf
    for budget in np.linspace(least, most, 12).astype(int).tolist():
        chosen = costs.fastest(budget)
        assert chosen is not None
        assert costs.peak(chosen) <= budget
        seconds = costs.seconds(chosen)
        assert seconds <= 1.10 * min(took for peak, took in known if peak <= budget)
        assert seconds <= before * 1.05  # more bytes, no more seconds
        if costs.peak(rebuilt) <= budget:
            assert seconds <= 1.02 * costs.seconds(rebuilt)
        before = seconds
    assert costs.fastest(most) == {}
