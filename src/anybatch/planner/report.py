"""What planning answers: the plan, its bytes and seconds, the next best ones, and what else would help."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anybatch.core import format_bytes, format_seconds
from anybatch.engine import Plan
from anybatch.memory import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One plan, and what it costs.

    Attributes:
        plan: what would be carried out.
        peak: the most bytes alive at any moment.
        seconds: of one update.
        source: where the bytes are from: "composed" of other steps, "predicted" or "measured".
        measured: whether the seconds were measured.
        ledger: where the bytes go, if this very plan was looked at.
    """

    plan: Plan
    peak: int
    seconds: float
    source: str
    measured: bool = False
    ledger: Ledger | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The fastest plan within the budget.

    Attributes:
        plan: what will be carried out.
        ledger: its bytes by owner and moment, as predicted for this very plan.
        seconds: of one update, measured or estimated.
        measured: which of the two.
        budget: in bytes; None where none was given.
        device: what was planned for.
        options: the next best plans, fastest first.
        rivals: plans that fit and may well be as fast, to be raced in real steps; the chosen one first.
        notes: what the reader should know.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anybatch import plan
        >>> model = nn.Linear(8, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batch = torch.zeros(64, 8), torch.zeros(64, 2)
        >>> report = plan(model, nn.MSELoss(), optimizer, batch, memory="8KiB", measure=False)
        >>> report.ledger.peak <= 8192
        True
    """

    plan: Plan
    ledger: Ledger
    seconds: float
    measured: bool
    budget: int | None
    device: str
    options: tuple[Option, ...] = ()
    rivals: tuple[Plan, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """The most bytes alive at any moment of a step."""
        return self.ledger.peak

    def to_json(self) -> str:
        """The report as one JSON object; `Plan.from_json` and `Ledger.from_json` read its parts."""
        return json.dumps(
            {
                "plan": json.loads(self.plan.to_json()),
                "peak": self.peak,
                "seconds": self.seconds,
                "measured": self.measured,
                "budget": self.budget,
                "device": self.device,
                "ledger": json.loads(self.ledger.to_json()),
                "options": [_as_dict(option) for option in self.options],
                "notes": list(self.notes),
            }
        )

    def __str__(self) -> str:
        how = "measured" if self.measured else "estimated"
        budget = "" if self.budget is None else f" of {format_bytes(self.budget)}"
        parts = [
            str(self.plan),
            "",
            f"peak         {format_bytes(self.peak)}{budget} on {self.device}, {self.ledger.source}",
            f"one update   {format_seconds(self.seconds)}, {how}",
            "",
            str(self.ledger),
        ]
        if self.plan.blocks:
            parts += ["", *_blocks(self.plan)]
        if self.options:
            parts += ["", "next best", *_table(self.options)]
        parts += [f"note: {note}" for note in self.notes]
        return "\n".join(parts)


def _as_dict(option: Option) -> dict[str, Any]:
    return {
        "plan": json.loads(option.plan.to_json()),
        "peak": option.peak,
        "seconds": option.seconds,
        "source": option.source,
        "measured": option.measured,
    }


def _blocks(plan: Plan) -> list[str]:
    by_policy: dict[str, list[str]] = {}
    for name, policy in plan.blocks:
        by_policy.setdefault(policy, []).append(name)
    return [f"{policy:12} {', '.join(names)}" for policy, names in by_policy.items()]


def _table(options: Sequence[Option]) -> list[str]:
    lines = [f"{'rows at a time':>16}  {'peak':>10}  {'one update':>12}  blocks"]
    for option in options:
        blocks = str(option.plan).split("blocks")[1].splitlines()[0].strip()
        took = format_seconds(option.seconds) + (" " if option.measured else "~")
        lines.append(f"{option.plan.micro_batch:>16}  {format_bytes(option.peak):>10}  {took:>12}  {blocks}")
    return lines
