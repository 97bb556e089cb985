"""What `anybatch plan` plans with, and what it says."""

import json
from pathlib import Path

import pytest

from anybatch.cli import main as cli
from anybatch.cli import plan as plan_action
from anybatch.engine.plan import Plan

TARGET = """
import torch
from torch import nn
from tests.budgets import Net

def make():
    return Net(), nn.CrossEntropyLoss(), (torch.zeros(2, 5, 8), torch.zeros(2, dtype=torch.long))

def with_optimizer():
    model, loss, batch = make()
    return model, loss, batch, torch.optim.SGD(model.parameters(), lr=0.1)

def on_meta():
    with torch.device("meta"):
        return make()

def with_collate():
    model, loss, _ = make()
    def collate(rows):
        return torch.zeros(len(rows), 5, 8), torch.zeros(len(rows), dtype=torch.long)
    return model, loss, [0, 1, 2, 3], collate
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"plan_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    return name


def planned(*arguments: str) -> tuple[dict[str, object], str]:
    return plan_action.plan(cli._parser().parse_args(["plan", *arguments, "--estimate"]))


def test_function_on_the_meta_device_gives_the_same_plan(target: str) -> None:
    options = "--batch-size", "64", "--memory", "200KB"
    here, there = [planned(f"{target}:{name}", *options)[0] for name in ("make", "on_meta")]
    assert here["plan"] == there["plan"]
    # An optimizer's counts of its steps lie on the processor, and so not where the model is.
    assert 0 <= here["peak"] - there["peak"] <= 4 * 14
    assert Plan.from_json(json.dumps(here["plan"])).rows == 64


def test_optimizer_of_the_target_or_the_one_named(target: str) -> None:
    options = "--memory", "1MB"
    own, told = planned(f"{target}:with_optimizer", *options)
    adamw, taken = planned(f"{target}:make", *options)
    sgd, _ = planned(f"{target}:make", *options, "--optimizer", "sgd")
    assert own["peak"] == sgd["peak"] < adamw["peak"]
    assert "note: the optimizer was taken to be adamw" in taken
    assert "taken to be" not in told


@pytest.mark.parametrize(
    ("recompute", "blocks"), [("all", 3), ("blocks.1", 1), ("blocks.[01]", 2), ("selective", 3)]
)
def test_recompute_is_a_policy_or_a_pattern(target: str, recompute: str, blocks: int) -> None:
    found, _ = planned(f"{target}:make", "--memory", "1MB", "--recompute", recompute)
    assert len(found["plan"]["blocks"]) == blocks  # type: ignore[index]


def test_samples_and_no_budget_with_which_nothing_is_chosen(target: str) -> None:
    found, told = planned(
        f"{target}:with_collate", "--memory", "none", "--batch-size", "7", "--micro-batch", "3"
    )
    assert found["budget"] is None
    assert found["plan"]["rows"] == 7  # type: ignore[index]
    assert "3, 3, 1 rows" in told


def test_precision(target: str) -> None:
    options = "--batch-size", "64", "--memory", "none"
    whole, _ = planned(f"{target}:make", *options)
    mixed, _ = planned(f"{target}:make", *options, "--precision", "bf16-mixed")
    short, told = planned(f"{target}:make", *options, "--precision", "bf16-true")
    assert "precision    bf16-true" in told
    assert mixed["plan"]["precision"]["compute"] == "bfloat16"  # type: ignore[index]
    assert short["peak"] < whole["peak"]
