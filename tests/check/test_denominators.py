"""What a term is divided by."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.check.denominators import candidates, fit, held_weights, misfit
from anybatch.check.outputs import Evaluation
from anybatch.check.rows import Part
from anybatch.core import tree

VALUES = [0.5, 2.0, 1.0, 2.5, 0.7]
WEIGHTS = [3.0, 1.0, 2.0, 4.0, 1.0]


def test_misfit_is_relative_to_what_is_added_up() -> None:
    assert misfit([1, 1, 0], [2.0, 4.0, math.nan], 3.0) == 0.0
    assert misfit([0], [1.0], 1.0) == math.inf
    assert misfit([2**20, 2**20], [2.0, 4.0], 3.5) == misfit([1, 1], [2.0, 4.0], 3.5)


def evaluation(rows: tuple[int, ...], epsilon: float) -> Evaluation:
    weight = sum(WEIGHTS[row] for row in rows) + epsilon
    mean = sum(WEIGHTS[row] * VALUES[row] for row in rows) / weight
    leaves = [torch.tensor([WEIGHTS[row] for row in rows], dtype=torch.float64)]
    part = Part(rows, 5)
    return Evaluation(
        part=part, sums={"loss": mean}, weights={"loss": 1.0}, gradients={}, leaves=leaves, unreplayed=0
    )


@pytest.mark.parametrize(("epsilon", "is_near"), [(0.0, False), (1e-7, True)])
def test_candidate_that_fits_is_found_also_with_an_epsilon(epsilon: float, is_near: bool) -> None:
    whole, parts = evaluation((0, 1, 2, 3, 4), epsilon), [evaluation(r, epsilon) for r in ((0, 1), (2, 3, 4))]
    options = candidates(torch.tensor(WEIGHTS), {})
    found = fit(options, [lambda one: one.mean("loss")], whole, [parts], tolerance=1e-11, error=0.1)
    assert found is not None
    assert (found[0].code, found[1]) == ("micro.sum()", is_near)
    assert (
        fit(options[:1], [lambda one: one.mean("loss")], whole, [parts], tolerance=1e-11, error=0.1) is None
    )


# ---- weights


LABELS = torch.tensor([[3, 1, -100], [2, -100, -100], [0, 1, 2]])
MASK = LABELS != -100
BATCH = {
    "x": torch.randn(3, 3, 2),
    "labels": LABELS,
    "mask": MASK,
    "picked": torch.tensor([[1, 0, 1], [1, 1, 1], [0, 1, 1]]),
    "lengths": torch.tensor([2, 1, 3]),
    "reach": torch.tensor([0.5, math.nan, 2.0]),
}


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("len(micro['x'])", 3),
        ("micro['x'].numel()", 18),
        ("(micro['labels'] != -100).sum()", 6),
        ("(micro['labels'][:, 1:] != -100).sum()", 3),
        ("(micro['labels'] != -100).flatten(1).any(1).sum()", 3),
        ("micro['mask'].sum()", 6),
        ("(~micro['mask']).sum()", 3),
        ("weight[micro['labels'][micro['labels'] >= 0]].sum()", 4 + 2 + 3 + 1 + 2 + 3),
        ("(~micro['reach'].isnan()).sum()", 2),
        ("(micro['lengths'] - 1).sum()", 3),
        ("(micro['mask'] * micro['picked']).sum()", 4),
    ],
)
def test_candidates_count_what_their_code_says(code: str, count: float) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = {one.code: one for one in candidates(BATCH, {"weight": weight})}
    assert found[code].count(tree.flatten(BATCH).leaves) == count
    assert float(eval(code, {"micro": BATCH, "weight": weight})) == count


def test_targets_are_counted_before_what_goes_in() -> None:
    words = [one.words for one in candidates((LABELS, LABELS), {})]
    of_last, of_first = (f"the entries of micro[{place}] that are not -100" for place in (1, 0))
    assert words.index("the rows") < words.index(of_last) < words.index(of_first)


class Weighted(nn.Module):
    """Holds class weights in a buffer."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("balance", weight)

    def measure(self, model: nn.Module, micro: Tensor) -> Tensor:
        """Not called."""
        return micro


class Trainer:
    """Holds class weights and a loss, and cannot be called."""

    def __init__(self) -> None:
        self.balance = torch.ones(3)
        self.names = ["a", "b"]

    def measure(self, model: nn.Module, micro: Tensor) -> Tensor:
        """Not called."""
        return micro


def test_class_weights_are_found_wherever_they_are_held() -> None:
    weight = torch.ones(3)

    def closed(model: nn.Module, micro: Tensor) -> Tensor:
        return weight[micro]

    def default(model: nn.Module, micro: Tensor, balance: Tensor = weight) -> Tensor:
        return balance[micro]

    holders = (
        closed,
        default,
        partial(F.cross_entropy, weight=weight),
        Weighted(weight),
        Weighted(weight).measure,
    )
    for holder in holders:
        (found,) = held_weights(holder).values()
        assert found is weight
    balance = [1.0, 2.0]
    (found,) = held_weights(lambda model, micro: balance).items()
    assert found[0] == "torch.tensor(balance)"
    assert found[1].tolist() == balance
    assert list(held_weights(Trainer().measure)) == ["self.balance"]
    assert held_weights(F.mse_loss, lambda model, micro: LABELS) == {}
