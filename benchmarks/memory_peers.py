"""`python -m benchmarks.memory_peers`: everybody's automatic mode under the same enforced limit of memory."""

import os
import resource
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.memory.meter import Meter
from benchmarks.memory_contestants import (
    CONTESTANTS,
    OURS,
    PACKAGES,
    ROWS,
    UPDATES,
    Job,
    Tally,
    collate,
    rows_of,
    surviving,
)
from benchmarks.memory_report import Raw, Record, Study, child, write_lines
from benchmarks.report import table
from benchmarks.thresholds import Verdict

WORDS = 5_000
SHARE = 0.6  # of the peak of a step of short rows, beyond the parameters: what there is
SPARE = 0.1  # of it that anybatch leaves to the allocator and to Python
DEVIATION = (
    1e-4  # of the parameters, relative, float32: the order of additions may show, another batch must not
)
REFERENCE = "reference"


def main(arguments: Sequence[str] | None = None) -> int:
    """Each contestant in a process of its own; returns the exit code."""
    parser = STUDY.parser()
    parser.add_argument("--parameters", type=Path, help="where the parameters of the reference are")
    parser.add_argument("--limit", type=int, default=0, help="bytes, beyond those after set-up")
    options = parser.parse_args(arguments)
    if options.child:
        write_lines(measure(options.child, options.parameters, options.limit), options.out)
        return 0
    if options.raw:
        return STUDY.finish(Raw.load(options.raw), options.folder, keep=False)
    with tempfile.TemporaryDirectory() as folder:
        records = list(_everybody(Path(folder) / "reference.pt"))
    notes = [f"{name}: not installed, left out." for name in CONTESTANTS if not _is_there(name)]
    notes.append(
        "Composer is left out: its automatic micro-batches exist on GPUs only (it refuses them on a CPU)."
    )
    return STUDY.finish(STUDY.collected(records, config="cpu", notes=notes), options.folder)


def _everybody(parameters: Path) -> Iterator[Record]:
    # Every tensor gives its memory back at once, so that the limit is one of tensors.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    module, common = "benchmarks.memory_peers", ["--parameters", str(parameters)]
    reference = child(module, [*common, "--child", REFERENCE], environment=environment)[0]
    yield reference
    if "error" in reference:
        return
    limit = str(int(SHARE * reference["peak"]))
    for name in CONTESTANTS:
        if _is_there(name):
            print(f"{name}: {UPDATES} updates of {ROWS} rows", flush=True)
            yield from child(module, [*common, "--limit", limit, "--child", name], environment=environment)


def _is_there(name: str) -> bool:
    try:
        return name not in PACKAGES or bool(version(PACKAGES[name]))
    except PackageNotFoundError:
        return False


# ---- in the child


def measure(name: str, parameters: Path, limit: int) -> Iterator[Record]:
    """One contestant under the limit; what it did until it was done, or failed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    job = Job(build=build, rows=rows_of(WORDS), num_bytes=_held() + int((1 - SPARE) * limit), tally=Tally())
    if name == REFERENCE:
        yield _reference(job, parameters)
        return
    _warm_up(name)
    wanted = torch.load(parameters)
    _enforce(limit)
    job = Job(build=job.build, rows=job.rows, num_bytes=job.num_bytes, tally=Tally())
    error = ""
    try:
        CONTESTANTS[name](job)
    except Exception as failure:  # what a user would see
        error = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:90]}"
    seconds, tally = job.tally.seconds, job.tally
    _enforce(resource.RLIM_INFINITY)
    yield {
        "model": name,
        "device": "cpu",
        "limit": limit,
        "failed": error,
        "first_s": tally.first_s,
        "seconds": seconds,
        "lost": tally.lost,
        "rows": tally.rows,
        "made": tally.made,
        "deviation": _deviation(tally.model, wanted),
    }


@cache
def _initial() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return _shape().state_dict()


def _shape() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS,
        n_embd=256,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def build() -> nn.Module:
    """A small GPT-2 without dropout, always the same."""
    model = _shape()
    model.load_state_dict(_initial())
    return model


def _held() -> int:
    return sum(p.untyped_storage().nbytes() for p in set(build().parameters()))


def _reference(job: Job, path: Path) -> Record:
    """The wanted updates without a limit, and the peak of the first one beyond the parameters."""
    surviving(job)
    torch.save(job.tally.model.state_dict(), path)
    model = build()
    batch = collate(job.rows[:ROWS])
    with Meter(model, batch_leaves=list(batch.values())) as meter:
        model(**batch).loss.backward()
    return {
        "model": REFERENCE,
        "device": "cpu",
        "peak": meter.peak - _held(),
        "seconds": job.tally.seconds,
        "first_s": job.tally.first_s,
        "lost": 0,
        "rows": job.tally.rows,
        "made": job.tally.made,
        "failed": "",
        "deviation": 0.0,
        "limit": 0,
    }


def _warm_up(name: str) -> None:
    """Libraries load what they load at their first use: that is nobody's memory of a step."""
    model = build()
    model(**collate([torch.zeros(4, dtype=torch.long)])).loss.backward()
    with FakeTensorMode():
        torch.ones(1).add(1)
    if name in PACKAGES:
        __import__("lightning.pytorch" if name == "lightning" else name)
    short = [torch.zeros(4, dtype=torch.long)] * (ROWS * 2)
    try:
        CONTESTANTS[name](Job(build=build, rows=short, num_bytes=2**33, tally=Tally()))
    except Exception as failure:
        print(f"{name}: {failure!r} in the warm-up", flush=True)


