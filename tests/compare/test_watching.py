"""A split that begins to matter is refused by the next update that is looked at; an exact loss never is."""

import random

import pytest
import torch

from tests.unsplit import EXACT, draw
from tests.watched import CASES
from tests.watching import DOORS, Played, broken, float64, play

KNOWN = ("LayerDrop",)  # one number for all rows is drawn for each micro-batch, as dropout is


@pytest.mark.parametrize("name", [one for one in CASES if one not in KNOWN])
def test_no_wrong_update_is_silent_once_it_is_due(name: str) -> None:
    case, drawn = CASES[name], random.Random(name)
    for door in case.doors:
        micro, rows, seed = drawn.choice([1, 2, 5, 8, 16]), 40, drawn.randrange(5)
        said, _ = play(case, door, micro, rows, seed)
        assert not broken(said), f"{door}, micro-batch {micro}, seed {seed}: {said}"


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_loss_is_never_refused_or_warned_of(name: str) -> None:
    drawn = random.Random(name)
    with float64():
        for dropout in (0.0, 0.3):
            torch.manual_seed(0)
            played = Played(EXACT[name](dropout), drawn.choice(DOORS), drawn.choice([1, 5, 16]))
            for number in (1, 2):
                said = played.update(number, 40)
                assert not played.noted
                assert dropout or said == "exact"


def test_what_changes_later_is_refused_at_the_next_look() -> None:
    drawn = random.Random(0)
    for number in range(8):
        case, name, door, micro, rows = draw(drawn)
        said, _ = play(case, door, micro, rows, number, updates=17)
        assert not broken(said, last=16), f"{name}, {door}, {micro} of {rows}: {said}"
