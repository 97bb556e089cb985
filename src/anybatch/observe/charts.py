"""Chart data of the report: curves over updates, events and gradient flow, of bounded size."""

import base64
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anybatch.core import format_bytes
from anybatch.observe.flow_figures import FIGURES, find_marks
from anybatch.observe.run_log import FlowLog, Numbers, RunLog, evenly, mapping, number, whole

MOST_POINTS = 500  # points of a curve; with more updates a point has a mean and a range
MOST_SERIES = 8  # series of a chart
MOST_EVENTS = 200  # marks of a kind of event
MARK_RULE = (
    "Each layer's last norm is compared with that at the end of the network: the median of the last three "
    "layers with a gradient. Below a thousandth of it, or 0, a layer is called vanishing, above 70 times it "
    "exploding, without any gradient unused."
)

_SERVED = ("pushes refused", "workers replaced", "servers replaced")  # rare events of servers

Chart = dict[str, Any]  # id, title, unit, log, label, series; for JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """An event in an update, or in several in a row."""

    kind: str
    first: int  # update
    last: int
    amount: int  # number of micro-batches, rows, or updates


def points(run: RunLog) -> list[int]:
    """Return the first update of each point of a curve."""
    return [run.steps[start] for start in evenly(len(run.steps), MOST_POINTS)]


def charts(run: RunLog) -> list[Chart]:
    """Return all charts that have values in the log."""
    values = run.values
    loss = [*_curve(values, loss="training"), *_epochs(run, "validation", "loss")]
    terms = {name: name.removeprefix("terms.") for name in values if name.startswith("terms.")}
    speed, seconds = _throughput(run)
    full = _full(run)
    pushed = {name: name.removeprefix("counts.") for name in values if name.startswith("counts.bytes")}
    found = [
        _chart("loss", "Loss", loss),
        _chart("terms", "Terms of the loss", [*_curve(values, **terms)] if len(terms) > 1 else []),
        *(
            _chart(f"metric-{index}", f"Validation {name}", [*_epochs(run, name, name)])
            for index, name in enumerate(_metrics(run))
        ),
        _chart("learning-rate", "Learning rate", [*_curve(values, learning_rate="learning rate")]),
        _chart("gradient-norm", "Gradient norm, before clipping", [*_curve(values, grad_norm="2-norm")]),
        *_observed(run),
        _chart("throughput", "Throughput", [*_curve(speed, seconds, rows="training")], "rows/s"),
        _chart("pushed", "Bytes pushed to servers", [*_curve(values, **pushed)], "bytes"),
        _chart("micro-batch", "Rows of a micro-batch", [*_curve(full, micro_batch="the largest")], "rows"),
        _chart("micro-batches", "Micro-batches of an update", [*_curve(full, micro_batches="number")]),
        _chart("memory", "Peak memory so far", [*_curve(values, memory="peak")], "bytes"),
        _chart("scale", "Loss scale", [*_curve(values, scale="loss scale")]),
    ]
    return [chart for chart in found if chart["series"]]


def laid_over(runs: Mapping[str, RunLog]) -> list[Chart]:
    """Return the charts of several runs, by name: a chart for each series, with a curve for each run."""
    found: dict[tuple[str, str], Chart] = {}
    for run_name, run in runs.items():
        for chart in charts(run) if run.steps else []:
            for one in chart["series"]:
                alone = len(chart["series"]) == 1 or one["name"] == "training"
                title = chart["title"] if alone else f"{chart['title']}: {one['name']}"
                new = {**chart, "id": f"over-{len(found)}", "title": title, "label": "", "series": []}
                over = found.setdefault((chart["id"], one["name"]), new)
                over["label"] += f" {run_name}: {chart['label']}"
                over["log"] &= chart["log"]
                over["series"].append({"x": points(run), **one, "name": run_name})
    return [*found.values()]


def constants(chart: Chart) -> str:
    """Return the title and the values of a chart whose curves never change; empty for other charts."""
    told: dict[str, float] = {}
    for one in chart["series"]:
        values = {v for key in ("y", "low", "high") for v in one.get(key, ()) if v is not None}
        if len(values) != 1:
            return ""
        told[one["name"]] = values.pop()
    say = format_bytes if chart["unit"] == "bytes" else "{:,.4g}".format
    if len({*told.values()}) == 1:
        return f"{chart['title'].lower()} {say(next(iter(told.values())))}"
    return f"{chart['title'].lower()} {', '.join(f'{say(value)} ({name})' for name, value in told.items())}"


def _metrics(run: RunLog) -> list[str]:
    names = [name for one in run.epochs for name in mapping(one.get("validation"))]
    return [name for name in dict.fromkeys(names) if name != "loss"][:MOST_SERIES]


