"""A picture of memory over one step, colored by owner, with the peak."""

from itertools import groupby
from pathlib import Path
from typing import Any

from anybatch.core import format_bytes
from anybatch.memory import OWNERS, Ledger
from anybatch.observe.figure import checked, new_figure, save

#: One color per owner, safe for color-blind readers (Okabe and Ito 2008).
COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer state": "#009E73",
    "activations": "#E69F00",
    "workspace": "#F0E442",
    "input": "#CC79A7",
    "other": "#999999",
}


def plot(ledger: Ledger, path: str | Path, *, budget: int | None = None, title: str = "") -> Path:
    """Draw the allocated bytes over one step, stacked by owner, with its phases, the peak and the budget."""
    path, moments, figure = checked(path), ledger.moments, new_figure(11, 5)
    axes = figure.add_subplot()
    series = dict(zip(OWNERS, zip(*[moment.bytes for moment in moments], strict=True), strict=True))
    shown = {owner: values for owner, values in series.items() if any(values)}
    colours = [COLOURS[owner] for owner in shown]
    axes.stackplot(range(len(moments)), *shown.values(), labels=list(shown), colors=colours, step="post")
    _phases(axes, ledger)
    totals = [sum(moment.bytes) for moment in moments]
    top = totals.index(max(totals))
    look = {"textcoords": "offset points", "ha": "center", "fontweight": "bold"}
    axes.annotate(f"peak {format_bytes(ledger.peak)}", (top, totals[top]), xytext=(0, 8), **look)
    if budget is not None:
        axes.axhline(budget, color="#D55E00", linestyle="--", label=f"budget {format_bytes(budget)}")
    title = title or f"{ledger.source} memory of one step, {ledger.device}"
    axes.set(title=title, xlabel="moments of the step, in order", ylabel="bytes alive")
    axes.set_xlim(0, max(len(moments) - 1, 1))
    axes.set_ylim(0, 1.15 * max([ledger.peak, budget or 0]))
    axes.yaxis.set_major_formatter(_format_tick)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return save(figure, path)


def _format_tick(value: float, _: object) -> str:
    return format_bytes(value)


def _phases(axes: Any, ledger: Ledger) -> None:
    start, moments = 0, ledger.moments
    for (phase, _), alike in groupby(moments, lambda moment: (moment.phase, moment.micro_batch)):
        stop = start + len([*alike])
        axes.axvline(start, color="black", linewidth=0.4, alpha=0.4)
        if stop - start > len(moments) / 25:
            look = {"ha": "center", "va": "top", "fontsize": "small"}
            place = axes.get_xaxis_transform()
            axes.text((start + stop) / 2, 0.995, phase, transform=place, **look)
        start = stop
