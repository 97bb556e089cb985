"""`python -m benchmarks.memory_gpt2`: GPT-2 small within ever smaller budgets, and what they cost in time."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from anybatch.core.errors import BudgetError
from anybatch.core.units import format_bytes
from benchmarks.memory_bench import Subject
from benchmarks.memory_report import Raw, Record, Study, broken, sound
from benchmarks.ratios import paired_ratio
from benchmarks.report import table
from benchmarks.thresholds import Verdict
from benchmarks.zoo import ZOO, gpt2

FRACTIONS = (1.0, 0.75, 0.5, 0.25)  # of the plain step's activations and workspace at its peak
LIMITS = {
    "slowest": 1.35,  # at the smallest budget, over the plain step
    "monotone": 1.02,  # time at a budget over that at the next smaller one: what noise may do
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in this process, on one thread; returns the exit code."""
    parser = STUDY.parser()
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a small copy, for a first look")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args(arguments)
    if options.raw:
        return STUDY.finish(Raw.load(options.raw), options.folder, keep=False)
    scale = "small" if options.small else "full"
    records = list(measure(scale, options.rows, options.length, rounds=options.rounds, device=options.device))
    config = f"{scale}-{options.rows}x{options.length}-{options.device}"
    return STUDY.finish(STUDY.collected(records, config=config, device=options.device), options.folder)


def measure(scale: str, rows: int, length: int, *, rounds: int, device: str) -> Iterator[Record]:
    """The plain step's peak, a plan for each budget, its peak, and all of them raced."""
    torch.set_num_threads(1)
    entry = replace(ZOO["gpt2"], make=lambda wanted: gpt2(wanted, length=length))
    subject = Subject(entry, entry.build(scale), "adamw", device=device)
    subject.warm_up()
    plain = subject.plan(rows, rows)
    ledger = subject.predict(plain).ledger
    peak = subject.measure(plain).bytes
    moving = ledger.at_peak["activations"] + ledger.at_peak["workspace"]
    plans = {"plain": plain}
    found: list[dict[str, object]] = []
    for fraction in FRACTIONS:
        budget = peak - int((1 - fraction) * moving)
        common = {"model": "gpt2", "device": device, "rows": rows, "fraction": fraction, "budget": budget}
        try:
            report = subject.ask(rows, budget)
        except BudgetError as error:
            found.append(common | {"error": str(error)})
            continue
        name = plans_name(fraction)
        plans[name] = report.plan
        print(f"{fraction:.0%}: {report.plan.micro_batch} rows at a time, {report.plan.blocks}", flush=True)
        found.append(
            common
            | {
                "chosen": json.loads(report.plan.to_json()),
                "words": str(report.plan),
                "predicted": report.peak,
                "peak": subject.measure(report.plan).bytes,
            }
        )
    first = {plan: name for name, plan in reversed(plans.items())}  # one plan may serve several budgets
    seconds = subject.race({name: plan for plan, name in first.items()}, rounds)
    for record in found:
        name = plans_name(float(str(record["fraction"])))
        took = {"seconds": seconds[first[plans[name]]], "plain_s": seconds["plain"]} if name in plans else {}
        yield record | took


def plans_name(fraction: float) -> str:
    """As in `75%`."""
    return f"{fraction:.0%}"


# ---- judgement and report


def judge(records: Sequence[Record]) -> Iterator[Verdict]:
    """Within every budget, slower with each, and not by too much."""
    yield from broken(records)
    good = list(sound(records))
    for record in good:
        what = f"peak over the budget of {record['fraction']:.0%}"
        yield Verdict(what=what, measured=record["peak"] / record["budget"], limit=1.0)
    for larger, smaller in pairwise(good):
        ratio = paired_ratio(larger["seconds"], smaller["seconds"]).median
        what = f"time at {larger['fraction']:.0%} over that at {smaller['fraction']:.0%}"
        yield Verdict(what=what, measured=ratio, limit=LIMITS["monotone"])
    if good:
        yield Verdict(
            what=f"time at {good[-1]['fraction']:.0%} over the plain step's",
            measured=slowdown(good[-1]),
            limit=LIMITS["slowest"],
        )


def slowdown(record: Record) -> float:
    """The median ratio to the plain step."""
    return paired_ratio(record["seconds"], record["plain_s"]).median


def sections(records: Sequence[Record]) -> Iterator[str]:
    """A line for each budget."""
    header = (
        "activations",
        "budget",
        "predicted",
        "measured",
        "of the budget",
        "rows at a time",
        "blocks",
        "time",
    )
    rows = [
        (
            *(f"{r['fraction']:.0%}", format_bytes(r["budget"]), f"{r['predicted']:,}", f"{r['peak']:,}"),
            *(f"{r['peak'] / r['budget']:.1%}", str(r["chosen"]["micro_batch"])),
            *(r["words"].split("blocks")[1].splitlines()[0].strip(), f"{slowdown(r):.3f}"),
        )
        for r in sound(records)
    ]
    yield from ("", "## GPT-2 small within a budget", "", *table(header, rows))
    yield from (
        "",
        "Budget: what the plain step holds at its peak, with that share of its activations and workspace.",
        "Time: of one update over the plain step's, measured in turn.",
    )


STUDY = Study(kind="memory-gpt2", title="GPT-2 small within a budget", judge=judge, sections=sections)

if __name__ == "__main__":
    sys.exit(main())
