"""Plan: refuses what cannot be carried out, prints as a table, comes back from JSON."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch import Plan, Precision
from anybatch.core.batch import cut_sizes
from anybatch.core.errors import PlanError
from anybatch.engine.plan import check_micro_batch, parse_dtype
from anybatch.precision.policy import NAMED

WINDOW_TABLE = """\
rows         as they come
micro_batch  as they come
clip_norm    0.5
accumulate   float64
compensated  yes
blocks       all kept
foreach      as set
precision    float32
non_finite   raise"""


def test_table_of_a_window() -> None:
    plan = Plan(rows=0, micro_batch=0, clip_norm=0.5, accumulate="float64", compensated=True)
    assert str(plan) == WINDOW_TABLE
    assert plan.micro_batches == 0
    assert not plan.is_cut


def test_batch_norm_is_told_only_where_it_was_chosen() -> None:
    plan = Plan(rows=4, micro_batch=4)
    assert "batch_norm" not in str(plan)
    assert json.loads(plan.to_json())["batch_norm"] is None
    for chosen in ("micro", "frozen"):
        plan = Plan(rows=4, micro_batch=4, batch_norm=chosen)
        assert f"\nbatch_norm   {chosen}\n" in str(plan)
        assert Plan.from_json(plan.to_json()) == plan
    older = '{"rows": 4, "micro_batch": 4, "clip_norm": null, "batch_norm": "micro"}'
    assert Plan.from_json(older).batch_norm == "micro"


@pytest.mark.parametrize(
    ("rows", "micro_batch", "words"),
    [
        (10, 10, "10 rows"),
        (10, 5, "5, 5 rows"),
        (10, 4, "4, 4, 2 rows"),
        (16, 4, "4, 4, 4, 4 rows"),
        (17, 4, "4 x 4 rows, then 1"),
        (64000, 32, "2000 x 32 rows"),
    ],
)
def test_table_says_the_cut(rows: int, micro_batch: int, words: str) -> None:
    table = f"{Plan(rows=rows, micro_batch=micro_batch)}\n"
    assert f"micro_batch  {words}\n" in table


def test_table_says_an_irregular_cut_and_the_blocks() -> None:
    blocks = (("a", "recompute"), ("b", "selective"), ("c", "recompute"))
    plan = Plan(rows=16, micro_batch=4, cut=(4, 4, 2, 2, 4), blocks=blocks, foreach=False)
    assert (plan.micro_batches, plan.sizes, plan.is_cut) == (5, (4, 4, 2, 2, 4), True)
    table = str(plan).splitlines()
    assert "micro_batch  5 of 2 to 4 rows" in table
    assert "blocks       recompute 2, selective 1" in table
    assert "foreach      no" in table
    assert Plan.from_json(plan.to_json()) == plan
    assert "micro_batch  4, 2 rows" in str(Plan(rows=6, micro_batch=4, cut=(4, 2)))


def test_sizes_of_a_regular_cut() -> None:
    assert Plan(rows=10, micro_batch=4).sizes == (4, 4, 2)
    assert Plan(rows=0, micro_batch=0).sizes == ()


PRECISIONS = [
    *NAMED.values(),
    Precision(store="float16", loss_scale=8.0, keep_float32=("norm", "*.router"), reduce="bfloat16"),
]


@given(st.integers(1, 300), st.data())
def test_cut_and_json(rows: int, data: st.DataObject) -> None:
    plan = Plan(
        rows=rows,
        micro_batch=data.draw(st.integers(1, rows)),
        clip_norm=data.draw(st.floats(min_value=0, exclude_min=True, allow_nan=False)),
        accumulate=data.draw(st.sampled_from(["auto", "float32", "float64", "bfloat16", "float16"])),
        compensated=data.draw(st.booleans()),
        precision=data.draw(st.sampled_from(PRECISIONS)),
        non_finite=data.draw(st.sampled_from(["raise", "drop", "skip"])),
    )
    assert plan.micro_batches == len(cut_sizes(plan.rows, plan.micro_batch))
    assert plan.is_cut == (plan.micro_batches > 1)
    assert Plan.from_json(plan.to_json()) == plan
    assert hash(Plan.from_json(plan.to_json())) == hash(plan)


def test_no_clipping_is_null_in_json() -> None:
    text = Plan(rows=2, micro_batch=1).to_json()
    assert json.loads(text, parse_constant=pytest.fail)["clip_norm"] is None  # strict JSON has no Infinity
    assert Plan.from_json(text).clip_norm == math.inf


def test_accumulation_dtype_is_none_where_parameters_decide() -> None:
    assert Plan(rows=1, micro_batch=1).accumulation_dtype is None
    assert Plan(rows=1, micro_batch=1, accumulate="float64").accumulation_dtype is torch.float64


@pytest.mark.parametrize(
    ("values", "expected", "got"),
    [
        ({"micro_batch": 0}, "at least 1 row", "got 0. Leave it out"),
        ({"micro_batch": -4}, "at least 1 row", "got -4"),
        ({"micro_batch": 2.0}, "a whole number of rows", "got 2.0"),
        ({"micro_batch": True}, "a whole number of rows", "got True"),
        ({"micro_batch": None}, "a whole number of rows", "got None"),
        ({"micro_batch": 9}, "at most the 8 rows", "got 9"),
        ({"rows": 0}, "at most the 0 rows", "got 4"),
        ({"rows": -4, "micro_batch": -4}, "at least 1 row", "got -4"),
        ({"clip_norm": 0}, "clip_norm to be a positive number", "got 0"),
        ({"clip_norm": -1.0}, "clip_norm to be a positive number", "got -1.0"),
        ({"clip_norm": math.nan}, "clip_norm to be a positive number", "got nan"),
        ({"clip_norm": "1"}, "clip_norm to be a positive number", "got '1'"),
        ({"clip_norm": True}, "clip_norm to be a positive number", "got True"),
        ({"accumulate": "int64"}, "a floating dtype", "got 'int64'"),
        ({"accumulate": "float8_e4m3fn"}, "a floating dtype", "got 'float8_e4m3fn'"),
        ({"accumulate": "Tensor"}, "a floating dtype", "got 'Tensor'"),
        ({"accumulate": ""}, "a floating dtype", "got ''"),
        ({"non_finite": "stop"}, "non_finite to be one of", "got 'stop'"),
        ({"non_finite": None}, "non_finite to be one of", "got None"),
        ({"cut": (4, 3)}, "parts of 1 to 4 rows, 8 in all", "got (4, 3)"),
        ({"cut": (5, 3)}, "parts of 1 to 4 rows, 8 in all", "got (5, 3)"),
        ({"cut": (4, 0, 4)}, "parts of 1 to 4 rows, 8 in all", "got (4, 0, 4)"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(values: dict[str, Any], expected: str, got: str) -> None:
    with pytest.raises(PlanError, match=r"^Expected ") as caught:
        Plan(**{"rows": 8, "micro_batch": 4} | values)
    assert expected in str(caught.value)
    assert got in str(caught.value)
    assert str(caught.value).count(". ") >= 1  # and then what to do


@pytest.mark.parametrize("micro_batch", [np.int64(4), "4", torch.tensor(4), [4]])
def test_micro_batch_is_a_plain_int(micro_batch: object) -> None:
    with pytest.raises(PlanError, match="whole number"):
        check_micro_batch(micro_batch)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "{}",
        '{"rows": 8, "micro_batch": 4}',
        '{"rows": 8, "micro_batch": 4, "clip_norm": null, "memory": 1}',
        '{"rows": "8", "micro_batch": 4, "clip_norm": null}',
    ],
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"^Expected a plan as Plan\.to_json writes it, got "):
        Plan.from_json(text)


def test_bad_values_in_json_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match="at least 1 row, got 0"):
        Plan.from_json('{"rows": 8, "micro_batch": 0, "clip_norm": null}')


def test_plan_is_a_frozen_value() -> None:
    plan = Plan(rows=8, micro_batch=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.rows = 9  # type: ignore[misc]
    with pytest.raises(PlanError):
        dataclasses.replace(plan, micro_batch=9)
    with pytest.raises(TypeError):
        Plan(8, 4)  # type: ignore[misc]
    assert {plan: 1}[Plan(rows=8, micro_batch=4)] == 1


def test_dtypes_by_name() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert parse_dtype(str(dtype).removeprefix("torch.")) is dtype


@pytest.mark.parametrize(
    ("precision", "policy", "is_guarded"),
    [
        ("float32", "raise", False),
        ("bf16-mixed", "raise", False),
        ("bf16-true", "raise", False),
        ("fp16-mixed", "raise", True),
        ("fp16-true", "raise", True),
        ("float32", "drop", True),
        ("float32", "skip", True),
    ],
)
def test_where_each_micro_batch_is_looked_at(precision: str, policy: str, is_guarded: bool) -> None:
    plan = Plan(rows=8, micro_batch=4, precision=NAMED[precision], non_finite=policy)
    assert plan.is_guarded == is_guarded


def test_a_plan_written_before_there_was_precision_is_read() -> None:
    text = '{"rows": 8, "micro_batch": 4, "clip_norm": null}'
    plan = Plan.from_json(text)
    assert (plan.precision, plan.non_finite) == (Precision(), "raise")


def test_a_bad_precision_in_json_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="store to be one of"):
        Plan.from_json('{"rows": 8, "micro_batch": 4, "clip_norm": null, "precision": {"store": "int8"}}')
    with pytest.raises(PlanError, match=r"^Expected a plan as Plan\.to_json writes it, got "):
        Plan.from_json('{"rows": 8, "micro_batch": 4, "clip_norm": null, "precision": {"colour": 1}}')
