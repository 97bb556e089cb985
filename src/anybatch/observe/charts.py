"""Chart data of the report: curves over updates, events and gradient flow, of bounded size."""

import base64
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from anybatch.core import format_bytes
from anybatch.observe.flow_figures import FIGURES, find_marks
from anybatch.observe.run_log import FlowLog, Numbers, RunLog, evenly, mapping, number, whole

MOST_POINTS = 500  # points of a curve; with more updates a point has a mean and a range
MOST_SERIES = 8  # series of a chart
MOST_EVENTS = 200  # marks of a kind of event
MOST_COLUMNS, MOST_CELLS = 150, 20_000  # limits of a figure's gradient flow over time, all layers together
MARK_RULE = (
    "Each layer's last norm is compared with that at the end of the network: the median of the last three "
    "layers with a gradient. Below a thousandth of it, or 0, a layer is called vanishing, above 70 times it "
    "exploding, without any gradient unused."
)

_SERVED = ("pushes refused", "workers replaced", "servers replaced")  # rare events of servers

Chart = dict[str, Any]  # id, title, unit, log, label, series; for JSON


class RunEvent(NamedTuple):
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
    terms = {name: name.removeprefix("terms.") for name in run.values if name.startswith("terms.")}
    pushed = {name: name.removeprefix("counts.") for name in run.values if name.startswith("counts.bytes")}
    metrics = [name for name in validations(run) if name != "loss"][:MOST_SERIES]
    is_full = _is_full(run)
    found = [
        _chart("loss", "Loss", [*_curves(run, loss="training"), *_epochs(run, "validation", "loss")]),
        _chart("terms", "Terms of the loss", _curves(run, **terms) if len(terms) > 1 else []),
        *[
            _chart(f"metric-{index}", f"Validation {name}", _epochs(run, name, name))
            for index, name in enumerate(metrics)
        ],
        _chart("learning-rate", "Learning rate", _curves(run, learning_rate="learning rate")),
        _chart("gradient-norm", "Gradient norm, before clipping", _curves(run, grad_norm="2-norm")),
        *_observed(run),
        _chart("throughput", "Throughput", _throughput(run), "rows/s"),
        _chart("pushed", "Bytes pushed to servers", _curves(run, **pushed), "bytes"),
        _chart(
            "micro-batch", "Rows of a micro-batch", _curves(run, is_full, micro_batch="the largest"), "rows"
        ),
        _chart("micro-batches", "Micro-batches of an update", _curves(run, is_full, micro_batches="number")),
        _chart("memory", "Peak memory so far", _curves(run, memory="peak"), "bytes"),
        _chart("scale", "Loss scale", _curves(run, scale="loss scale")),
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
    say, told = format_bytes if chart["unit"] == "bytes" else "{:,.4g}".format, dict[str, str]()
    for one in chart["series"]:
        values = {v for key in ("y", "low", "high") for v in one.get(key, ()) if v is not None}
        if len(values) != 1:
            return ""
        told[one["name"]] = say(*values)
    same = {*told.values()}
    if len(same) > 1:
        same = [f"{value} ({name})" for name, value in told.items()]
    return f"{chart['title'].lower()} {', '.join(same)}"


def validations(run: RunLog) -> list[str]:
    """Return the names of validation values."""
    return [*dict.fromkeys(name for one in run.epochs for name in mapping(one.get("validation")))]


def _observed(run: RunLog) -> Iterable[Chart]:
    groups: dict[str, list[Chart]] = {}
    for name, series in run.values.items():
        kind, _, rest = name.partition(".")
        callback, _, key = rest.partition(".")
        # The parts of the noise scale have another order of magnitude.
        if kind == "observed" and (callback != "noise" or key == "scale"):
            found = _sparse(key.replace("_", " "), np.array(run.steps, np.float64), series)
            groups.setdefault(callback, []).extend(found)
    for index, (callback, series) in enumerate(groups.items()):
        place, title = f"callback-{index}", f"Callback {callback}"
        if callback == "noise":
            place, title = "noise", "Gradient noise scale"
        yield _chart(place, title, series[:MOST_SERIES])


def served(run: RunLog) -> dict[str, int | str]:
    """Return the totals of parameter servers over all updates."""
    totals = {name[7:]: np.nansum(one) for name, one in run.values.items() if name.startswith("counts.")}
    return {
        name: format_bytes(total) if name.startswith("bytes") else int(total)
        for name, total in totals.items()
    }


def _is_full(run: RunLog) -> Numbers:
    """Return 1 for updates of full batches, else NaN: the last batch of an epoch may be short."""
    size = number(run.starts[-1].get("batch_size")) if run.starts else math.nan
    is_full = run.column("rows") == size
    return np.where(is_full, 1.0, math.nan if is_full.any() else 1.0)


def _throughput(run: RunLog) -> list[Chart]:
    # Seconds count from the run's start.
    seconds = np.diff(run.column("seconds"), prepend=0.0 if run.steps[0] == 1 else math.nan)
    seconds[seconds <= 0] = math.nan
    speed = run.column("rows") / seconds
    return [_shared("training", speed, seconds)] if np.isfinite(speed).any() else []


def _curves(run: RunLog, factor: Numbers | float = 1.0, /, **names: str) -> list[Chart]:
    shown = [name for name in names if np.isfinite(run.column(name) * factor).any()][:MOST_SERIES]
    return [_shared(names[name], run.column(name) * factor) for name in shown]


def _sparse(name: str, steps: Numbers, series: Numbers) -> list[Chart]:
    there = np.isfinite(series)
    steps, series = steps[there], series[there]
    at = [int(steps[start]) for start in evenly(len(steps), MOST_POINTS)]
    return [_shared(name, series) | {"x": at}] if at else []


def _shared(name: str, series: Numbers, weights: Numbers | None = None) -> Chart:
    """Return a series; values that share a point become their mean, smallest and largest."""
    starts = evenly(len(series), MOST_POINTS)
    ends = series[np.isfinite(series)].tolist()
    low, high = min(ends), max(ends)
    first, last, least, most = (f"{one:.4g}" for one in (ends[0], ends[-1], low, high))
    label = f"{name}: first {first}, last {last}, smallest {least}, largest {most}."
    told: Chart = {"name": name, "label": label, "range": high / low if low > 0 else 0.0}
    if len(starts) == len(series):
        return told | {"y": rounded(series)}
    with np.errstate(all="ignore"):
        weight = np.where(np.isfinite(series), 1.0 if weights is None else weights, 0.0)
        mean = np.add.reduceat(np.nan_to_num(series) * weight, starts) / np.add.reduceat(weight, starts)
        low, high = np.fmin.reduceat(series, starts), np.fmax.reduceat(series, starts)
    return told | {"y": rounded(mean), "low": rounded(low), "high": rounded(high)}


def _epochs(run: RunLog, name: str, field: str) -> list[Chart]:
    known = [(at, one) for one in run.epochs if (at := whole(one.get("updates"))) is not None]
    values = [number(mapping(one.get("validation")).get(field)) for _, one in known]
    return _sparse(name, np.array([at for at, _ in known], np.float64), np.array(values, np.float64))


def _chart(place: str, title: str, series: list[Chart], unit: str = "") -> Chart:
    """Return a chart; its axis is logarithmic if all values are positive and differ widely."""
    label = f"{title} over updates. " + " ".join(one["label"] for one in series)
    ranges = [one["range"] for one in series]
    log = min(ranges, default=0.0) > 0 and max(ranges) > 50
    shown = [{key: one[key] for key in one if key not in ("label", "range")} for one in series]
    return {"id": place, "title": title, "unit": unit, "log": log, "label": label, "series": shown}


def rounded(series: Numbers) -> list[float | None]:
    """Return numbers with six digits for JSON; None for NaN and infinity."""
    return [float(f"{one:.6g}") if math.isfinite(one) else None for one in series.tolist()]


def events(run: RunLog) -> list[RunEvent]:
    """Return events by kind, then by update; the same kind in a row is one event."""
    scale = np.nan_to_num(run.column("scale"), nan=1.0)  # logged only if it is not 1
    change = np.diff(scale, prepend=scale[:1])
    happened = {
        "micro-batches done again (out of memory or overflow)": run.column("redone"),
        "loss scale lowered": change < 0,
        "loss scale raised": change > 0,
        "rows left out": run.column("dropped"),
        "no finite loss": ~np.isfinite(run.column("loss", 0.0)),
        "no update made": run.column("updated") == 0,
    } | {name: run.column(f"counts.{name}") for name in _SERVED}
    found = [event for kind, amounts in happened.items() for event in _in_a_row(kind, amounts, run.steps)]
    again = [whole(one.get("done_updates")) or 0 for one in run.starts[1:]]
    plans = [step for one in run.plans[1:] if (step := whole(one.get("step"))) is not None]
    for kind, steps in (("the run went on", again), ("new plan", plans)):
        found += [RunEvent(kind, step, step, 1) for step in steps]
    return found


def _in_a_row(kind: str, amounts: Any, steps: list[int]) -> Iterable[RunEvent]:
    amounts = np.clip(np.nan_to_num(amounts), 0, 1e15)
    where = np.flatnonzero(amounts)
    for run in np.split(where, np.flatnonzero(np.diff(where) > 1) + 1):
        if len(run):
            yield RunEvent(kind, steps[run[0]], steps[run[-1]], int(amounts[run].sum()))


def marks_on_axis(found: list[RunEvent]) -> list[dict[str, Any]]:
    """Return the updates to mark, by kind of event."""
    kinds: dict[str, list[int]] = {}
    for event in found:
        kinds.setdefault(event.kind, []).append(event.first)
    return [{"name": kind, "x": at[:: -(-len(at) // MOST_EVENTS)]} for kind, at in kinds.items()]


def pack_flow(flow: FlowLog) -> dict[str, Any]:
    """Return gradient flow for the page, each figure as 16-bit codes to keep the page small."""
    count, values = len(flow.layers), np.stack(flow.values)
    starts = evenly(len(values), max(40, min(MOST_COLUMNS, MOST_CELLS // count)))
    ends = [np.fmax.reduceat(values, starts)]
    if len(starts) < len(values):
        ends.append(np.fmin.reduceat(values, starts))
    norms = values[:, FIGURES.index("norm")]
    there = np.isfinite(norms).sum(axis=0).tolist()  # a log has null for NaN and for no gradient
    return {
        "layers": flow.layers,
        "classes": (*flow.classes, *[""] * count)[:count],
        "marks": find_marks(
            [one if had else None for one, had in zip(norms[-1].tolist(), there, strict=True)]
        ),
        "x": [flow.updates[start] for start in starts],
        "figures": [
            {"name": name, **_coded(np.stack([end[:, index] for end in ends]), log=name != "zeros")}
            for index, name in enumerate(FIGURES)
            if np.isfinite(values[:, index]).any()
        ],
        "row": max(3, min(24, 540 // count)),  # pixels of a layer in the heat map
    }


def _coded(ends: Numbers, *, log: bool) -> dict[str, Any]:
    """Encode values: 0 for no value, 1 for zero, 2 to 65,535 evenly from the smallest to the largest."""
    with np.errstate(divide="ignore"):
        scaled = np.log10(ends) if log else ends
    shown = scaled[np.isfinite(scaled)]
    least, most = (float(shown.min()), float(shown.max())) if log and len(shown) else (0.0, 1.0)
    share = np.clip((scaled - least) / ((most - least) or 1.0), 0, 1)
    codes = np.select([np.isnan(ends), ends == 0], [0, 1], 2 + np.round(share * 65_533)).astype("<u2")
    packed = [base64.b64encode(one.tobytes()).decode() for one in codes]
    return {"log": log, "least": least, "most": most, **dict(zip(("high", "low"), packed, strict=False))}
