"""`python -m benchmarks`: measure, keep raw results, report, judge; exit 0 only if all thresholds hold."""

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from benchmarks.config import FULL, QUICK, Config
from benchmarks.contestants import PACKAGES, RIVALS, installed
from benchmarks.exactness import exactness
from benchmarks.linear import head
from benchmarks.machine import hardware, versions
from benchmarks.memory import memory
from benchmarks.race import race
from benchmarks.report import file_name, render
from benchmarks.results import Head, Race, Raw
from benchmarks.thresholds import judge, ratio


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pipeline; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer pairs and wider intervals: under a minute"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/bench"), help="where raw results and reports go"
    )
    parser.add_argument("--raw", type=Path, help="report and judge these raw results, measure nothing")
    options = parser.parse_args(arguments)
    raw = Raw.load(options.raw) if options.raw else measure(QUICK if options.quick else FULL)
    verdicts = list(judge(raw))
    text = render(raw, verdicts)
    path = options.folder / file_name(raw)
    if not options.raw:
        raw.save(path.with_suffix(".json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    failed = [verdict.what for verdict in verdicts if not verdict.holds]
    print(f"\n{text}\nreport: {path}\nraw results: {options.raw or path.with_suffix('.json')}")
    print("\n".join(f"FAILED: {what}" for what in failed) or "all thresholds hold")
    return 1 if failed else 0


def measure(config: Config) -> Raw:
    """Everything in `config`, in this process, on one thread."""
    torch.set_num_threads(1)  # more threads wait busily for each other on a shared machine
    builders = installed()
    errors, peaks, races = [], [], []
    for case in config.races:
        say(f"{case.task}: gradients in float64 against one whole-batch backward")
        errors.append(exactness(case, builders, seed=config.seed))
    for case in config.memory:
        say(f"{case.task}: peak bytes at {case.few} and at {case.many} micro-batches")
        peaks.append(memory(case, RIVALS, seed=config.seed))
    heads: list[Head] = []
    for case in config.heads:
        say(f"head of {case.vocabulary:,} words: blocks against all logits at once")
        heads.append(head(case, seed=config.seed))
    deadline = time.perf_counter() + config.effort.seconds
    for left, case in zip(range(len(config.races), 0, -1), config.races, strict=True):
        say(f"{case.task}: racing {case.micro_batches} micro-batches of {case.rows} rows")
        share = (
            deadline - time.perf_counter()
        ) / left  # what a steady race leaves over goes to the next ones
        races.append(race(case, config.effort, builders, seconds=share, seed=config.seed))
        say(f"{case.task}: {summary(races[-1])}")
    return Raw(
        config=config.name,
        date=date.today().isoformat(),
        hardware=hardware(),
        versions=dict(versions(list(PACKAGES.values()))),
        gradient_error=config.gradient_error,
        parameter_error=config.parameter_error,
        races=races,
        exactness=errors,
        memory=peaks,
        heads=heads,
    )


def summary(result: Race) -> str:
    """One line while the rest is still running."""
    wall, cpu = ratio(result, "anybatch", "wall"), ratio(result, "anybatch", "cpu")
    verdict = "pass" if wall.median <= result.case.threshold else "FAIL"
    return (
        f"anybatch / hand-written = {wall.median:.3f} wall, {cpu.median:.3f} CPU "
        f"({wall.pairs} pairs, at most {result.case.threshold:g}: {verdict})"
    )


def say(text: str) -> None:
    """A line of progress, at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
