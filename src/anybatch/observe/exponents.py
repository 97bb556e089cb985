"""Magnitudes of gradients by power of two, and their loss in 16 bits: counts and a picture."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybatch.core import Micro, PlanError
from anybatch.observe.figure import checked, new_figure, save
from anybatch.precision import Precision, PrecisionName, find_precision
from anybatch.step import dry_run

DTYPES = ("float16", "bfloat16")
_LEAST, _MOST = -1074, 1023  # exponents of float64

#: One color for each fate, safe for color-blind readers (Okabe and Ito 2008).
COLOURS = {"vanish": "#D55E00", "subnormal": "#E69F00", "normal": "#0072B2", "overflow": "#CC79A7"}
_WORDS = {
    "vanish": "would vanish in {}",
    "subnormal": "subnormal in {}",
    "normal": "normal in {}",
    "overflow": "would overflow in {}",
}


@dataclass(frozen=True, slots=True)
class Fates:
    """Counts of nonzero numbers by the result of rounding to a 16-bit dtype."""

    normal: int  # full precision of the dtype
    subnormal: int  # reduced precision
    vanish: int  # rounded to zero
    overflow: int  # rounded to infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponents:
    """Counts of gradients by exponent, as computed in backward, with the loss scale."""

    counts: Mapping[int, int]  # exponent e -> count of numbers from 2^e to below 2^(e + 1)
    zeros: int  # without gradient, or vanished in backward
    not_finite: int  # infinite or NaN
    fates: Mapping[str, Fates]  # of the numbers in `counts`, by dtype name: float16, bfloat16
    scale: float  # the loss scale
    precision: str  # the precision of the computation

    @property
    def numbers(self) -> int:
        """The total count."""
        return sum(self.counts.values()) + self.zeros + self.not_finite

    def __str__(self) -> str:
        lines = [
            f"{self.numbers:,} gradients, computed in {self.precision} at a loss scale of {self.scale:,g}"
        ]
        rows = self.lost(*self.fates)
        lines += [f"  {name:<27} {count:>12,}  {count / self.numbers:6.1%}" for name, count in rows]
        return "\n".join(lines)

    def lost(self, *dtypes: str) -> list[tuple[str, int]]:
        """Return the kinds of numbers that are not normal in these dtypes, in words, with nonzero counts."""
        rows = [("zero", self.zeros), ("infinite or NaN", self.not_finite)]
        for dtype in dtypes:
            for fate in ("vanish", "subnormal", "overflow"):
                rows.append((_WORDS[fate].format(dtype), getattr(self.fates[dtype], fate)))
        return [(words, count) for words, count in rows if count]


def gradient_exponents(
    step: Any,
    batch: Any,
    *,
    scale: float = 1.0,
    precision: PrecisionName | Precision | None = None,
    micro_batch: int | None = None,
) -> Exponents:
    """Count the exponents of a step's gradients for a batch; the state is unchanged.

    Each micro-batch goes forward and backward, and its gradient is counted before it is divided by the scale
    and added: there it has the dtype in which it can vanish.

    Args:
        step: an `anybatch.Step`.
        batch: a batch, as for the step.
        scale: loss scale, a power of two.
        precision: a precision that stores the weights like the step's, such as "fp16-mixed" or "float32";
            None for the step's own.
        micro_batch: rows of a micro-batch; None for the step's own, or for all rows if it has none.

    Raises:
        PlanError: the precision stores weights differently, or the scale is no power of two.
        BatchError: the batch cannot be cut, or is on another device than the model.

    Example:
        >>> from anybatch.step import Step
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> step = Step(model, torch.nn.L1Loss(), torch.optim.SGD(model.parameters(), lr=0.1))
        >>> batch = torch.tensor([[1.0, 2.0**-30]]), torch.tensor([[1e6]])  # the gradient is minus the input
        >>> found = gradient_exponents(step, batch)
        >>> found.counts, found.fates["float16"].vanish
        ({-30: 1, 0: 1}, 1)
        >>> gradient_exponents(step, batch, scale=2.0**10).fates["float16"].vanish
        0

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2 and figure 3.
    """
    chosen = step.precision if precision is None else find_precision(precision)
    if chosen.store != step.precision.store:
        raise PlanError(
            f"Expected a precision that leaves weights stored as in {step.precision}, got {chosen}. "
            "Make a step of that precision, on a copy of the model."
        )
    tally = _ExponentCounter()
    dry_run.show(step, batch, tally, precision=chosen, scale=scale, micro_batch=micro_batch)
    return tally.result(scale, str(chosen))


class _ExponentCounter:
    def __init__(self) -> None:
        self._counts = torch.zeros(_MOST - _LEAST + 1, dtype=torch.int64)
        self._fates = {dtype: torch.zeros(4, dtype=torch.int64) for dtype in DTYPES}
        self._zeros = self._not_finite = 0

    def micro_gradients(self, micro: Micro, gradients: Mapping[str, Sequence[Tensor]], scale: float) -> None:
        for several in gradients.values():
            for gradient in several:
                self._count(gradient.detach())

    def _count(self, gradient: Tensor) -> None:
        """Count the numbers of a tensor; missing entries of a sparse tensor are not counted."""
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        values = torch.view_as_real(values) if values.is_complex() else values
        values = values.flatten()
        values = values if values.dtype == torch.float64 else values.float()  # exact
        is_finite = values.isfinite()
        self._not_finite += int((~is_finite).sum())
        self._zeros += int((values == 0).sum())
        values = values[is_finite & (values != 0)]
        exponents = torch.frexp(values).exponent.long() - 1  # frexp's mantissa is at least 1/2
        self._counts += torch.bincount(exponents - _LEAST, minlength=len(self._counts)).cpu()
        for dtype, fates in self._fates.items():
            fates += _fates(values, getattr(torch, dtype))

    def result(self, scale: float, precision: str) -> Exponents:
        return Exponents(
            counts={_LEAST + index: count for index, count in enumerate(self._counts.tolist()) if count},
            zeros=self._zeros,
            not_finite=self._not_finite,
            fates={dtype: Fates(*counts.tolist()) for dtype, counts in self._fates.items()},
            scale=scale,
            precision=precision,
        )


def _fates(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the numbers and count which become normal, subnormal, zero and infinite."""
    rounded = values.to(dtype).abs()
    vanish, overflow = rounded == 0, rounded.isinf()
    subnormal = (rounded < torch.finfo(dtype).tiny) & ~vanish
    kinds = torch.stack([vanish | subnormal | overflow, subnormal, vanish, overflow]).sum(1).cpu()
    kinds[0] = len(values) - kinds[0]
    return kinds


