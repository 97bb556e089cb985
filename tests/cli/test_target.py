"""What `anybatch check` and `anybatch plan` are pointed at, and what they say of it."""

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)

from anybatch.cli import plan as plan_action, target
from anybatch.cli.options import PlanOptions, parse
from anybatch.core.errors import PlanError
from anybatch.engine.plan import Plan
from tests.check.conftest import unhurried as unhurried
from tests.cli.test_main import run


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lenet6", "Expected a target, got 'lenet6'. Name a function"),
        ("{here}:nowhere", "'nowhere'"),
        ("{here}:broken", "of type int"),
        ("{here}:wrong", "['MSELoss', 'tuple']"),
        ("{here}:with_two", "'Adam', 'Adam'"),
        ("no.such.module:f", "'no.such.module'"),
    ],
)
def test_refusals_say_what_came(here: str, name: str, words: str) -> None:
    with pytest.raises(PlanError) as error:
        target.find(name.format(here=here), "digits")
    assert words in str(error.value)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        target.find(f"{here}_late:f", "digits")


def test_check_says_exact_and_only_then_returns_0(here: str, capsys: Any) -> None:
    code, printed, _ = run(capsys, "check", f"{here}:make", "--rows", 5, "--json")
    assert (code, json.loads(printed)["exact"]) == (0, True)
    code, printed, _ = run(capsys, "check", f"{here}:meeting", "--micro-batch", 4, "--json")
    told = json.loads(printed)
    assert (code, told["cuts"][0]) == (1, "4+4+1")
    assert told["findings"][0]["culprit"] == "0 (BatchNorm1d)"
    code, printed, _ = run(capsys, "check", f"{here}:meeting", "--batch-norm", "frozen", "--device", "cpu")
    assert (code, printed.partition(":")[0]) == (0, "exact")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["check", "{}:on_meta"], "Expected a model with values to check, got"),
        (["plan", "{}:make", "--memory", "much"], "'much'"),
        (["plan", "{}:make", "--device", "tpu"], "'tpu'"),
        (["plan", "{}:failing", "--memory", "1MB"], "Error"),
        (["plan", "{}:make", "--memory", "10"], "learn the smallest"),
        (["check", "{}:failing"], "could not check: RuntimeError"),
    ],
)
def test_targets_that_cannot_be_checked_or_planned(here: str, capsys: Any, arguments: Any, told: str) -> None:
    code, printed, error = run(capsys, *[one.format(here) for one in arguments])
    assert (code, printed) == (2 if arguments[0] == "check" else 1, "")
    assert error.startswith(f"anybatch {arguments[0]}: ")
    assert told in error


@pytest.mark.parametrize("command", ["check", "plan"])
def test_json_is_all_that_is_printed_whatever_the_target_prints(here: str, capsys: Any, command: str) -> None:
    code, printed, error = run(capsys, command, f"{here}:talking", "--json")
    assert (code, printed.count("\n"), error) == (0, 1, "I print what I like\n")
    assert json.loads(printed)
    code, printed, _ = run(capsys, command, f"{here}:endless", "--json")
    assert (code, json.loads(printed)) == (130, {"error": "interrupted"})


def planned(*arguments: str) -> tuple[dict[str, Any], str]:
    return plan_action.plan(parse(ArgumentParser(), PlanOptions, arguments))


def test_plan_is_a_table_and_one_json_object(here: str, capsys: Any) -> None:
    arguments = ["plan", f"{here}:make", "--batch-size", 30, "--memory", "1MB", "--json"]
    code, printed, _ = run(capsys, *arguments, "--plot", "memory.svg")
    told = json.loads(printed)
    assert code == 0
    assert Plan.from_json(json.dumps(told["plan"])) == Plan(rows=30, micro_batch=30)
    peak = max(sum(one["bytes"]) for one in told["ledger"]["moments"])
    assert peak == told["peak"] <= told["budget"] == 10**6
    assert Path("memory.svg").exists()


@pytest.mark.parametrize(
    ("recompute", "blocks"), [("all", 3), ("blocks.1", 1), ("blocks.[01]", 2), ("selective", 3)]
)
def test_recompute_is_a_policy_or_a_pattern(here: str, recompute: str, blocks: int) -> None:
    found, _ = planned(f"{here}:net", "--memory", "1MB", "--recompute", recompute)
    assert len(found["plan"]["blocks"]) == blocks
