"""Plan: refuses what cannot be carried out, prints as a table, comes back from JSON."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from anybatch import Precision
from anybatch.core.batch import cut_sizes
from anybatch.core.errors import PlanError
from anybatch.engine import Plan
from anybatch.precision.policy import NAMED

PRECISIONS = [*NAMED.values(), Precision(store="float16", loss_scale=8.0, keep_float32=("norm", "*.router"))]
READ = '{"rows": 8, "micro_batch": 4, "clip_norm": null'
OPTIONS: dict[str, Any] = {
    "clip_norm": st.floats(min_value=0, exclude_min=True, allow_nan=False),
    "accumulate": st.sampled_from(["auto", "float32", "float64", "bfloat16", "float16"]),
    "precision": st.sampled_from(PRECISIONS),
    "non_finite": st.sampled_from(["raise", "drop", "skip"]),
}


@given(st.integers(1, 300), st.integers(1, 300), st.fixed_dictionaries(OPTIONS))
def test_cut_and_json(rows: int, micro_batch: int, options: Any) -> None:
    plan = Plan(rows=rows, micro_batch=min(micro_batch, rows), **options)
    assert plan.micro_batches == len(cut_sizes(plan.rows, plan.micro_batch))
    assert plan.is_cut == (plan.micro_batches > 1)
    wanted = None if plan.accumulate == "auto" else getattr(torch, plan.accumulate)
    assert plan.accumulation_dtype is wanted
    assert Plan.from_json(plan.to_json()) == plan
    assert hash(Plan.from_json(plan.to_json())) == hash(plan)


@pytest.mark.parametrize(("values", "message"), [
    ({"micro_batch": 0}, "at least 1 row, got 0"),
    ({"micro_batch": 2.0}, "a whole number of rows.* got 2.0"),
    ({"micro_batch": 9}, "at most the 8 rows.* got 9"),
    *(({"clip_norm": one}, f"clip_norm to be a positive number.* got {one}") for one in (0, True)),
    ({"clip_value": -1.0}, "clip_value to be a positive number.* got -1"),
    ({"clip_norm": 1.0, "clip_value": 0.5}, "clip_norm or clip_value, got both: 1.0 and 0.5"),
    *(({"accumulate": one}, f"a floating dtype.* got '{one}'") for one in ("int64", "float8_e4m3fn")),
    ({"non_finite": "stop"}, "non_finite to be one of.* got 'stop'"),
    *(({"cut": one}, rf"parts of 1 to 4 rows, 8 in all.* got \({one[0]}") for one in ((5, 3), (4, 0, 4))),
], ids=str)  # fmt: skip
def test_what_cannot_be_carried_out_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=rf"^Expected (.|\n)*{message}(.|\n)*\. "):  # and then what to do
        Plan(**{"rows": 8, "micro_batch": 4} | values)


@pytest.mark.parametrize(("text", "words"), [
    ("{", "a plan as Plan.to_json writes it, got '{'"),
    ('{"rows": 8, "micro_batch": 4}', "a plan as Plan.to_json"),
    (READ.replace("8", '"8"') + "}", "a plan as Plan.to_json"),
    (READ.replace("4", "0") + "}", "micro_batch to be at least 1"),
    (READ + ', "precision": {"store": "int8"}}', "store to be"),
    (READ + ', "precision": {"colour": 1}}', "a plan as Plan"),
])  # fmt: skip
def test_other_json_is_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=rf"^Expected {re.escape(words)}"):
        Plan.from_json(text)