def draw(
    records: Exponents | Sequence[Exponents], path: str | Path, *, dtype: str = "float16", title: str = ""
) -> Path:
    """Draw a histogram of exponents for each record, side by side, colored by their fate in a dtype.

    The outline of the first record, shifted by the loss scale, is drawn over the others and shows vanished
    gradients.

    Args:
        records: records of `gradient_exponents`; the first is the reference.
        path: file of the picture, ending in .png, .svg, .pdf or .html.
        dtype: "float16" or "bfloat16".
        title: title of the picture.

    Raises:
        PlanError: the ending or dtype is unknown, there is no record, or matplotlib is not installed.
    """
    shown = (records,) if isinstance(records, Exponents) else tuple(records)
    path = checked(path)
    if dtype not in DTYPES or not shown:
        raise PlanError(
            f"Expected records and one of {DTYPES}, got {len(shown)} and {dtype!r}. Pass at least one record."
        )
    title = title or "gradients by exponent"
    figure = new_figure(0.5 + 3.8 * len(shown), 4)
    figure.suptitle(title)
    panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    for panel, record in zip(panels, shown, strict=True):
        _histogram(panel, record, dtype)
        if record is not shown[0]:
            _outline(panel, shown[0], record)
    exponents = [exponent for record in shown for exponent in record.counts] or [0]
    panels[0].set_xlim(min(exponents) - 1, max(*exponents, _ends(dtype)["normal"]) + 2)
    panels[0].set_ylabel("share of all gradients")
    panels[0].yaxis.set_major_formatter("{x:.1%}")
    handles = {
        label: one for panel in panels for one, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False
    )
    return save(figure, path, title=title, text="\n\n".join(map(str, shown)))


def _histogram(panel: Any, record: Exponents, dtype: str) -> None:
    start, all_ = _LEAST, max(1, record.numbers)
    for fate, end in _ends(dtype).items():
        held = {e: count for e, count in record.counts.items() if start <= e < end}
        if held:
            places, shares = [e + 0.5 for e in held], [count / all_ for count in held.values()]
            panel.bar(places, shares, width=0.9, color=COLOURS[fate], label=_WORDS[fate].format(dtype))
        start = end
    panel.set(title=f"{record.precision}, loss scale {record.scale:,g}", xlabel="exponent, base 2")
    text = "\n".join(f"{count / all_:.1%} {words}" for words, count in record.lost(dtype))
    panel.text(0.03, 0.97, text, transform=panel.transAxes, va="top", fontsize="small")


def _outline(panel: Any, first: Exponents, record: Exponents) -> None:
    moved = round(math.log2(record.scale / first.scale))
    edges = list(range(min(first.counts, default=0), max(first.counts, default=0) + 2))
    shares = [first.counts.get(e, 0) / max(1, first.numbers) for e in edges[:-1]]
    label = f"{first.precision}, times the loss scale"
    panel.stairs(shares, [e + moved for e in edges], color="black", linewidth=0.8, label=label)


def _ends(dtype: str) -> dict[str, int]:
    limits = torch.finfo(getattr(torch, dtype))
    least = round(math.log2(limits.tiny * limits.eps))
    return {
        "vanish": least - 1,  # numbers above half the least one are rounded up to it
        "subnormal": round(math.log2(limits.tiny)),
        "normal": round(math.log2(limits.max)),
        "overflow": _MOST + 1,
    }
