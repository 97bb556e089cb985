"""`python -m benchmarks.memory_planner`: the planner's choice beside the best of all measured plans."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch

from anybatch.core.errors import BudgetError
from anybatch.engine.plan import Plan
from benchmarks.memory_bench import POLICIES, Subject
from benchmarks.memory_report import Raw, Record, Study, broken, child, sound, write_lines
from benchmarks.ratios import paired_ratio
from benchmarks.report import table
from benchmarks.thresholds import Verdict
from benchmarks.zoo import ZOO

MODELS = {"resnet50": 16, "unet": 16, "bert": 16, "gpt2": 16, "vit": 16, "t5": 8}  # with rows of a batch
PARTS = (1, 2, 4, 8)  # micro-batches of the plans that are searched
FRACTIONS = (0.3, 0.5, 0.7, 0.9)  # of the way from the smallest peak of all to the plain step's
LIMITS = {"median": 1.03, "worst": 1.10}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each model in a process of its own; returns the exit code."""
    parser = STUDY.parser()
    parser.add_argument("--quick", action="store_true", help="small copies and few rounds, for a first look")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args(arguments)
    if options.child:
        write_lines(measure(options.child, quick=options.quick), options.out)
        return 0
    if options.raw:
        return STUDY.finish(Raw.load(options.raw), options.folder, keep=False)
    records: list[Record] = []
    for name in options.models:
        print(f"{name}: measuring all plans, then the planner's", flush=True)
        quick = ["--quick"] if options.quick else []
        records += child("benchmarks.memory_planner", [*quick, "--child", name])
    config = "quick" if options.quick else "full"
    return STUDY.finish(STUDY.collected(records, config=config), options.folder)


def measure(name: str, *, quick: bool) -> Iterator[Record]:
    """One model: all plans of the search in turn; then, for each budget, the planner's against the best."""
    torch.set_num_threads(1)
    rows = MODELS[name]
    entry = replace(ZOO[name], batch_norm=None)  # where rows meet in BatchNorm, the batch may not be cut
    subject = Subject(entry, entry.build("small" if quick else "medium"), "adamw")
    subject.warm_up()
    plans = uncut(subject, rows) if ZOO[name].batch_norm else candidates(subject, rows)
    peaks = {label: subject.measure(plan).bytes for label, plan in plans.items()}
    seconds = subject.race(plans, 3 if quick else 7)
    typical = {label: median(values) for label, values in seconds.items()}
    least, plain = min(peaks.values()), peaks[label_of(rows, POLICIES[0])]
    for fraction in FRACTIONS:
        budget = int(least + fraction * (plain - least))
        best = min((label for label in plans if peaks[label] <= budget), key=lambda label: typical[label])
        yield {
            "model": name,
            "rows": rows,
            "fraction": fraction,
            "budget": budget,
            "best": best,
            "best_peak": peaks[best],
            "best_s": typical[best],
            "peaks": peaks,
            "seconds": typical,
            **duel(subject, plans[best], rows, budget, rounds=5 if quick else 15),
        }


def candidates(subject: Subject, rows: int) -> dict[str, Plan]:
    """Every size of micro-batch with every policy, by a label to print."""
    return {
        label_of(rows // parts, policy): subject.plan(rows, rows // parts, subject.blocks(policy))
        for parts in PARTS
        for policy in POLICIES
    }


def uncut(subject: Subject, rows: int) -> dict[str, Plan]:
    """The whole batch at once, with a quarter, a half, three quarters or all of the blocks not kept."""
    plans = {label_of(rows, POLICIES[0]): subject.plan(rows, rows)}
    for policy in POLICIES[1:3]:
        blocks = subject.blocks(policy)
        for count in sorted({max(1, len(blocks) * part // 4) for part in (1, 2, 3, 4)}):
            plans[label_of(rows, f"first {count} {policy}")] = subject.plan(rows, rows, blocks[:count])
            plans[label_of(rows, f"last {count} {policy}")] = subject.plan(rows, rows, blocks[-count:])
    return plans


def label_of(micro_batch: int, policy: str) -> str:
    """As in `8 recompute`."""
    return f"{micro_batch} {policy}"


def duel(subject: Subject, best: Plan, rows: int, budget: int, *, rounds: int) -> Mapping[str, object]:
    """The planner's plan measured in turn with the best one; a plan does not race against itself."""
    start = time.process_time()
    try:
        report = subject.ask(rows, budget)
    except BudgetError as error:
        return {"error": f"nothing found in {budget:,} bytes, where {best} fits: {error}"}
    asked_s = time.process_time() - start
    chosen = report.plan
    raced = chosen != best
    seconds = subject.race({"best": best, "chosen": chosen}, rounds) if raced else {}
    return {
        "chosen": json.loads(chosen.to_json()),
        "predicted": report.peak,
        "peak": subject.measure(chosen).bytes,
        "asked_s": asked_s,
        "raced": seconds,
    }


# ---- judgement and report


def judge(records: Sequence[Record]) -> Iterator[Verdict]:
    """Never over the budget; close to the fastest plan that fits."""
    yield from broken(records)
    good = list(sound(records))
    for record in good:
        what = f"{record['model']} at {record['fraction']:.0%}: peak over budget"
        yield Verdict(what=what, measured=record["peak"] / record["budget"], limit=1.0)
    if good:
        slowdowns = [slowdown(record) for record in good]
        yield Verdict(
            what="time over the best plan's, median", measured=median(slowdowns), limit=LIMITS["median"]
        )
        yield Verdict(what="time over the best plan's, worst", measured=max(slowdowns), limit=LIMITS["worst"])


def slowdown(record: Record) -> float:
    """The median ratio of the chosen plan's time to the best one's; 1 where they are the same."""
    raced = record["raced"]
    return paired_ratio(raced["chosen"], raced["best"]).median if raced else 1.0


def sections(records: Sequence[Record]) -> Iterator[str]:
    """A line for each budget."""
    header = (
        "model",
        "budget",
        "bytes",
        "best",
        "its peak",
        "chosen",
        "its peak",
        "predicted",
        "time",
        "CPU s",
    )
    rows = [
        (
            *(r["model"], f"{r['fraction']:.0%}", f"{r['budget']:,}", r["best"], f"{r['best_peak']:,}"),
            *(_in_words(r["chosen"]), f"{r['peak']:,}", f"{r['predicted']:,}"),
            *(f"{slowdown(r):.3f}", f"{r['asked_s']:.1f}"),
        )
        for r in sound(records)
    ]
    yield from ("", "## The planner's choice and the best of all measured plans", "", *table(header, rows))
    yield from (
        "",
        "Budget: on the way from the smallest peak of all plans to that of the plain step. Plans: rows of a",
        f"micro-batch (the batch in {', '.join(map(str, PARTS))} parts) and the policy of all blocks.",
        "half: every second block is recomputed. Where rows meet in BatchNorm the batch is not cut: first or",
        "last blocks (a quarter, a half, three quarters, all) are not kept. Time: of the chosen plan over",
        "the best one's, measured in turn; 1 where they are the same.",
    )


def _in_words(plan: Mapping[str, object]) -> str:
    blocks = plan["blocks"]
    assert isinstance(blocks, list)
    policies = [policy for _, policy in blocks]
    counted = ", ".join(f"{policy} {policies.count(policy)}" for policy in sorted(set(policies)))
    return f"{plan['micro_batch']} {counted or 'keep'}"


STUDY = Study(
    kind="memory-planner", title="The planner against an exhaustive search", judge=judge, sections=sections
)

if __name__ == "__main__":
    sys.exit(main())
