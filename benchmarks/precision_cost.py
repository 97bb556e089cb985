"""What looking at each micro-batch and scaling the loss cost: interleaved steps of a small GPT."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import anybatch as ab
from benchmarks.config import Effort
from benchmarks.contestants import Entry, Update
from benchmarks.memory_report import Record
from benchmarks.precision_config import LIMITS, Part, Settings
from benchmarks.race import BATCHES, Runner, make_entry, quiet_collector, run_block
from benchmarks.ratios import Ratio, paired_ratio
from benchmarks.report import table
from benchmarks.tasks import TASKS, make_batch
from benchmarks.thresholds import Verdict

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """Options of a step, and those of the step that it is held against.

    A judged one leaves the model as it is, so that both can train the same.
    """

    measured: Options
    reference: Options = field(default_factory=dict[str, Any])
    is_judged: bool = True


DUELS = {
    "float32, loss_scale=1024 over float32": Duel(measured={"precision": ab.Precision(loss_scale=1024.0)}),
    'float32, loss_scale="dynamic" over float32': Duel(
        measured={"precision": ab.Precision(loss_scale="dynamic")}
    ),
    "bf16-mixed, loss_scale=1024 over bf16-mixed": Duel(
        measured={"precision": ab.Precision(compute="bfloat16", loss_scale=1024.0)},
        reference={"precision": "bf16-mixed"},
    ),
    'non_finite="drop" over "raise"': Duel(measured={"options": ab.Options(non_finite="drop")}),
    'non_finite="skip" over "raise"': Duel(measured={"options": ab.Options(non_finite="skip")}),
    "float32 over itself": Duel(measured={}, is_judged=False),
    "bf16-mixed over float32": Duel(measured={"precision": "bf16-mixed"}, is_judged=False),
    "bf16-true over float32": Duel(measured={"precision": "bf16-true"}, is_judged=False),
}


def measure(settings: Settings, duels: Mapping[str, Duel] = DUELS) -> Iterator[Record]:
    """Blocks of all duels in turn, so that a slow hour meets everybody."""
    torch.set_num_threads(1)
    rows, seed = settings.race.rows * settings.race.micro_batches, settings.seed
    task = TASKS[settings.race.task]
    batches = [make_batch(task, rows, seed=seed + i, ragged=settings.race.ragged) for i in range(BATCHES)]
    pairs = {name: _runners(duel, settings) for name, duel in duels.items()}
    efforts = {name: settings.effort if duel.is_judged else settings.spare for name, duel in duels.items()}
    order = random.Random(seed)
    running = list(duels)
    with quiet_collector():
        for name in running:
            for runner in pairs[name]:
                runner.segment(batches, efforts[name].warm_up)
        deadline = time.perf_counter() + settings.effort.seconds
        while running:
            for name in running:
                entrants = list(pairs[name])
                order.shuffle(entrants)
                run_block(len(entrants[0].blocks), entrants, batches, 1)
            late = time.perf_counter() > deadline
            running = [name for name in running if not _is_over(pairs[name], efforts[name], late=late)]
    for name, (measured, reference) in pairs.items():
        found = {
            "duel": name,
            "judged": duels[name].is_judged,
            "wall": [measured.wall, reference.wall],
            "cpu": [measured.cpu, reference.cpu],
            "updates": 2 * len(measured.wall),
        }
        print(f"{name}: {_ratio(found, 'wall').median:.4f} ({len(measured.wall)} pairs)", flush=True)
        yield found


def _runners(duel: Duel, settings: Settings) -> tuple[Runner, Runner]:
    """Two that train one model in turn: where tensors lie in memory is worth 1 %, and favours nobody then.

    Not where one of them stores it short.
    """
    first = make_entry(settings.race, seed=settings.seed)
    second = first if duel.is_judged else make_entry(settings.race, seed=settings.seed)
    return Runner(first, stepping(duel.measured)), Runner(second, stepping(duel.reference))


def stepping(options: Options) -> Callable[[Entry], Update]:
    """A contestant that makes steps with these options."""

    def build(entry: Entry) -> Update:
        step = ab.Step(entry.model, entry.task.loss, entry.optimizer, micro_batch=entry.rows, **options)

        def update(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
            report = step(batch)
            assert report.updated and not (report.redone or report.dropped)  # noqa: PT018
            return report.loss

        return update

    return build


def _is_over(pair: tuple[Runner, Runner], effort: Effort, *, late: bool) -> bool:
    count = len(pair[0].blocks)
    if count < effort.least_blocks:
        return False
    settled = paired_ratio(pair[0].wall, pair[1].wall).width <= effort.interval
    return late or settled or count >= effort.most_blocks


# ---- judgement and report


def judge(records: Sequence[Record]) -> Iterator[Verdict]:
    """By wall time: that is what a user waits for."""
    for record in records:
        if record["judged"]:
            yield Verdict(
                what=f"cost: {record['duel']}", measured=_ratio(record, "wall").median, limit=LIMITS["cost"]
            )


def sections(records: Sequence[Record]) -> Iterator[str]:
    """A line for each duel."""
    header = ("step of the small GPT", "ms", "wall", "95 %", "CPU", "95 %", "pairs", "at most")
    lines = [
        (
            record["duel"],
            f"{1e3 * sum(record['wall'][0]) / record['updates']:.0f}",
            *(cell for clock in ("wall", "cpu") for cell in _cells(_ratio(record, clock))),
            str(_ratio(record, "wall").pairs),
            f"{LIMITS['cost']:g}" if record["judged"] else "",
        )
        for record in records
    ]
    yield from (
        "",
        "## What looking and scaling cost, and what short dtypes gain",
        "",
        *table(header, lines),
        "",
        "Medians of paired ratios, measured in turn in one process, with the 95 % interval of the median.",
        "Where there is a limit both train one model in turn; elsewhere each has its own, and a step over",
        "itself shows how far such a ratio can be trusted.",
    )


def _ratio(record: Record, clock: str) -> Ratio:
    return paired_ratio(*record[clock])


def _cells(ratio: Ratio) -> tuple[str, str]:
    return f"{ratio.median:.3f}", f"{ratio.low:.3f}..{ratio.high:.3f}" if ratio.pairs > 5 else ""


PART = Part(measure=measure, judge=judge, sections=sections)
