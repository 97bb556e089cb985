"""`python -m benchmarks.precision`: what is learned in short dtypes, what is lost, what it costs."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import precision_cost, precision_lenet5, precision_overflow, precision_sums
from benchmarks.memory_report import Raw, Record, Study, broken, child, sound, write_lines
from benchmarks.precision_config import FULL, QUICK, Part, Settings
from benchmarks.thresholds import Verdict

PARTS: Mapping[str, Part] = {
    "overflow": precision_overflow.PART,
    "sums": precision_sums.SUMS,
    "masters": precision_sums.MASTERS,
    "cost": precision_cost.PART,
    "lenet5": precision_lenet5.PART,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Each part in a process of its own; returns the exit code."""
    parser = STUDY.parser()
    parser.add_argument("--quick", action="store_true", help="fewer rows and pairs: for a first look")
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="some parts of it"
    )
    parser.add_argument(
        "--data", type=Path, help="folder with MNIST in IDX form; without it lenet5 is left out"
    )
    options = parser.parse_args(arguments)
    settings = replace(QUICK if options.quick else FULL, data=options.data)
    if options.child:
        write_lines(measure(options.child, settings), options.out)
        return 0
    if options.raw:
        return STUDY.finish(Raw.load(options.raw), options.folder, keep=False)
    common = ["--quick"] if options.quick else []
    common += ["--data", str(options.data)] if options.data else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # more wait busily for each other on a shared machine
    records: list[Record] = []
    for name in options.only:
        print(f"{name}: measuring", flush=True)
        found = child("benchmarks.precision", [*common, "--child", name], environment=environment)
        for record in found:
            if "skipped" in record:
                print(f"{name}: left out. {record['skipped']}", flush=True)
        records += found
    if all("skipped" in record for record in records):
        print("FAILED: nothing was measured")
        return 1
    parts = [] if options.only == list(PARTS) else options.only
    return STUDY.finish(STUDY.collected(records, config="-".join([settings.name, *parts])), options.folder)


def measure(name: str, settings: Settings) -> Iterator[Record]:
    """Records of one part, with its name."""
    torch.set_num_threads(1)
    for record in PARTS[name].measure(settings):
        yield {"part": name, **record}


def judge(records: Sequence[Record]) -> Iterator[Verdict]:
    """The thresholds of all parts that were measured."""
    yield from broken(records)
    for part, own in _by_part(records):
        yield from part.judge(own)


def sections(records: Sequence[Record]) -> Iterator[str]:
    """The tables of all parts that were measured."""
    for part, own in _by_part(records):
        yield from part.sections(own)


def _by_part(records: Sequence[Record]) -> Iterator[tuple[Part, list[Record]]]:
    broke = {record["model"] for record in records if "error" in record}  # what is left of it is not whole
    good = [record for record in sound(records) if record["part"] not in broke]
    for name in dict.fromkeys(record["part"] for record in good):
        yield PARTS[name], [record for record in good if record["part"] == name]


STUDY = Study(
    kind="precision",
    title="Precision: what is learned, what is lost, what it costs",
    judge=judge,
    sections=sections,
    packages=(),
)

if __name__ == "__main__":
    sys.exit(main())
