"""Figures of a gradient, layer by layer, as a table; and the rule by which layers stand out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

VANISHING, EXPLODING = 1e-3, 70.0
MARKS = ("vanishing", "exploding", "not finite", "unused")

Figures = tuple[float | None, ...]  # one for each layer; None where no gradient came


def find_marks(norms: Sequence[float | None]) -> tuple[str, ...]:
    """Which layers stand out, by the 2-norms of their gradients in network order: one of `MARKS`, or "".

    Each norm is compared with that at the end of the network, where backward begins: the median of the last
    three layers whose gradient is finite and not zero. Below a thousandth of it a layer is "vanishing", and
    so is one whose gradient is zero; above 70 times it is "exploding". Neither depends on the scale of the
    loss. A norm of NaN or infinity is "not finite"; no gradient at all is "unused".

    Example:
        >>> find_marks([1e-5, 0.5, 200.0, None, 1.0, 2.0, 1.5])
        ('vanishing', '', 'exploding', 'unused', '', '', '')

    Source: Zhang et al. 2021, "AUTOTRAINER: an automatic DNN training problem detection and repair system",
    which compares the first layer's norm with the last one's; the thresholds are the defaults of its code
    (`beta_1`, `beta_3`). It also asks for a norm below 1e-4, which is left out:
    that depends on the scale of the loss.
    """
    end = norm_at_end(norms)
    return tuple([_mark(norm, end) for norm in norms])


def norm_at_end(norms: Sequence[float | None]) -> float:
    """The norm that others are compared with, 0 where there is none. See `find_marks`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The gradients of one batch, layer by layer. Print it for a table.

    A layer is a module that has trainable parameters of its own, under its name; "(model)" is the model
    itself. Layers are in the order in which the model registers them. Parameters that several modules share
    belong to the first. Layers that are frozen are left out.

    Attributes:
        layers: their names.
        mean: mean of the gradient's absolute values.
        largest: the largest of them.
        norm: the gradient's 2-norm.
        zeros: share of numbers that are zero, from 0 to 1.
        ratio: 2-norm of what the update has added to the weights, over that of the weights before it; None
            where no update was made, or the weights were all zero.
        update: after how many updates of the observer's life, 1 for the first; 0 where no update was made.
    """

    layers: tuple[str, ...]
    mean: Figures
    largest: Figures
    norm: Figures
    zeros: Figures
    ratio: Figures
    update: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        """For each layer "", or what stands out. See `find_marks`."""
        return find_marks(self.norm)

    def marked(self, mark: str) -> tuple[str, ...]:
        """The layers with this mark."""
        pairs = zip(self.layers, self.marks, strict=True)
        return tuple([layer for layer, found in pairs if found == mark])

    def record(self) -> dict[str, Any]:
        """The figures as a log keeps them: four significant digits."""
        names = ("mean", "largest", "norm", "zeros", "ratio")
        return {"layers": self.layers} | {name: [*map(_rounded, getattr(self, name))] for name in names}

    def __str__(self) -> str:
        width = max([len(layer) for layer in self.layers], default=0)
        head = f"{'layer':{width}}  {'mean':>8}  {'largest':>8}  {'norm':>8}  {'zeros':>6}  update/weight"
        columns = zip(
            self.layers, self.mean, self.largest, self.norm, self.zeros, self.ratio, self.marks, strict=True
        )
        lines = [head]
        for layer, mean, largest, norm, zeros, ratio, mark in columns:
            sizes = "  ".join([f"{_told(value):>8}" for value in (mean, largest, norm)])
            share = "-" if zeros is None else f"{zeros:.1%}"
            lines.append(f"{layer:{width}}  {sizes}  {share:>6}  {_told(ratio):>13}  {mark}".rstrip())
        return "\n".join(lines)


def _told(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
