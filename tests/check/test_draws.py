"""Draws replayed: each row keeps its numbers, whatever draws them; what goes by position is counted."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anybatch.check.draws import Draws, OutOfTime
from anybatch.check.rows import Part
from anybatch.state import rng

ROWS = 8
PARTS = [Part((0, 1, 2), ROWS), Part((3, 4, 5), ROWS), Part((7, 6), ROWS)]
Draw = Callable[[Tensor], Tensor]

DRAWS: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of heads": lambda x: F.dropout(x.repeat_interleave(3, 0), 0.5).view(len(x), -1),
    "dropout by time": lambda x: F.dropout(x.repeat(3, 1, 1), 0.5).transpose(0, 1),
    "uniform": lambda x: torch.rand(len(x), 4) + torch.rand_like(x),
    "normal": lambda x: x.clone().normal_() + torch.normal(x, 1.0),
    "whole numbers": lambda x: torch.randint(0, 1000, x.shape),
    "coins": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "classes": lambda x: torch.multinomial(torch.ones(len(x), 50), 4),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[:, None].double()] * 3, dropout_p=0.5),
    "noise of a distribution": lambda x: torch.distributions.Gamma(torch.ones_like(x), 1.0).sample(),
    "one number for all": lambda x: x * torch.rand(()),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_rows_keep_their_numbers(draw: Draw) -> None:
    x = torch.ones(ROWS, 4)
    draws = Draws(0)
    with rng.preserved(), draws:
        draws.begin(Part.whole(ROWS))
        torch.rand(2)  # the stream stands somewhere
        whole = draw(x)
        for part in PARTS:
            draws.begin(part)
            torch.rand(2)
            assert draw(x[list(part.rows)]).equal(whole[list(part.rows)])
            assert draws.unreplayed == 0
        draws.begin(Part.whole(ROWS))
        torch.rand(2)
        assert draw(x).equal(whole)
    assert not draw(x).equal(whole)  # without the replay it would be other numbers


def test_rows_in_another_order_keep_their_numbers() -> None:
    turned = Part(tuple(range(ROWS))[::-1], ROWS)
    draws = Draws(0)
    with rng.preserved(), draws:
        found = []
        for part in (Part.whole(ROWS), PARTS[0], turned):
            draws.begin(part)
            found.append(torch.rand(len(part.rows), 2))
    assert found[2].equal(found[0].flip(0))


def test_numbers_by_position_are_not_replayed() -> None:
    own = torch.Generator().manual_seed(0)
    draws = Draws(0)

    def unreplayed(draw: Callable[[], object]) -> int:
        draws.begin(Part.whole(ROWS))
        draw()
        return draws.unreplayed

    def seeded() -> None:
        torch.manual_seed(0)
        torch.rand(ROWS)

    with rng.preserved(), draws:
        assert unreplayed(lambda: torch.rand(ROWS)) == 0
        assert unreplayed(lambda: torch.rand(ROWS, generator=own)) == 1
        assert unreplayed(seeded) == 1


def test_packed_rows_are_noticed_and_dropout_can_be_switched_off() -> None:
    draws = Draws(0)
    with rng.preserved(), draws:
        draws.begin(Part.whole(2))
        torch.rand(5, 3)
        assert not draws.has_packed
        draws.begin(Part((0,), 2))
        torch.rand(2, 3)
    assert draws.has_packed
    without_dropout = Draws(0, without_dropout=True)
    with rng.preserved(), without_dropout:
        without_dropout.begin(Part.whole(ROWS))
        assert F.dropout(torch.ones(100), 0.5).equal(torch.ones(100))


def test_slopes_of_rrelu_are_replayed_in_forward_and_backward() -> None:
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0))

    def run(part: Part) -> tuple[Tensor, Tensor]:
        draws.begin(part)
        leaf = x[list(part.rows)].requires_grad_()
        output = F.rrelu(leaf, training=True)
        return output.detach(), torch.autograd.grad(output.sum(), leaf)[0]

    draws = Draws(0)
    with rng.preserved(), draws:
        output, gradient = run(Part.whole(ROWS))
        for part in PARTS:
            piece, gradients = run(part)
            assert piece.equal(output[list(part.rows)])
            assert gradients.equal(gradient[list(part.rows)])


def test_casts_to_float32_stay_wide_where_asked() -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    wide, plain = Draws(0, is_wide=True), Draws(0)
    with wide:
        assert x.float().dtype == torch.float64
        x.float().sum().backward()
    with plain:
        assert x.float().dtype == torch.float32
    assert wide.dtypes == {torch.float64}


def test_what_runs_past_its_deadline_is_interrupted() -> None:
    draws = Draws(0)
    with pytest.raises(OutOfTime), draws, draws.until(time.perf_counter() - 1):
        torch.ones(2)
    with draws:
        torch.ones(2)


def test_dtypes_that_are_computed_in_are_noted() -> None:
    draws = Draws(0)
    with draws:
        torch.ones(2, dtype=torch.float64).float() * 2
    assert draws.dtypes >= {torch.float32, torch.float64}
