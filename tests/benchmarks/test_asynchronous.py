"""The study of asynchronous rules: one worker is plain SGD; staleness has its bound."""

from itertools import islice

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from anybatch.testing import tolerance
from benchmarks import asynchronous
from benchmarks.asynchronous import ALONE, RULES, World

FLOAT32 = tolerance(torch.float32, 30)


@pytest.mark.parametrize("rule", RULES[:3])
def test_one_worker_that_pushes_each_update_is_plain_sgd(rule: str) -> None:
    world, model = World((rule, 1, 1), 0.1, seed=3, epochs=1), World(ALONE, 0.1, seed=3, epochs=1).model
    assert [*islice(asynchronous.asynchronous(world, rule), 30)] == [0] * 30
    inputs, targets = asynchronous.digits()[0]
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in order.split(asynchronous.ROWS)[:30]:
        optimizer.zero_grad()
        cross_entropy(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    expected = parameters_to_vector(model.parameters())
    torch.testing.assert_close(world.flat, expected.detach(), rtol=FLOAT32, atol=FLOAT32)


@pytest.mark.parametrize("bound", [0, 3])
def test_no_push_is_staler_than_its_bound_allows(monkeypatch: pytest.MonkeyPatch, bound: int) -> None:
    """Each other worker is ahead by at most the bound, before and after; with 0 all start together.

    Mutation: waiting workers pull at their push.
    """
    monkeypatch.setattr(asynchronous, "SPREAD", 2.0)
    world = World(("accumulate", 4, 1, bound), 0.01, seed=1, epochs=1)
    stale = [*asynchronous.asynchronous(world, "accumulate")]
    assert max(stale) <= 3 * (2 * bound + 1)
    assert bound or stale[: len(stale) // 4 * 4] == [0, 1, 2, 3] * (len(stale) // 4)
    free = World(("accumulate", 4, 1), 0.01, seed=1, epochs=1)
    assert len([*asynchronous.asynchronous(free, "accumulate")]) > len(stale)


def test_a_study_measures_every_setting_and_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "RATES", (0.1,))
    records = [*asynchronous.measure(seeds=1, epochs=1)]
    rows = [line for line in asynchronous.sections(records) if line.startswith("| ")]
    settings = 3 + len(RULES) * len(asynchronous.SETTINGS) + len(asynchronous.BOUNDED)
    assert len(rows) == 1 + 1 + settings  # a header, its rule
    assert next(asynchronous.judge(records)).holds
