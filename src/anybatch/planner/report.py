"""What planning answers: the plan, its bytes and seconds, the next best ones; or why nothing fits."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from anybatch.batchnorm import BatchNorm
from anybatch.core import (
    Batch,
    BudgetError,
    PlanError,
    counted,
    format_bytes,
    format_seconds,
    html_table,
    ran_out_of_memory,
)
from anybatch.engine import Plan, Task
from anybatch.memory import Ledger
from anybatch.planner.trace import trace
from anybatch.precision import Precision
from anybatch.recompute import find_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One plan, and what it costs."""

    plan: Plan  # what would be carried out
    peak: int  # the most bytes alive at any moment
    seconds: float  # of one update
    source: str  # where the bytes are from: "composed" of other steps, or "predicted"
    ledger: Ledger | None = None  # where the bytes go, if this very plan was looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The fastest plan within the budget.

    Attributes:
        plan: what will be carried out.
        ledger: its bytes by owner and moment, as predicted for this very plan.
        seconds: of one update, estimated from the device's figures.
        budget: in bytes; None where none was given.
        device: what was planned for.
        options: the next best plans, fastest first.
        notes: what the reader should know.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anybatch import plan
        >>> model = nn.Linear(8, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batch = torch.zeros(64, 8), torch.zeros(64, 2)
        >>> report = plan(model, nn.MSELoss(), optimizer, batch, memory="8KiB")
        >>> report.ledger.peak <= 8192
        True
    """

    plan: Plan
    ledger: Ledger
    seconds: float
    budget: int | None
    device: str
    options: tuple[Option, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        budget = "" if self.budget is None else f" of {format_bytes(self.budget)}"
        return (
            f"PlanReport(rows {self.plan.rows}, micro_batch {self.plan.micro_batch}, peak "
            f"{format_bytes(self.peak)}{budget}, {self.device}, {self.seconds:.3g} s)"
        )

    @property
    def peak(self) -> int:
        """The most bytes alive at any moment of a step."""
        return self.ledger.peak

    def to_json(self) -> str:
        """The report as one JSON object; `Plan.from_json` and `Ledger.from_json` read its parts."""
        names = ("peak", "seconds", "budget", "device")
        values: dict[str, Any] = {
            "plan": json.loads(self.plan.to_json()),
            **{name: getattr(self, name) for name in names},
            "ledger": json.loads(self.ledger.to_json()),
            "options": [
                {"plan": json.loads(one.plan.to_json()), "peak": one.peak, "seconds": one.seconds}
                for one in self.options
            ],
            "notes": self.notes,
        }
        return json.dumps(values)

    def __str__(self) -> str:
        return "\n\n".join("\n".join(map(_line, section)) for section in self._sections())

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        return html_table([row for section in self._sections() for row in section])

    def _sections(self) -> list[list[tuple[str, str]]]:
        """What text and table show: names, and what is to be said of each."""
        budget = "" if self.budget is None else f" of {format_bytes(self.budget)}"
        peak = f"{format_bytes(self.peak)}{budget} on {self.device}, {self.ledger.source}"
        lines = [line.partition(" ") for line in str(self.plan).splitlines()]
        sections = [
            [(name, text.strip()) for name, _, text in lines],
            [("peak", peak), ("one update", f"{format_seconds(self.seconds)}, estimated")],
            [("", str(self.ledger))],
            _blocks(self.plan),
            [("next best", "\n".join(_table(self.options)))] if self.options else [],
            [("note", note) for note in self.notes],
        ]
        return [section for section in sections if section]


def _line(row: tuple[str, str]) -> str:
    name, text = row
    if name in ("note", "next best"):
        return f"note: {text}" if name == "note" else f"{name}\n{text}"
    return f"{name:12} {text}" if name else text


def _blocks(plan: Plan) -> list[tuple[str, str]]:
    by_policy: dict[str, list[str]] = {}
    for name, policy in plan.blocks:
        by_policy.setdefault(policy, []).append(name)
    return [(policy, ", ".join(names)) for policy, names in by_policy.items()]


def _table(options: Sequence[Option]) -> list[str]:
    lines = [f"{'rows at a time':>16}  {'peak':>10}  {'one update':>12}  blocks"]
    for option in options:
        blocks = str(option.plan).split("blocks")[1].splitlines()[0].strip()
        took = format_seconds(option.seconds)
        lines.append(f"{option.plan.micro_batch:>16}  {format_bytes(option.peak):>10}  {took:>12}  {blocks}")
    return lines


_LITTLE = 0.01  # of the peak: what frees less is not worth a choice that changes the result
_LONGEST = 300  # characters of the message


def refusal(least: Option, budget: int, batch_norms: Sequence[BatchNorm], cut_refused: str) -> BudgetError:
    """The error that says why nothing fits, and names as many of the largest holders as there is room for."""
    near = "" if least.source == "predicted" else "about "
    told = (
        f"Expected a plan within {format_bytes(budget)}, got none. The smallest budget for "
        f"{counted(least.plan.rows, 'row')} is {near}{format_bytes(least.peak)} ({least.peak} bytes), "
        f"{counted(least.plan.micro_batch, 'row')} at a time."
    )
    ways = " ".join(_ways_out(least.ledger, batch_norms, cut_refused, least.plan.precision))
    ways = ways or "Allow that much, or use a smaller model or smaller rows."
    held = [
        f"{format_bytes(one.bytes)} {one.owner} of {repr(one.module) if one.module else 'the model'}"
        for one in (least.ledger.by_module[:4] if least.ledger else ())
    ]
    while held and len(f"{told} Largest: {', '.join(held)}. {ways}") > _LONGEST:
        held.pop()
    told = f"{told} Largest: {', '.join(held)}." if held else told
    return BudgetError(f"{told} {ways}", smallest=least.peak, ledger=least.ledger)


def _ways_out(
    ledger: Ledger | None, batch_norms: Sequence[BatchNorm], cut_refused: str, precision: Precision
) -> list[str]:
    """What would free bytes but changes the result, and so is the caller's to choose."""
    held, little = (ledger.at_peak, _LITTLE * ledger.peak) if ledger else ({}, 0.0)
    ways: list[str] = []
    if cut_refused:
        ways.append(f"The batch may not be cut: {cut_refused.rstrip('.')}.")
    if batch_norms and cut_refused:
        return [*ways, "To allow it, pass batch_norm=... or call ab.batch_norm_to_group_norm(model)."]
    state = held.get("optimizer state", 0) * 3 / 4
    if state > little:
        ways.append(f"8-bit optimizer states free about {format_bytes(state)}.")
    half = held.get("activations", 0) / 2
    if half > little and not precision.is_short:
        ways.append(f'precision="bf16-mixed" frees up to {format_bytes(half)}.')
    return ways


def single_rows(task: Task, batch: Batch, settings: Plan) -> Ledger | None:
    """Where the bytes of a step of single rows go, every block rebuilt; None where nobody knows."""
    every = tuple((name, "recompute") for name in find_blocks(task.model))
    plan = replace(settings, rows=batch.rows, micro_batch=1, cut=(), blocks=settings.blocks or every)
    try:
        return trace(plan, task, batch).ledger
    except Exception as error:
        # It is asked for where memory is short, so it may run out here, too.
        if isinstance(error, PlanError) or ran_out_of_memory(error):
            return None
        raise
