"""The result of planning: a plan, its bytes and seconds and the next best ones; or an error."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anybatch.batchnorm import BatchNorm
from anybatch.core import BudgetError, counted, format_bytes, format_seconds, html_table
from anybatch.engine import Plan
from anybatch.memory import Ledger
from anybatch.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One plan and its costs."""

    plan: Plan
    peak: int  # the most bytes alive at any moment
    seconds: float  # seconds of one update


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The plan of a step within the budget.

    Attributes:
        plan: the plan of the step.
        ledger: bytes by owner and moment, predicted for this plan.
        seconds: seconds of one update, estimated from the device's figures.
        budget: the budget in bytes; None if none was given.
        device: the device that was planned for.
        options: the next best plans, fastest first.
        notes: remarks for the reader.

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
        """Return the report as one JSON object; `Plan.from_json` reads its plans."""
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
        return html_table([row for section in self._sections() for row in section])

    def _sections(self) -> list[list[tuple[str, str]]]:
        budget = "" if self.budget is None else f" of {format_bytes(self.budget)}"
        peak = f"{format_bytes(self.peak)}{budget} on {self.device}, {self.ledger.source}"
        lines = [line.partition(" ") for line in str(self.plan).splitlines()]
        rows = [(name, text.strip()) for name, _, text in lines]
        chosen = [row for row in rows if row[0] in _CHOSEN and row[1] != "as set"]
        sections = [
            [("peak", peak), ("one update", f"{format_seconds(self.seconds)}, estimated"), *chosen],
            [("", str(self.ledger))],
            _blocks(self.plan),
            [("next best", "\n".join(_table(self.options)))] if self.options else [],
            [("note", note) for note in self.notes],
            [row for row in rows if row not in chosen],  # as they were given
        ]
        return [section for section in sections if section]


_CHOSEN = ("rows", "micro_batch", "blocks", "foreach")  # settings that a plan decides


def _line(row: tuple[str, str]) -> str:
    name, text = row
    if name in ("note", "next best"):
        return f"note: {text}" if name == "note" else f"{name}\n{text}"
    return f"{name:12} {text}" if name else text


def _blocks(plan: Plan) -> list[tuple[str, str]]:
    by_policy: dict[str, list[str]] = {}
    for name, policy in plan.blocks:
        by_policy.setdefault(policy, []).append(name or "all that is saved for backward")
    return [(policy, ", ".join(names)) for policy, names in by_policy.items()]


def _table(options: Sequence[Option]) -> list[str]:
    lines = [f"{'rows at a time':>16}  {'peak':>10}  {'one update':>12}  blocks"]
    for option in options:
        blocks = str(option.plan).split("blocks")[1].splitlines()[0].strip()
        took = format_seconds(option.seconds)
        lines.append(f"{option.plan.micro_batch:>16}  {format_bytes(option.peak):>10}  {took:>12}  {blocks}")
    return lines


_LITTLE = 0.01  # share of the peak; advice that frees less is left out
_LONGEST = 300  # characters of the message


def below_floor(floor: int, budget: int) -> BudgetError:
    """Return the error for a budget below what any plan takes."""
    return BudgetError(
        "Expected a budget above parameters, gradients and optimizer state, got "
        f"{format_bytes(budget)}; they take {format_bytes(floor)} ({floor} bytes) without a single row. Plan "
        "with more to learn the smallest budget, or use a smaller model.",
        smallest=floor,
    )


def refusal(
    least: Plan, ledger: Ledger, budget: int, batch_norms: Sequence[BatchNorm], cut_refused: str
) -> BudgetError:
    """Return the error that nothing fits; it names as many of the largest holders as there is room for."""
    told = (
        f"Expected a plan within {format_bytes(budget)}, got none. The smallest budget for "
        f"{counted(least.rows, 'row')} is {format_bytes(ledger.peak)} ({ledger.peak} bytes), "
        f"{counted(least.micro_batch, 'row')} at a time"
    )
    ways = " ".join(_ways_out(ledger, batch_norms, cut_refused, least.precision))
    ways = ways or "Allow that much, or use a smaller model or smaller rows."
    held = [
        f"{format_bytes(one.bytes)} {one.owner} of {repr(one.module) if one.module else 'the model'}"
        for one in ledger.by_module[:4]
    ]
    while held and len(f"{told}; largest: {', '.join(held)}. {ways}") > _LONGEST:
        held.pop()
    told = f"{told}; largest: {', '.join(held)}" if held else told
    return BudgetError(f"{told}. {ways}", smallest=ledger.peak)


def _ways_out(
    ledger: Ledger, batch_norms: Sequence[BatchNorm], cut_refused: str, precision: Precision
) -> list[str]:
    """Return changes that free bytes but change the result, so that they are the caller's choice."""
    held, little = ledger.at_peak, _LITTLE * ledger.peak
    ways: list[str] = []
    frees: list[str] = []
    if cut_refused:
        ways.append(f"The batch may not be cut: {cut_refused.rstrip('.')}.")
    if batch_norms and cut_refused:
        return [*ways, "To allow it, say Options(batch_norm=...) or call ab.batch_norm_to_group_norm(model)."]
    state = held.get("optimizer state", 0) * 3 / 4
    if state > little:
        frees.append(f"8-bit optimizer states free about {format_bytes(state)}")
    half = held.get("activations", 0) / 2
    if half > little and not precision.is_short:
        frees.append(f'precision="bf16-mixed" frees up to {format_bytes(half)}')
    return [*ways, f"{'; '.join(frees)}."] if frees else ways