def _enforce(limit: int) -> None:
    """So many bytes of data beyond what this process has now; its heap and all its tensors are data."""
    if limit != resource.RLIM_INFINITY:
        status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        now = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
        limit += now
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _deviation(model: nn.Module, wanted: dict[str, Any]) -> float:
    """How far the parameters are from where they should be, relative to how far they should have come."""
    initial, got = _initial(), model.state_dict()
    if not got:
        return float("nan")
    away = sum(float((got[name] - wanted[name]).double().square().sum()) for name in wanted)
    moved = sum(float((initial[name] - wanted[name]).double().square().sum()) for name in wanted)
    return (away / moved) ** 0.5


# ---- judgement and report


def judge(records: Sequence[Record]) -> Iterator[Verdict]:
    """anybatch makes every update, of all its rows, and loses none. What peers do is only shown."""
    by_name = {record["model"]: record for record in records}
    for name in (REFERENCE, *OURS):
        record = by_name.get(name, {"error": "not measured"})
        if "error" in record or record["failed"]:
            yield Verdict(what=f"{name}: {record.get('error') or record['failed']}", measured=1, limit=0)
            continue
        yield Verdict(what=f"{name}: updates lost", measured=record["lost"], limit=0)
        yield Verdict(what=f"{name}: updates missing", measured=UPDATES - len(record["made"]), limit=0)
        deviation = record["deviation"]
        yield Verdict(
            what=f"{name}: parameters away from the wanted ones", measured=deviation, limit=DEVIATION
        )


def sections(records: Sequence[Record]) -> Iterator[str]:
    """A line for each contestant."""
    header = (
        "",
        "first update",
        "all",
        "updates",
        "lost",
        "rows of an update",
        "rows in vain",
        "away by",
        "end",
    )
    rows = [_row(record) for record in records if "error" not in record]
    limit = max(record.get("limit", 0) for record in records)
    yield from ("", "## Training under an enforced limit", "", *table(header, rows))
    yield from (
        "",
        f"Wanted: {UPDATES} updates of {ROWS} rows; those of one update are twice as long as the others.",
        f"Limit: {limit:,} bytes beyond what a process holds after set-up (RLIMIT_DATA).",
        "Lost: updates that were made and thrown away. Rows in vain: through the model beyond those of",
        "updates that were kept. Away by: of the parameters from the wanted ones, over the way to them.",
    )


def _row(record: Record) -> tuple[str, ...]:
    made = record["made"]
    sizes = ", ".join(str(size) for size in dict.fromkeys(made)) or "none"
    vain = record["rows"] - sum(made)
    first = f"{record['first_s']:.1f} s" if made else "never"
    return (
        *(record["model"], first, f"{record['seconds']:.1f} s", str(len(made)), str(record["lost"])),
        *(sizes, str(vain), f"{record['deviation']:.1e}", record["failed"] or "done"),
    )


STUDY = Study(
    kind="memory-peers",
    title="Automatic micro-batches under a limit of memory",
    judge=judge,
    sections=sections,
    packages=("transformers", *PACKAGES.values()),
)

if __name__ == "__main__":
    sys.exit(main())
