"""Losses observed: bare means are noted, totals pass, and parameters stay in sight."""

from typing import Any

import torch
from torch import nn

from anybatch.check.passes import bare_terms, observe
from anybatch.core.total import Total
from anybatch.losses.resolve import module_of, resolve
from anybatch.losses.terms import Terms


class Own(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, micro: Any) -> Total:
        """Sum and rows."""
        return Total((self.scale * micro).sum(), len(micro))


def weights(loss: Any) -> tuple[dict[str, float], frozenset[str]]:
    observed = observe(loss)
    terms = resolve(observed).evaluate(nn.Identity(), torch.ones(3))
    return {name: float(weight) for name, weight in terms.weigh().items()}, bare_terms(observed)


def test_bare_means_weigh_one_and_are_noted() -> None:
    assert weights(lambda model, micro: micro.mean()) == ({"loss": 1}, {"loss"})
    mixed = lambda model, micro: {"a": micro.mean(), "b": Total(micro.sum(), 3)}  # noqa: E731
    assert weights(mixed) == ({"a": 1, "b": 3}, {"a"})


def test_totals_pass_as_they_are() -> None:
    assert weights(lambda model, micro: Total(micro.sum(), 3)) == ({"loss": 3}, set())
    assert weights(Terms(lambda model, micro: {"a": Total(micro.sum(), 2)})) == ({"a": 2}, set())


def test_parameters_of_a_loss_stay_in_sight() -> None:
    own = Own()
    assert list(module_of(observe(Terms(own))).parameters()) == [own.scale]


def test_losses_of_torch_are_left_alone() -> None:
    loss = nn.MSELoss()
    assert observe(loss) is loss
