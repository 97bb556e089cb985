"""`python -m benchmarks.memory_predicted`: predicted peaks of the zoo beside measured ones, to the byte."""

import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch

from benchmarks.memory_bench import POLICIES, Subject
from benchmarks.memory_report import Raw, Record, Study, broken, child, sound, write_lines
from benchmarks.report import table
from benchmarks.thresholds import Verdict
from benchmarks.zoo import OPTIMIZERS, ZOO

LIMITS = {
    "traced": 1e-4,  # to the byte, but for 8 to 24 bytes of a micro-batch whose loss is the model's own
    "cuda median": 0.03,
    "cuda worst": 0.08,
    "gpt2 seconds": 3.0,  # of CPU time, for one prediction
}


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
                    **({} if device == "cpu" else {"away": host.predict(plan, "cuda").peak}),
                    "measured": subject.measure(plan).bytes,
                }


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
        errors = list(_errors(own, "traced"))
        yield Verdict(what=f"{model}: traced, worst", measured=max(errors), limit=LIMITS["traced"])
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
        *("traced", "away", "CPU s"),
    )
    rows = [
        (
            *(r["model"], r["optimizer"], f"{r['policy']} {r['blocks'] or ''}".strip(), str(r["rows"])),
            *(str(r["micro_batch"]), f"{r['measured']:,}"),
            *(_error(r, kind) for kind in ("traced", "away")),
            f"{r['seconds']:.2f}",
        )
        for r in sound(records)
    ]
    yield from ("", "## Predicted peak beside the measured one, in bytes", "", *table(header, rows))
    yield from (
        "",
        "Errors are relative; = is equal to the byte. Away: from a model on the host.",
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
