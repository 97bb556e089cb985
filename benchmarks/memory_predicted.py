"""`python -m benchmarks.memory_predicted`: predicted peaks of the zoo beside measured ones, to the byte."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from statistics import median

import torch

from anybatch.core import tree
from anybatch.engine.plan import Plan
from anybatch.memory.device import Device, find_device
from anybatch.planner.cost import Recorded, costs_of
from anybatch.planner.trace import is_linear_in_rows
from benchmarks.memory_bench import KEEP, POLICIES, Subject
from benchmarks.memory_report import Raw, Record, Study, broken, child, sound, write_lines
from benchmarks.report import table
from benchmarks.thresholds import Verdict
from benchmarks.zoo import OPTIMIZERS, ZOO

LIMITS = {
    "traced": 1e-4,  # to the byte, but for 8 to 24 bytes of a micro-batch whose loss is the model's own
    "composed": 0.005,
    "cuda median": 0.03,
    "cuda worst": 0.08,
    "gpt2 seconds": 3.0,  # of CPU time, for one prediction
}
SMALL_SIZES = (2, 3)  # what laws and compositions are made of


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each model in a process of its own; returns the exit code."""
    parser = STUDY.parser()
    parser.add_argument(
        "--small", action="store_true", help="small copies of the models: some minutes in all"
    )
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args(arguments)
    scale = "small" if options.small else "full"
    if options.child:
        write_lines(measure(options.child, scale, options.device), options.out)
        return 0
    if options.raw:
        return STUDY.finish(Raw.load(options.raw), options.folder, keep=False)
    settings = [*(["--small"] if options.small else []), "--device", options.device]
    records: list[Record] = []
    for name in options.models:
        print(f"{name}: predicting and measuring", flush=True)
        records += child("benchmarks.memory_predicted", [*settings, "--child", name])
    device = options.device
    return STUDY.finish(STUDY.collected(records, config=f"{scale}-{device}", device=device), options.folder)


def measure(name: str, scale: str, device: str) -> Iterator[Record]:
    """One model: three sizes of micro-batches, two optimizers, four policies."""
    torch.set_num_threads(1)
    entry = ZOO[name]
    for optimizer in OPTIMIZERS:
        subject = Subject(entry, entry.build(scale), optimizer, device=device)
        host = subject if device == "cpu" else Subject(entry, entry.build(scale), optimizer)
        forecast = Forecast(host, subject, find_device(device))
        subject.warm_up()
        for policy in POLICIES:
            blocks = subject.blocks(policy)
            for size in entry.rows:
                plan = subject.plan(entry.rows[-1], size, blocks)
                start = time.process_time()
                traced = subject.predict(plan)
                seconds = time.process_time() - start
                yield {
                    "model": name,
                    "scale": scale,
                    "device": device,
                    "optimizer": optimizer,
                    "policy": policy,
                    "blocks": len(blocks),
                    "rows": plan.rows,
                    "micro_batch": size,
                    "traced": traced.peak,
                    "seconds": seconds,
                    **forecast.of(plan),
                    "measured": subject.measure(plan).bytes,
                }


