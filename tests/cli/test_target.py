"""What `anybatch check` is pointed at: functions in the current directory, recipes, and every refusal."""

import sys
from pathlib import Path

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)
import torch
from torch import nn

from anybatch.cli import target
from anybatch.core.errors import PlanError

SOURCE = """
import torch
from torch import nn

def mine():
    return nn.Linear(2, 1), nn.MSELoss(), (torch.ones(4, 2), torch.ones(4, 1))

def with_collate():
    return [nn.Linear(2, 1), nn.MSELoss(), [1, 2], torch.tensor]

def with_optimizer():
    model, loss, batch = mine()
    return model, loss, batch, torch.optim.SGD(model.parameters(), lr=0.1)

def with_two():
    return *with_optimizer(), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)

def wrong():
    return nn.MSELoss(), (torch.ones(4, 2), torch.ones(4, 1))

broken = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the current directory, by a name that nothing else has."""
    name = f"target_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / f"{name}_late.py").write_text("import no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return name


def test_function_of_the_current_directory(here: str) -> None:
    path = list(sys.path)
    found = target.find(f"{here}:mine", "digits")
    assert isinstance(found.loss, nn.MSELoss)
    assert (found.collate, found.optimizer) == (None, None)
    assert target.find(f"{here}:with_collate", "digits").collate is torch.tensor
    assert isinstance(target.find(f"{here}:with_optimizer", "digits").optimizer, torch.optim.SGD)
    assert sys.path == path
    found = target.find("lenet5", "digits")
    assert len(found.batch[0]) == len(found.batch[1]) == target.FIRST_ROWS


def test_target_moves_to_a_device(here: str) -> None:
    moved = target.find(f"{here}:mine", "digits").to(torch.device("meta"))
    assert {leaf.device.type for leaf in (*moved.batch, *moved.model.parameters())} == {"meta"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lenet6", "Expected a target, got 'lenet6'. Name a function"),
        ("{here}:nowhere", "'nowhere'"),
        ("{here}:broken", "of type int"),
        ("{here}:wrong", "['MSELoss', 'tuple']"),
        ("{here}:with_two", "'SGD', 'SGD'"),
        ("no.such.module:f", "'no.such.module'"),
        ("{here}.deeper:f", "deeper"),
        (":f", "''"),
    ],
)
def test_refusals_say_what_came(here: str, name: str, words: str) -> None:
    with pytest.raises(PlanError) as error:
        target.find(name.format(here=here), "digits")
    assert words in str(error.value)


def test_module_that_lacks_another_says_so(here: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        target.find(f"{here}_late:f", "digits")