def _observed(run: RunLog) -> Iterable[Chart]:
    groups: dict[str, list[Chart]] = {}
    for name, series in run.values.items():
        _, callback, key = [*name.split(".", 2), "", ""][:3]
        # The parts of the noise scale have another order of magnitude.
        if name.startswith("observed.") and (callback != "noise" or key == "scale"):
            found = _sparse(key.replace("_", " "), np.array(run.steps, np.float64), series)
            groups.setdefault(callback, []).extend(found)
    for index, (callback, series) in enumerate(groups.items()):
        title = "Gradient noise scale" if callback == "noise" else f"Callback {callback}"
        place = "noise" if callback == "noise" else f"callback-{index}"
        yield _chart(place, title, series[:MOST_SERIES])


def served(run: RunLog) -> dict[str, int | str]:
    """Return the totals of parameter servers over all updates."""
    columns = {name[7:]: np.nansum(one) for name, one in run.values.items() if name.startswith("counts.")}
    of_bytes = {name: format_bytes(total) for name, total in columns.items() if name.startswith("bytes")}
    return {name: int(total) for name, total in columns.items()} | of_bytes


def _full(run: RunLog) -> Mapping[str, Numbers]:
    """Return the values of updates of full batches: the last batch of an epoch may be short."""
    size = number(run.starts[-1].get("batch_size")) if run.starts else math.nan
    rows = run.values.get("rows")
    if rows is None or not (rows == size).any():
        return run.values
    return {name: np.where(rows == size, one, math.nan) for name, one in run.values.items()}


def _throughput(run: RunLog) -> tuple[dict[str, Numbers], Numbers | None]:
    rows, at = run.values.get("rows"), run.values.get("seconds")
    if rows is None or at is None:
        return {}, None
    begin = 0.0 if run.steps[0] == 1 else math.nan  # seconds count from the run's start
    seconds = np.diff(at, prepend=begin)
    seconds[seconds <= 0] = math.nan
    speed = rows / seconds
    return ({"rows": speed}, seconds) if np.isfinite(speed).any() else ({}, None)


def _curve(values: Mapping[str, Numbers], weights: Numbers | None = None, /, **names: str) -> Iterable[Chart]:
    for name in [name for name in names if name in values and np.isfinite(values[name]).any()][:MOST_SERIES]:
        yield _shared(names[name], values[name], weights)


def _sparse(name: str, steps: Numbers, series: Numbers) -> Iterable[Chart]:
    there = np.isfinite(series)
    steps, series = steps[there], series[there]
    if len(series):
        at = [int(steps[start]) for start in evenly(len(steps), MOST_POINTS)]
        yield _shared(name, series) | {"x": at}


def _shared(name: str, series: Numbers, weights: Numbers | None = None) -> Chart:
    """Return a series; values that share a point become their mean, smallest and largest."""
    starts = evenly(len(series), MOST_POINTS)
    told: Chart = {"name": name, "label": _say(name, series), "log": _is_wide(series)}
    if len(starts) == len(series):
        return told | {"y": rounded(series)}
    with np.errstate(all="ignore"):
        weight = np.where(np.isfinite(series), 1.0 if weights is None else weights, 0.0)
        mean = np.add.reduceat(np.nan_to_num(series) * weight, starts) / np.add.reduceat(weight, starts)
        low, high = np.fmin.reduceat(series, starts), np.fmax.reduceat(series, starts)
    return told | {"y": rounded(mean), "low": rounded(low), "high": rounded(high)}


def _epochs(run: RunLog, name: str, field: str) -> Iterable[Chart]:
    known = [(at, one) for one in run.epochs if (at := whole(one.get("updates"))) is not None]
    values = [number(mapping(one.get("validation")).get(field)) for _, one in known]
    return _sparse(name, np.array([at for at, _ in known], np.float64), np.array(values, np.float64))


def _chart(place: str, title: str, series: list[Chart], unit: str = "") -> Chart:
    """Return a chart; its axis is logarithmic if all values are positive and differ widely."""
    label = f"{title} over updates. " + " ".join(one["label"] for one in series)
    logs = {one["log"] for one in series}
    log = True in logs and False not in logs
    shown = [{key: one[key] for key in one if key not in ("label", "log")} for one in series]
    return {"id": place, "title": title, "unit": unit, "log": log, "label": label, "series": shown}


def _is_wide(series: Numbers) -> bool | None:
    """Return True for a range above a factor of 50, None below; False if a value is not positive."""
    finite = series[np.isfinite(series)]
    if (finite <= 0).any():
        return False
    return bool(finite.max() > 50 * finite.min()) or None


