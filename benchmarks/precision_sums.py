"""A thousand small gradients and a thousand small updates: what of them arrives in which dtype."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import SGD

import anybatch as ab
from anybatch.testing import GradientRecorder, relative_error
from benchmarks.memory_report import Record
from benchmarks.precision_config import LIMITS, Part, Settings
from benchmarks.report import table
from benchmarks.thresholds import Verdict

WIDTH = 64
MICRO_BATCHES = 1_024
SMALL = 1e-3  # what each micro-batch adds to a gradient, about
UPDATES, SIZE = 1_000, 1e-4  # of weights near 1
BF16, FLOAT32 = "against float32", "against float64"

# ---- sums


def measure_sums(settings: Settings) -> Iterator[Record]:
    """Relative errors of the gradient after all micro-batches."""
    generator = torch.Generator().manual_seed(settings.seed)
    rows = MICRO_BATCHES * SMALL * (1 + 0.1 * torch.randn(MICRO_BATCHES, WIDTH, generator=generator))
    single, double = (by_hand(rows, dtype) for dtype in (torch.float32, torch.float64))
    for what, against, wanted, gradient in (
        ("plain .grad, bfloat16 weights", BF16, single, by_hand(rows, torch.bfloat16)),
        ("anybatch, bf16-true", BF16, single, by_anybatch(rows, "bf16-true")),
        ("plain .grad, float32 weights", FLOAT32, double, single),
        ("anybatch, float32", FLOAT32, double, by_anybatch(rows, "float32")),
        ("anybatch, float64 sums", FLOAT32, double, by_anybatch(rows, "float32", torch.float64)),
    ):
        yield {"what": what, "against": against, "off": relative_error(gradient, wanted)}


def by_hand(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient that the plain loop finds in `.grad`, all in one dtype."""
    model, inputs = nn.Linear(WIDTH, 1, bias=False).to(dtype), rows.to(dtype)
    for row in inputs.split(1):
        (model(row).sum() / MICRO_BATCHES).backward()
    assert model.weight.grad is not None
    return model.weight.grad


def by_anybatch(rows: Tensor, precision: str, accumulate: torch.dtype | None = None) -> Tensor:
    """The gradient that the optimizer is given."""
    model = nn.Linear(WIDTH, 1, bias=False)
    recorder = GradientRecorder(model)
    ab.Step(
        model,
        output,
        recorder,
        micro_batch=1,
        precision=precision,
        options=ab.Options(accumulate=accumulate),
    )(rows)
    return recorder.gradients["weight"]


def output(model: nn.Module, rows: Tensor) -> ab.Total:
    """The mean output: its gradient is the mean of the rows."""
    return ab.Total(model(rows).sum(), len(rows))


def judge_sums(records: Sequence[Record]) -> Iterator[Verdict]:
    """What float32 sums of short gradients lose, and what float64 ones do."""
    off = {record["what"]: record["off"] for record in records}
    wide = off["anybatch, float64 sums"]
    yield Verdict(
        what=f"sums: bf16-true {BF16}", measured=off["anybatch, bf16-true"], limit=LIMITS["bf16 sums"]
    )
    yield Verdict(what=f"sums: float64 {FLOAT32}", measured=wide, limit=LIMITS["float64 sums"])
    yield Verdict(
        what="sums: float64 over plain float32",
        measured=wide / off["plain .grad, float32 weights"],
        limit=1.0,
    )


def sections_sums(records: Sequence[Record]) -> Iterator[str]:
    """A line for each way to add."""
    lines = [(r["what"], r["against"].removeprefix("against "), f"{r['off']:.1e}") for r in records]
    yield from (
        "",
        f"## {MICRO_BATCHES:,} micro-batches that each add about {SMALL:g} to a gradient",
        "",
        *table(("sum", "against", "relative error"), lines),
    )


# ---- master weights


def measure_masters(settings: Settings) -> Iterator[Record]:
    """How far weights near 1 come in float16, of the way that they are sent."""
    start = torch.linspace(0.9, 1.1, WIDTH).half().float()
    model, step = stepped(start, "fp16-true")
    (backup,) = step.masters.tensors
    yield {"what": "float32 weights behind", **_arrived(backup, start)}
    yield {"what": "float16 weights rounded from them", **_arrived(model.weight, start)}
    yield {"what": "float16 weights without backup", **_arrived(without_backup(start), start)}


def stepped(start: Tensor, precision: str) -> tuple[nn.Linear, ab.Step]:
    """All updates by anybatch."""
    model = _linear(start)
    step = ab.Step(model, output, SGD(model.parameters(), lr=SIZE), precision=precision)
    for _ in range(UPDATES):
        step(-torch.ones(1, WIDTH))
    return model, step


def without_backup(start: Tensor) -> Tensor:
    """All updates by the plain loop on float16 weights."""
    model = _linear(start).half()
    optimizer = SGD(model.parameters(), lr=SIZE)
    for _ in range(UPDATES):
        model(-torch.ones(1, WIDTH, dtype=torch.float16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.weight


def _linear(start: Tensor) -> nn.Linear:
    model = nn.Linear(WIDTH, 1, bias=False)
    model.weight.data = start.clone().unsqueeze(0)
    return model


def _arrived(weights: Tensor, start: Tensor) -> Record:
    way = (weights.detach().double().flatten() - start) / (UPDATES * SIZE)
    return {"arrived": way.mean().item(), "off": (way - 1).abs().max().item()}


def judge_masters(records: Sequence[Record]) -> Iterator[Verdict]:
    """All of it arrives; the short weights show it up to one rounding; without backup nothing does."""
    found = {record["what"]: record for record in records}
    rounding = torch.finfo(torch.float16).eps / 2 * 1.2  # of the largest weight, which ends at 1.2
    for what, measured, limit in (
        ("masters: off the way", found["float32 weights behind"]["off"], LIMITS["masters"]),
        (
            "masters: float16 weights off the way",
            found["float16 weights rounded from them"]["off"],
            LIMITS["masters"] + rounding / (UPDATES * SIZE),
        ),
        (
            "masters: share that arrives without",
            abs(found["float16 weights without backup"]["arrived"]),
            0.01,
        ),
    ):
        yield Verdict(what=what, measured=measured, limit=limit)


def sections_masters(records: Sequence[Record]) -> Iterator[str]:
    """A line for each kind of weights."""
    lines = [(r["what"], f"{r['arrived']:.2%}", f"{r['off']:.2%}") for r in records]
    yield from (
        "",
        f"## {UPDATES:,} updates of {SIZE:g} on weights near 1, fp16-true",
        "",
        *table(("", "arrived, mean", "off, worst weight"), lines),
    )


SUMS = Part(measure=measure_sums, judge=judge_sums, sections=sections_sums)
MASTERS = Part(measure=measure_masters, judge=judge_masters, sections=sections_masters)
