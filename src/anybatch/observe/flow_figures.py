"""Figures of a gradient by layer, as a table, and the rule that marks layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from anybatch.core import html_table

VANISHING, EXPLODING = 1e-3, 70.0
FIGURES = ("mean", "largest", "norm", "zeros", "ratio")  # of a layer's gradient

Figures = tuple[float | None, ...]  # one for each layer; None without a gradient


def find_marks(norms: Sequence[float | None]) -> tuple[str, ...]:
    """Return the mark of each layer, or "", by the 2-norms of gradients in network order.

    Each norm is compared with the norm at the end of the network, where backward begins: the median of the
    last three layers whose gradient is finite and not zero. A layer below a thousandth of it, or with a zero
    gradient, is "vanishing"; above 70 times it is "exploding". Neither depends on the scale of the loss. A
    norm of NaN or infinity is "not finite"; no gradient is "unused".

    Example:
        >>> find_marks([1e-5, 0.5, 200.0, None, 1.0, 2.0, 1.5])
        ('vanishing', '', 'exploding', 'unused', '', '', '')

    Source: Zhang et al. 2021, "AUTOTRAINER: an automatic DNN training problem detection and repair system",
    by its thresholds (`beta_1`, `beta_3`), without its condition that depends on the scale of the loss.
    """
    end = norm_at_end(norms)
    return tuple([_mark(norm, end) for norm in norms])


def norm_at_end(norms: Sequence[float | None]) -> float:
    """Return the reference norm of `find_marks`; 0 if there is none."""
    known = [norm for norm in norms if norm and math.isfinite(norm)]
    return median(known[-3:]) if known else 0.0


def _mark(norm: float | None, end: float) -> str:
    if norm is None:
        return "unused"
    if not math.isfinite(norm):
        return "not finite"
    if norm == 0 or norm < VANISHING * end:
        return "vanishing"
    return "exploding" if norm > EXPLODING * end else ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Flow:
    """The gradient figures of one batch by layer. Print it for a table.

    A layer is a module with its own trainable parameters; "(model)" is the model itself. Layers are in the
    order of registration. Parameters that several modules share belong to the first. Frozen layers are left
    out.

    Attributes:
        layers: names of the layers.
        mean: mean of the gradient's absolute values.
        largest: largest absolute value of the gradient.
        norm: 2-norm of the gradient.
        zeros: share of zeros, from 0 to 1.
        classes: class names of the layers' modules; empty if nothing tells.
        ratio: 2-norm of the update over the 2-norm of the weights before it; None without an update, or if
            all weights were zero.
        update: number of the callback's update, 1 for the first; 0 without an update.
    """

    layers: tuple[str, ...]
    mean: Figures
    largest: Figures
    norm: Figures
    zeros: Figures
    ratio: Figures
    classes: tuple[str, ...] = ()
    update: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        """The mark of each layer, or "". See `find_marks`."""
        return find_marks(self.norm)

    def marked(self, mark: str) -> tuple[str, ...]:
        """Return the layers with this mark."""
        return tuple([layer for layer, one in zip(self.layers, self.marks, strict=True) if one == mark])

    def named(self) -> tuple[str, ...]:
        """Return the layers' names, each with its class."""
        classes = self.classes or ("",) * len(self.layers)
        return tuple([f"{name} {kind}".strip() for name, kind in zip(self.layers, classes, strict=True)])

    def record(self) -> dict[str, Any]:
        """Return the figures for a log, with four significant digits."""
        figures = {
            name: [None if value is None else float(f"{value:.4g}") for value in getattr(self, name)]
            for name in FIGURES
        }
        return {"layers": self.layers, "classes": self.classes, **figures}

    def __repr__(self) -> str:
        marked = len(self.marks) - self.marks.count("")
        return f"Flow(update {self.update}, {len(self.layers)} layers, {marked} marked)"

    def _repr_html_(self) -> str:
        return html_table([("", str(self))])

    def __str__(self) -> str:
        named = self.named()
        width = max([len(layer) for layer in named], default=0)
        head = f"{'layer':{width}}  {'mean':>8}  {'largest':>8}  {'norm':>8}  {'zeros':>6}  update/weight"
        columns = zip(named, *[getattr(self, name) for name in FIGURES], self.marks, strict=True)
        lines = [head]
        for layer, *sizes, zeros, ratio, mark in columns:
            told = [f"{_told(value):>8}" for value in sizes] + [f"{_told(zeros, '.1%'):>6}"]
            told += [f"{_told(ratio):>13}", mark]
            lines.append("  ".join([f"{layer:{width}}", *told]).rstrip())
        return "\n".join(lines)


def _told(value: float | None, form: str = ".2g") -> str:
    return "-" if value is None else format(value, form)
