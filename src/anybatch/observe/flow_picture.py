"""Pictures of gradient flow: figures over the layers, and norms over the updates."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from anybatch.core import PlanError
from anybatch.observe.figure import checked, new_figure, save
from anybatch.observe.flow_figures import EXPLODING, VANISHING, Figures, Flow, norm_at_end

#: One color for each mark, safe for color-blind readers (Okabe and Ito 2008).
COLOURS = {"vanishing": "#0072B2", "exploding": "#D55E00", "not finite": "#CC79A7", "unused": "#999999"}
_MOST_NAMES = 60  # layer names below the picture
_MOST_LISTED = 3  # layer names in the legend


def draw(records: Flow | Sequence[Flow], path: str | Path, *, title: str = "gradient flow") -> Path:
    """Draw the figures of the last record over the layers, and with several records norms over updates."""
    shown = [records] if isinstance(records, Flow) else [*records]
    if not shown:
        raise PlanError(f"Expected records to draw, got {shown}. Make an update first, or lower `every`.")
    path = checked(path)
    last, several = shown[-1], [one for one in shown if one.layers == shown[-1].layers]
    drawn: list[tuple[float, Callable[[Any], None]]] = [
        (3.0, partial(_sizes, last)),
        (1.2, partial(_zeros, last)),
    ]
    if any(ratio is not None for ratio in last.ratio):
        drawn.append((1.8, partial(_ratios, last)))
    if len(several) > 1:
        drawn.append((2.4, partial(_over_time, several)))
    heights = [height for height, _ in drawn]
    names = max([len(name) for name in last.named()], default=0)
    figure = new_figure(min(max(0.2 * len(last.layers), 8), 16), sum(heights) + 1.2 + 0.06 * names)
    figure.suptitle(title)
    panels = [*figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]]
    for panel, (_, fill) in zip(panels, drawn, strict=True):
        fill(panel)
    _shade(panels[:2], last)
    _name_layers(panels[-1], last)
    entries = panels[0].get_legend_handles_labels()
    figure.legend(*entries, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return save(figure, path)


def _line(panel: Any, values: Figures, **look: Any) -> None:
    shown = [value if value and math.isfinite(value) else math.nan for value in values]
    panel.plot(range(len(shown)), shown, marker=".", **look)


def _sizes(flow: Flow, panel: Any) -> None:
    _line(panel, flow.largest, color="#E69F00", linewidth=0.8, markersize=3, label="largest")
    _line(panel, flow.mean, color="#009E73", linewidth=0.8, markersize=3, label="mean of absolute values")
    _line(panel, flow.norm, color="black", linewidth=1.2, label="2-norm")
    end = norm_at_end(flow.norm)
    if end:
        _limit(panel, VANISHING * end, f"vanishing below: {VANISHING:g} of the norm at the end")
        _limit(panel, EXPLODING * end, f"exploding above: {EXPLODING:g} times the norm at the end")
    panel.set(ylabel="gradient", yscale="log")


def _limit(panel: Any, height: float, label: str) -> None:
    panel.axhline(height, color="black", linewidth=0.7, linestyle=":")
    place = {"xy": (0, height), "xycoords": ("axes fraction", "data"), "xytext": (3, 2)}
    panel.annotate(label, **place, textcoords="offset points", va="bottom", fontsize=7)


def _zeros(flow: Flow, panel: Any) -> None:
    panel.bar(range(len(flow.zeros)), [value or 0.0 for value in flow.zeros], width=0.9, color="#555555")
    panel.set(ylabel="zeros", ylim=(0, 1))
    panel.yaxis.set_major_formatter("{x:.0%}")


def _ratios(flow: Flow, panel: Any) -> None:
    _line(panel, flow.ratio, color="#009E73", linewidth=1.2)
    _limit(panel, 1e-3, "1e-3 is common")
    panel.set(ylabel="update / weight", yscale="log")


def _over_time(records: Sequence[Flow], panel: Any) -> None:
    rows = [[math.log10(n) if n and math.isfinite(n) else math.nan for n in one.norm] for one in records]
    updates = [one.update for one in records]
    edges = [updates[0] - 0.5, *[sum(pair) / 2 for pair in pairwise(updates)]]
    edges.append(1.5 * updates[-1] - edges[-1] / 2)
    mesh = panel.pcolormesh([x - 0.5 for x in range(len(records[0].layers) + 1)], edges, rows, cmap="cividis")
    panel.set(ylabel="update")
    panel.invert_yaxis()
    panel.yaxis.get_major_locator().set_params(integer=True)
    panel.figure.colorbar(mesh, ax=panel, label="norm, power of ten", pad=0.01)


def _shade(panels: Sequence[Any], flow: Flow) -> None:
    for mark, colour in COLOURS.items():
        found = flow.marked(mark)
        more = ", ..." if len(found) > _MOST_LISTED else ""
        label = f"{len(found)} {mark}: {', '.join(found[:_MOST_LISTED])}{more}"
        for index in [index for index, one in enumerate(flow.marks) if one == mark]:
            for panel in panels:
                panel.axvspan(index - 0.5, index + 0.5, color=colour, alpha=0.25, linewidth=0, label=label)
            label = ""


def _name_layers(panel: Any, flow: Flow) -> None:
    every = max(1, -(-len(flow.layers) // _MOST_NAMES))
    places = range(0, len(flow.layers), every)
    panel.set_xticks(places, [flow.named()[place] for place in places], rotation=90, fontsize=7)
    panel.set_xlim(-0.7, len(flow.layers) - 0.3)
    panel.set_xlabel("layers, in network order" + (f"; every {every}th is named" if every > 1 else ""))
