"""One overflow in a window of eight micro-batches: what anybatch and what torch's scaler lose by it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import anybatch as ab
from anybatch.precision.loss_scale import FIRST_SCALE
from anybatch.testing import relative_error, tolerance
from benchmarks.memory_report import Record
from benchmarks.precision_config import Part, Settings
from benchmarks.report import table
from benchmarks.thresholds import Verdict

ROWS, MICRO_BATCHES, PLACE = 8, 8, 2  # rows of a micro-batch, how many, and which of them overflows
LARGEST = torch.finfo(torch.float16).max
EXCESS = (
    1.25  # how far the planted gradient is above what float16 holds: between 1 and 2, so one halving does
)
OURS, SCALER, AGAIN = "anybatch", "torch.amp.GradScaler", "torch.amp.GradScaler, batch again"

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What became of one batch.

    Attributes:
        moved: the way of all weights.
        computed: micro-batches that went through the model.
        updates: how many were made.
        redone: micro-batches that came again.
        scale: the loss scale afterwards.
    """

    moved: Tensor
    computed: int
    updates: int
    redone: int
    scale: float


def measure(settings: Settings) -> Iterator[Record]:
    """Each contestant on the same batch, beside the update that no overflow has disturbed."""
    batch = planted(settings.seed)
    calm = by_anybatch(batch, settings.seed, ab.Precision(compute="float16", loss_scale=FIRST_SCALE / 2))
    full = by_anybatch(batch, settings.seed, ab.Precision())
    ways: dict[str, Callable[[Batch, int], Outcome]] = {
        OURS: by_anybatch,
        SCALER: by_scaler,
        AGAIN: lambda batch, seed: by_scaler(batch, seed, tries=2),
    }
    for name, way in ways.items():
        found = way(batch, settings.seed)
        yield {
            "way": name,
            "computed": found.computed,
            "updates": found.updates,
            "redone": found.redone,
            "scale": found.scale,
            "distance": relative_error(found.moved, calm.moved),
            "from_float32": relative_error(found.moved, full.moved),
            "calm_redone": calm.redone,
            "limit": tolerance(torch.float16, MICRO_BATCHES),
        }


def planted(seed: int) -> Batch:
    """Rows of a regression; one target is so far off that its gradient overflows at the first scale."""
    generator = torch.Generator().manual_seed(seed)
    count = ROWS * MICRO_BATCHES
    inputs = torch.randn(count, 16, generator=generator)
    targets = 1 + 0.1 * torch.randn(count, 1, generator=generator)
    # d loss / d output of that row = 2 (output - target) / count, times the scale.
    targets[PLACE * ROWS + ROWS // 2] = EXCESS * LARGEST / FIRST_SCALE * count / 2
    return inputs, targets


def make_model(seed: int) -> tuple[nn.Module, list[int]]:
    """A small network, and the list to which each of its forwards adds its rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    forwards: list[int] = []
    model.register_forward_pre_hook(lambda module, args: forwards.append(len(args[0])))
    return model, forwards


def by_anybatch(batch: Batch, seed: int, precision: str | ab.Precision = "fp16-mixed") -> Outcome:
    """One step."""
    model, forwards = make_model(seed)
    before = _weights(model)
    step = ab.Step(
        model, nn.MSELoss(), SGD(model.parameters(), lr=0.1), micro_batch=ROWS, precision=precision
    )
    report = step(batch)
    return Outcome(
        moved=_weights(model) - before,
        computed=len(forwards),
        updates=int(report.updated),
        redone=report.redone,
        scale=report.scale,
    )


def by_scaler(batch: Batch, seed: int, *, tries: int = 1) -> Outcome:
    """The loop of torch's documentation: accumulate scaled gradients, then `step` and `update` of the scaler.

    Args:
        batch: the rows.
        seed: of the weights.
        tries: how often it is given the batch, until it makes an update.
    """
    model, forwards = make_model(seed)
    before = _weights(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE)
    made: list[int] = []
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: made.append(1))
    for _ in range(tries):
        for x, y in zip(batch[0].split(ROWS), batch[1].split(ROWS), strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(model(x), y) / MICRO_BATCHES
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if made:
            break
    return Outcome(
        moved=_weights(model) - before,
        computed=len(forwards),
        updates=len(made),
        redone=0,
        scale=scaler.get_scale(),
    )


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


# ---- judgement and report


def judge(records: Sequence[Record]) -> Iterator[Verdict]:
    """One micro-batch is redone, no window is lost, and the update is the one without overflow."""
    found = {record["way"]: record for record in records}
    ours, scaler = found[OURS], found[SCALER]
    for what, measured, limit in (
        ("overflow: redone without it", ours["calm_redone"], 0),
        ("overflow: redone besides one", abs(ours["redone"] - 1), 0),
        ("overflow: computed besides nine", abs(ours["computed"] - MICRO_BATCHES - 1), 0),
        ("overflow: windows lost", 1 - ours["updates"], 0),
        ("overflow: distance from the update without it", ours["distance"], ours["limit"]),
        ("overflow: updates of torch's scaler", scaler["updates"], 0),  # else nothing was planted
    ):
        yield Verdict(what=what, measured=measured, limit=limit)


def sections(records: Sequence[Record]) -> Iterator[str]:
    """A line for each contestant."""
    header = ("", "micro-batches computed", "updates made", "scale after", "from no overflow", "from float32")
    rows = [
        (
            *(r["way"], str(r["computed"]), str(r["updates"]), f"{r['scale']:,.0f}"),
            *(f"{r['distance']:.1e}", f"{r['from_float32']:.1e}"),
        )
        for r in records
    ]
    yield from (
        "",
        f"## An overflow in micro-batch {PLACE + 1} of {MICRO_BATCHES}, fp16-mixed",
        "",
        *table(header, rows),
        "",
        f"One batch of {ROWS * MICRO_BATCHES} rows. The last columns are relative distances of the update:",
        f"from that at a loss scale of {FIRST_SCALE / 2:,.0f} all along, where nothing overflows, and from",
        "that in float32.",
    )


PART = Part(measure=measure, judge=judge, sections=sections)