def _say(name: str, series: Numbers) -> str:
    finite = series[np.isfinite(series)]
    first, last, low, high = (f"{one:.4g}" for one in (finite[0], finite[-1], finite.min(), finite.max()))
    return f"{name}: first {first}, last {last}, smallest {low}, largest {high}."


def rounded(series: Numbers) -> list[float | None]:
    """Return numbers with six digits for JSON; None for NaN and infinity."""
    return [float(f"{one:.6g}") if math.isfinite(one) else None for one in series.tolist()]


def events(run: RunLog) -> list[RunEvent]:
    """Return events by kind, then by update; the same kind in a row is one event."""
    none = np.zeros(len(run.steps))
    scale = np.nan_to_num(run.values.get("scale", none), nan=1.0)  # logged only if it is not 1
    change = np.diff(scale, prepend=scale[:1])
    redone, dropped = (np.nan_to_num(run.values.get(name, none)) for name in ("redone", "dropped"))
    happened = {
        "micro-batches done again (out of memory or overflow)": redone,
        "loss scale lowered": change < 0,
        "loss scale raised": change > 0,
        "rows left out": dropped,
        "no finite loss": ~np.isfinite(run.values.get("loss", none)),
        "no update made": run.values.get("updated", none + 1) == 0,
    } | {name: np.nan_to_num(run.values.get(f"counts.{name}", none)) for name in _SERVED}
    found = [event for kind, amounts in happened.items() for event in _in_a_row(kind, amounts, run.steps)]
    again = [whole(one.get("done_updates")) or 0 for one in run.starts[1:]]
    plans = [step for one in run.plans[1:] if (step := whole(one.get("step"))) is not None]
    for kind, steps in (("the run went on", again), ("new plan", plans)):
        found += [RunEvent(kind=kind, first=step, last=step, amount=1) for step in steps]
    return found


def _in_a_row(kind: str, amounts: Any, steps: tuple[int, ...]) -> Iterable[RunEvent]:
    amounts = np.clip(np.asarray(amounts, np.float64), 0, 1e15)
    where = np.flatnonzero(amounts)
    parts = np.split(where, np.flatnonzero(np.diff(where) > 1) + 1)
    for run in parts if len(where) else []:
        total = int(amounts[run].sum())
        yield RunEvent(kind=kind, first=steps[run[0]], last=steps[run[-1]], amount=total)


def marks_on_axis(found: list[RunEvent]) -> list[dict[str, Any]]:
    """Return the updates to mark, by kind of event."""
    kinds: dict[str, list[int]] = {}
    for event in found:
        kinds.setdefault(event.kind, []).append(event.first)
    return [{"name": kind, "x": at[:: -(-len(at) // MOST_EVENTS)]} for kind, at in kinds.items()]


def pack_flow(flow: FlowLog) -> dict[str, Any]:
    """Return gradient flow for the page, each figure as 16-bit codes to keep the page small."""
    figures: list[dict[str, Any]] = []
    for index, name in enumerate(FIGURES):
        low, high = flow.low[:, index], flow.high[:, index]
        if np.isfinite(high).any():
            figures.append({"name": name, **_coded(low, high, log=name != "zeros", more=flow.records > 1)})
    norms = flow.high[:, FIGURES.index("norm")]
    there = np.isfinite(norms).sum(axis=0).tolist()  # a log has null for NaN and for no gradient
    marks = find_marks([one if had else None for one, had in zip(norms[-1].tolist(), there, strict=True)])
    row = max(3, min(24, 540 // len(flow.layers)))  # pixels of a layer in the heat map
    known = {"layers": flow.layers, "classes": flow.classes, "marks": marks}
    return known | {"x": flow.updates, "figures": figures, "row": row}


def _coded(low: Numbers, high: Numbers, *, log: bool, more: bool) -> dict[str, Any]:
    """Encode values: 0 for no value, 1 for zero, 2 to 65,535 evenly from the smallest to the largest."""
    positive = high[high > 0]
    positive = np.concatenate([positive, low[low > 0]]) if log else np.array([0.0, max(1.0, *positive, 1.0)])
    scaled = np.log10 if log else np.asarray
    ends = (positive.min(), positive.max()) if len(positive) else (1.0, 1.0)  # of which the logarithm is 0
    least, most = (float(scaled(one)) for one in ends)

    def code(values: Numbers) -> str:
        with np.errstate(all="ignore"):
            share = (scaled(values) - least) / ((most - least) or 1.0)
        codes = np.where(values > 0, 2 + np.round(np.nan_to_num(share, posinf=0, neginf=0) * 65_533), 1)
        codes = np.where(np.isfinite(values), codes, 0).astype("<u2")
        return base64.b64encode(codes.tobytes()).decode()

    found = {"log": log, "least": least, "most": most, "high": code(high)}
    return found | ({"low": code(low)} if more else {})
