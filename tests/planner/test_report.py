"""The answer as a table and as JSON."""

import json

from anybatch.engine.plan import Plan
from anybatch.memory.ledger import Holding, Ledger, Moment
from anybatch.planner.report import Option, PlanReport

LEDGER = Ledger(
    moments=(Moment(phase="forward", micro_batch=0, module="a", bytes=(1024, 0, 0, 1024, 0, 0, 0)),),
    source="predicted",
    device="cpu",
    by_module=(Holding("a", "parameters", 1024),),
)
BLOCKS = (("a", "recompute"), ("b", "selective"), ("c", "recompute"))
BEST = Plan(rows=8, micro_batch=4, blocks=BLOCKS)
NEXT = (
    Option(plan=Plan(rows=8, micro_batch=2), peak=1500, seconds=0.25, source="composed", measured=True),
    Option(plan=Plan(rows=8, micro_batch=1, blocks=BLOCKS[:1]), peak=1000, seconds=0.5, source="composed"),
)
REPORT = PlanReport(
    plan=BEST,
    ledger=LEDGER,
    seconds=0.125,
    measured=True,
    budget=4096,
    device="cpu",
    options=NEXT,
    notes=("first", "second"),
)


def test_peak_is_the_ledgers() -> None:
    assert REPORT.peak == LEDGER.peak == 2048


def test_json_holds_all_of_it() -> None:
    told = json.loads(REPORT.to_json())
    assert Plan.from_json(json.dumps(told["plan"])) == BEST
    assert Ledger.from_json(json.dumps(told["ledger"])) == LEDGER
    assert [Plan.from_json(json.dumps(one["plan"])) for one in told["options"]] == [one.plan for one in NEXT]
    assert [(one["peak"], one["seconds"], one["measured"]) for one in told["options"]] == [
        (1500, 0.25, True),
        (1000, 0.5, False),
    ]
    assert (told["peak"], told["budget"], told["seconds"], told["measured"]) == (2048, 4096, 0.125, True)
    assert (told["device"], told["notes"]) == ("cpu", ["first", "second"])


def test_table() -> None:
    lines = str(REPORT).splitlines()
    assert "peak         2.0 KiB of 4.0 KiB on cpu, predicted" in lines
    assert "one update   0.125 s, measured" in lines
    assert "recompute    a, c" in lines
    assert "selective    b" in lines
    first, second = lines[lines.index("next best") + 2 :][:2]
    assert first.split() == ["2", "1.5", "KiB", "0.25", "s", "all", "kept"]
    assert second.split() == ["1", "1000", "B", "0.5", "s~", "recompute", "1"]
    assert lines[-2:] == ["note: first", "note: second"]


def test_what_is_not_there_is_not_told() -> None:
    plain = PlanReport(
        plan=Plan(rows=8, micro_batch=8),
        ledger=LEDGER,
        seconds=1.0,
        measured=False,
        budget=None,
        device="cpu",
    )
    told = str(plain)
    assert "peak         2.0 KiB on cpu, predicted" in told
    assert "estimated" in told
    assert not any(word in told for word in ("next best", "note", "recompute", "measured"))
    assert json.loads(plain.to_json())["budget"] is None
