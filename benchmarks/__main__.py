"""`python -m benchmarks`: measure, keep raw results, report, judge; exit 0 only if all thresholds hold."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from benchmarks import history
from benchmarks.config import FULL, QUICK, Config, RaceCase
from benchmarks.contestants import PACKAGES, PEERS, RIVALS, Builders, installed
from benchmarks.exactness import exactness
from benchmarks.linear import head
from benchmarks.machine import commit, hardware, versions
from benchmarks.memory import memory
from benchmarks.race import race
from benchmarks.report import PAGES, file_name, render, rewrite
from benchmarks.results import Head, Race, Raw
from benchmarks.thresholds import judge, ratio, time_of

COMPILED = 1.03  # the highest median ratio to the hand-written loop over the same compiled model


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pipeline; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer pairs, wider intervals, no trainings: about a minute"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/bench"), help="where raw results and reports go"
    )
    parser.add_argument("--raw", type=Path, help="report and judge these raw results, measure nothing")
    cases = [case.name for case in FULL.races]
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=[*cases, *RIVALS, *PEERS],
        metavar="NAME",
        help=f"race only these: cases ({', '.join(cases)}) and peers ({', '.join(PEERS)})",
    )
    parser.add_argument("--rounds", type=int, help="so many pairs in every race, however long it takes")
    parser.add_argument(
        "--compile", action="store_true", help="race with compiled models, which takes a C++ compiler"
    )
    parser.add_argument(
        "--page", action="store_true", help=f"write the table of {' and '.join(map(str, PAGES))}, too"
    )
    options = parser.parse_args(arguments)
    is_whole = not (options.quick or options.only or options.compile)
    if options.page and not is_whole:
        parser.error("--page is for whole runs: expected it without --quick, --only and --compile")
    config = chosen(QUICK if options.quick else FULL, only=options.only, rounds=options.rounds)
    if options.compile:
        config = replace(config, races=tuple(map(compiled, config.races)), memory=(), heads=())
    raw = Raw.load(options.raw) if options.raw else measure(config, only=options.only)
    verdicts = list(judge(raw))
    text = render(raw, verdicts)
    path = options.folder / file_name(raw)
    if not options.raw:
        raw.save(path.with_suffix(".json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if is_whole and not options.raw:
        print(f"history: {history.append(raw)}, {history.PICTURE}")
        history.PICTURE.write_text(history.draw(history.read()), encoding="utf-8")
    if options.page:
        rewrite(raw)
    failed = [verdict.what for verdict in verdicts if not verdict.holds]
    print(f"\n{text}\nreport: {path}\nraw results: {options.raw or path.with_suffix('.json')}")
    print("\n".join(f"FAILED: {what}" for what in failed) or "all thresholds hold")
    return 1 if failed else 0


def chosen(config: Config, *, only: Sequence[str], rounds: int | None) -> Config:
    """The races that are named, or everything where no name is given; with so many pairs."""
    if only:
        races = tuple(case for case in config.races if case.name in only)
        config = replace(config, races=races or config.races, memory=(), heads=())
    if rounds:
        config = replace(config, effort=replace(config.effort, least_blocks=rounds, most_blocks=rounds))
    return config


def compiled(case: RaceCase) -> RaceCase:
    """The race with a compiled model, without peers."""
    threshold = None if case.threshold is None else COMPILED
    return replace(
        case, name=f"{case.name}-compiled", threshold=threshold, thousand=None, compiled=True, peers=False
    )


def measure(config: Config, *, only: Sequence[str] = ()) -> Raw:
    """Everything in `config`, in this process, on one thread; with `only` no peers but those it names."""
    torch.set_num_threads(1)  # more threads wait busily for each other on a shared machine
    builders = installed()
    errors, peaks, races = [], [], []
    for case in config.races:
        if case.threshold is not None:
            say(f"{case.name}: gradients in float64 against one whole-batch backward")
            errors.append(exactness(case, entrants(case, builders, only=only), seed=config.seed))
    for case in config.memory:
        say(f"{case.task}: peak bytes at {case.few} and at {case.many} micro-batches")
        peaks.append(memory(case, RIVALS, seed=config.seed))
    heads: list[Head] = []
    for case in config.heads:
        say(f"head of {case.vocabulary:,} words: blocks against all logits at once")
        heads.append(head(case, seed=config.seed))
    deadline = time.perf_counter() + config.effort.seconds
    for left, case in zip(range(len(config.races), 0, -1), config.races, strict=True):
        say(f"{case.name}: racing {case.micro_batches} micro-batches of {case.rows} rows")
        share = (
            deadline - time.perf_counter()
        ) / left  # what a steady race leaves over goes to the next ones
        contestants = entrants(case, builders, only=only)
        found = race(case, config.effort, contestants, seconds=share, seed=config.seed)
        races.append(found)
        say(f"{case.name}: {summary(found)}")
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
        commit=commit(),
    )


def entrants(case: RaceCase, builders: Builders, *, only: Sequence[str]) -> Builders:
    """Peers take part only where the case asks for them, and where `only` names them or is empty."""
    return {
        name: build
        for name, build in builders.items()
        if name in RIVALS or (case.peers and (not only or name in only))
    }


def summary(result: Race) -> str:
    """One line while the rest is still running."""
    wall, cpu, verdict = ratio(result, "anybatch", "wall"), ratio(result, "anybatch", "cpu"), time_of(result)
    judged = "for information" if verdict is None else "pass" if verdict.holds else "FAIL"
    limit = "" if verdict is None else f", at most {verdict.limit:g}"
    return (
        f"anybatch / hand-written = {cpu.median:.3f} [{cpu.low:.3f}, {cpu.high:.3f}] CPU, "
        f"{wall.median:.3f} wall ({cpu.pairs} pairs{limit}: {judged}; weights {result.difference:.1g} off)"
    )


def say(text: str) -> None:
    """A line of progress, at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
