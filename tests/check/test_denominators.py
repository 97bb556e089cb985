"""Denominators: candidates that fit, and rows whose weights give themselves away."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from anybatch.check.denominators import candidates, fit, in_words, misfit, row_weights
from anybatch.check.outputs import Evaluation
from anybatch.check.rows import Part
from anybatch.testing import relative_error

LIMIT = 1e-12
VALUES = [0.5, 2.0, 1.0, 2.5, 0.7]
WEIGHTS = [3.0, 1.0, 2.0, 4.0, 1.0]


def means(
    weights: Sequence[float] = WEIGHTS, epsilon: float = 0.0, least: float = 0.0
) -> Callable[[Sequence[Sequence[int]]], list[float]]:
    def mean(rows: Sequence[int]) -> float:
        weight = max(sum(weights[row] for row in rows) + epsilon, least)
        return sum(weights[row] * VALUES[row] for row in rows) / weight if weight else math.nan

    return lambda groups: [mean(rows) for rows in groups]


@pytest.mark.parametrize("least", [0.0, 1.0])
@pytest.mark.parametrize("silent", [[], [1], [3], [0, 4]])
def test_mean_gives_its_weights_away(silent: list[int], least: float) -> None:
    weights = [0.0 if row in silent else weight for row, weight in enumerate(WEIGHTS)]
    found = row_weights(means(weights, least=least), 5)
    assert found is not None
    smallest = min(weight for weight in weights if weight)
    wanted = torch.tensor(weights, dtype=torch.float64) / smallest
    assert relative_error(torch.tensor(found[0], dtype=torch.float64), wanted) <= LIMIT


def test_what_is_no_mean_has_no_weights() -> None:
    assert row_weights(lambda groups: [2.0 for _ in groups], 5) is None
    assert row_weights(lambda groups: [math.nan for _ in groups], 5) is None
    assert row_weights(lambda groups: [max(VALUES[row] for row in rows) for rows in groups], 5) is None


def test_few_groups_are_asked_for() -> None:
    asked: list[int] = []

    def values(groups: Sequence[Sequence[int]]) -> list[float]:
        asked.append(len(groups))
        return means()(groups)

    assert row_weights(values, 5) is not None
    assert sum(asked) == 5 + 4


def test_misfit_is_relative_to_what_is_added_up() -> None:
    assert misfit([1, 1, 0], [2.0, 4.0, math.nan], 3.0) == 0.0
    assert misfit([0], [1.0], 1.0) == math.inf
    assert misfit([2**20, 2**20], [2.0, 4.0], 3.5) == misfit([1, 1], [2.0, 4.0], 3.5)


def evaluation(rows: tuple[int, ...], epsilon: float) -> Evaluation:
    (mean,) = means(epsilon=epsilon)([rows])
    leaves = [torch.tensor([WEIGHTS[row] for row in rows], dtype=torch.float64)]
    part = Part(rows, 5)
    return Evaluation(
        part=part, sums={"loss": mean}, weights={"loss": 1.0}, pulled={}, leaves=leaves, strangers=0
    )


@pytest.mark.parametrize(("epsilon", "is_near"), [(0.0, False), (1e-7, True)])
def test_candidate_that_fits_is_found_also_with_an_epsilon(epsilon: float, is_near: bool) -> None:
    whole, parts = evaluation((0, 1, 2, 3, 4), epsilon), [evaluation(r, epsilon) for r in ((0, 1), (2, 3, 4))]
    options = candidates(torch.tensor(WEIGHTS), {})
    found = fit(options, [lambda one: one.mean("loss")], whole, [parts], tolerance=1e-11, error=0.1)
    assert found is not None
    assert (found.code, found.is_near) == ("micro.sum()", is_near)
    assert (
        fit(options[:1], [lambda one: one.mean("loss")], whole, [parts], tolerance=1e-11, error=0.1) is None
    )


def test_weights_are_told_as_integers_where_they_are() -> None:
    assert in_words([1.0, 1.5, 2.0]) == "2, 3, 4"
    assert in_words([1.0, math.pi]) == "1, 3.142"