class Forecast:
    """Peaks that were not traced at their size, but composed of the blocks of two smaller ones.

    Args:
        host: the model on the host; on a card the peak is also predicted from there, as for a card that is
            not here.
        device: where the step runs.
    """

    def __init__(self, host: Subject, subject: Subject, device: Device) -> None:
        self._host, self._subject, self._device = host, subject, device
        self._recordings: dict[str, Recorded] = {}

    def of(self, plan: Plan) -> dict[str, int]:
        """What there is for this plan."""
        found: dict[str, int] = {}
        task = self._subject.step.task()  # pyright: ignore[reportPrivateUsage]
        if plan.micro_batch > max(SMALL_SIZES) and is_linear_in_rows(task.loss, task.model):
            with suppress(ValueError):  # steps of these sizes differ
                found["composed"] = self._composed(plan)
        if self._device.kind == "cuda":
            found["away"] = self._host.predict(plan, "cuda").peak
        return found

    def _composed(self, plan: Plan) -> int:
        """Of steps in which all blocks have the same policy, as the planner does it."""
        if not self._recordings:
            self._recordings = {policy: self._record(policy) for policy in (KEEP, *POLICIES[1:3])}
        leaves = tree.flatten(self._subject.batch(plan.rows)).leaves
        beyond = plan.rows - 2 * plan.micro_batch  # rows of the batch that the recordings do not hold
        extra = sum(leaf.untyped_storage().nbytes() for leaf in leaves) * beyond // plan.rows
        costs = costs_of(
            self._recordings,
            tuple(name for name, _ in self._subject.blocks("recompute")),
            rows=plan.rows,
            micro_batch=plan.micro_batch,
            device=self._device,
            half=False,
            start=extra,
        )
        return costs.peak(dict(plan.blocks))

    def _record(self, policy: str) -> Recorded:
        names = tuple(name for name, _ in self._subject.blocks("recompute"))
        blocks = self._subject.blocks(policy)
        plans = [self._subject.plan(2 * size, size, blocks) for size in SMALL_SIZES]
        one, other = [self._subject.predict(plan).recording for plan in plans]
        return Recorded(SMALL_SIZES, (one, other), names)


# ---- judgement and report


def judge(records: Sequence[Record]) -> Iterator[Verdict]:
    """On the CPU every model by itself; on a card all figures together, because its allocator rounds."""
    yield from broken(records)
    good = list(sound(records))
    if any(record["device"] != "cpu" for record in good):
        for kind in ("traced", "away"):
            errors = list(_errors(good, kind))
            yield Verdict(what=f"{kind}, median", measured=median(errors), limit=LIMITS["cuda median"])
            yield Verdict(what=f"{kind}, worst", measured=max(errors), limit=LIMITS["cuda worst"])
        return
    for model, own in _by_model(good):
        for kind in ("traced", "composed"):
            errors = list(_errors(own, kind))
            if errors:
                yield Verdict(what=f"{model}: {kind}, worst", measured=max(errors), limit=LIMITS[kind])
        if model == "gpt2":
            seconds = median(record["seconds"] for record in own)
            yield Verdict(
                what="gpt2: CPU seconds of a prediction", measured=seconds, limit=LIMITS["gpt2 seconds"]
            )


def _errors(records: Sequence[Record], kind: str) -> Iterator[float]:
    for record in records:
        if kind in record:
            yield abs(record[kind] / record["measured"] - 1)


def _by_model(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    for model in dict.fromkeys(record["model"] for record in records):
        yield model, [record for record in records if record["model"] == model]


def sections(records: Sequence[Record]) -> Iterator[str]:
    """A line for each step."""
    header = (
        *("model", "optimizer", "blocks", "rows", "at a time", "measured"),
        *("traced", "composed", "away", "CPU s"),
    )
    rows = [
        (
            *(r["model"], r["optimizer"], f"{r['policy']} {r['blocks'] or ''}".strip(), str(r["rows"])),
            *(str(r["micro_batch"]), f"{r['measured']:,}"),
            *(_error(r, kind) for kind in ("traced", "composed", "away")),
            f"{r['seconds']:.2f}",
        )
        for r in sound(records)
    ]
    yield from ("", "## Predicted peak beside the measured one, in bytes", "", *table(header, rows))
    yield from (
        "",
        "Errors are relative; = is equal to the byte. Composed: of steps of "
        f"{SMALL_SIZES[0]} and {SMALL_SIZES[1]} rows at a time in which all blocks have one policy.",
        "Not composed, but traced at each size: recurrent layers, losses in which rows meet. Away: from a",
        "model on the host.",
        "CPU s: of one traced prediction. half: every second block is recomputed.",
    )


def _error(record: Record, kind: str) -> str:
    if kind not in record:
        return ""
    return "=" if record[kind] == record["measured"] else f"{record[kind] / record['measured'] - 1:+.3%}"


STUDY = Study(
    kind="memory-predicted", title="Predicted and measured peak of one step", judge=judge, sections=sections
)

if __name__ == "__main__":
    sys.exit(main())
