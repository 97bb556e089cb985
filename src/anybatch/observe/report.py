"""A run, or several over one another, as one self-contained HTML page that loads nothing."""

import base64
import hashlib
import html
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from anybatch.core import DataError, format_bytes, format_seconds
from anybatch.observe.charts import (
    MARK_RULE,
    MOST_POINTS,
    MOST_SERIES,
    Chart,
    RunEvent,
    charts,
    constants,
    events,
    laid_over,
    marks_on_axis,
    pack_flow,
    points,
    served,
    validations,
)
from anybatch.observe.memory import COLOURS
from anybatch.observe.run_log import FlowLog, Line, RunLog, mapping, number, texts, whole

MOST_ROWS = 200  # rows of a table
_FIGURES = {
    "mean": "mean of absolute values",
    "largest": "largest absolute value",
    "norm": "2-norm",
    "zeros": "share of zeros",
    "ratio": "norm of the update / norm of the weights",
}
_HEAT = "Gradient flow of all layers over updates; the table below has the figures."
_LAYER: Chart = {
    "unit": "",
    "series": [],
    "layer": True,
    "label": "Figures of the chosen layer over updates.",
}
_LAYER_CHARTS: list[Chart] = [
    {
        **_LAYER,
        "id": "flow",
        "title": "Gradient flow, layer by layer",
        "log": False,
        "heat": True,
        "label": _HEAT,
    },
    {**_LAYER, "id": "layer", "title": "One layer", "log": True},
    {**_LAYER, "id": "layer-zeros", "title": "Share of zeros", "log": False},
]
_SMOOTHED = (0, 5, 20, 100)  # points over which an exponential mean goes
_MACHINE = ("time", "model", "parameters", "loss", "optimizer", "precision", "batch_size", "seed")


def report_page(folder: str | Path, *others: str | Path) -> str:
    """Return the page of a run as HTML, or one page that compares several; the same logs give the same page.

    Several runs, at most 8, have one curve each in every chart, and their results and the options that differ
    side by side. The page forbids all network requests.

    Raises:
        DataError: a folder has no log of this version of anybatch or an earlier one; or there are too many.
    """
    runs = [RunLog(one) for one in (folder, *others)]
    if len(runs) > MOST_SERIES:
        raise DataError(
            f"Expected at most {MOST_SERIES} runs on one page, got {len(runs)}. Write several pages."
        )
    return _one(runs[0]) if len(runs) == 1 else _several(runs)


def _one(run: RunLog) -> str:
    drawn, same = _varying(charts(run) if run.steps else [])
    happened = events(run)
    flow = pack_flow(run.flow) if run.flow.updates else None
    layers = _LAYER_CHARTS if flow and flow["figures"] else []
    start: Line = run.starts[0] if run.starts else {}
    model = run.settings.get("recipe") or start.get("model")
    name = f"{model}: {run.name}" if model else run.name
    body = [
        f"<header><h1>{_text(name)}</h1><p>{_text(_status(run))}</p>{_cards(_totals(run))}</header>",
        *map(_note, run.notes),
        _updates(drawn, same, len(run.steps), happened),
        _section("Gradient flow", _flow(flow, run.flow) if flow else ""),
        _section("Memory by owner", _memory(run.plans)),
        _section("Servers and workers", _pairs(served(run))),
        _section("Events", _table(("what", "updates", "how many"), map(_event, happened))),
        _section("Epochs", _epochs(run)),
        _section("Plan", _plans(run.plans)),
        _section("Command that repeats it", _pre(shlex.join(texts(start.get("command"))))),
        _section("Machine and model", _pairs(_machine(start))),
        _section("Options", _pairs(run.settings)),
    ]
    data = {"x": points(run), "last": run.steps[-1] if run.steps else 0, "events": marks_on_axis(happened)}
    return _page(name, body, (*drawn, *layers), data | {"flow": flow})


def _several(runs: Sequence[RunLog]) -> str:
    names = [_short(run, runs) for run in runs]
    drawn, same = _varying(laid_over(dict(zip(names, runs, strict=True))))
    head, updates = ("", *names), [step for run in runs for step in run.steps]
    options = [{**_machine(run.starts[0] if run.starts else {}), **run.settings} for run in runs]
    body = [
        f"<header><h1>{len(runs)} runs</h1></header>",
        _side_by_side(head, [{"": _status(run), **_totals(run)} for run in runs]),
        *[_note(f"{name}: {note}") for name, run in zip(names, runs, strict=True) for note in run.notes],
        _updates(drawn, same, max(len(run.steps) for run in runs), ()),
        _section("Options and machines that differ", _side_by_side(head, options, differ=True)),
    ]
    ends = {"x": [min(updates, default=0)], "last": max(updates, default=0)}
    return _page(", ".join(names), body, drawn, {**ends, "events": [], "flow": None})


def _varying(found: Iterable[Chart]) -> tuple[list[Chart], str]:
    """Return the charts whose values change, and a text about the others."""
    told = {chart["id"]: text for chart in found if (text := constants(chart))}
    return [chart for chart in found if chart["id"] not in told], "; ".join(told.values())


def _short(run: RunLog, runs: Sequence[RunLog]) -> str:
    """Return the name of a run's folder, or its whole path if another run's folder has the same name."""
    return run.name if [one.name for one in runs].count(run.name) == 1 else str(run.folder)


def _side_by_side(head: Sequence[str], columns: Sequence[Mapping[str, Any]], *, differ: bool = False) -> str:
    rows = [(name, [_value(one.get(name)) for one in columns]) for name in dict.fromkeys(chain(*columns))]
    return _table(head, [(name, *told) for name, told in rows if not differ or len({*told}) > 1])


def _page(name: str, body: Iterable[str], drawn: Iterable[Chart], data: Mapping[str, Any]) -> str:
    found = {chart["id"]: chart for chart in drawn}
    style = _resource("report.css")
    script = _resource("report.js") if found else ""
    return _resource("report.html").format(
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        title=_text(name),
        style=style,
        body="\n".join(part for part in body if part),
        data=_json({**data, "charts": found}),
        script=script,
    )


def _json(value: object) -> str:
    """Return JSON without `<`, so that no name in it ends an element of the page."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _hash(text: str) -> str:  # for the content security policy
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _resource(name: str) -> str:
    return resources.files(__package__ or "").joinpath(name).read_text("utf-8")


def _status(run: RunLog) -> str:
    total = whole(run.starts[-1].get("total_updates")) if run.starts else None
    of = f" of {total:,}" if total else ""
    if not run.steps:
        return f"No update was made yet{of}."
    made = f"{run.steps[-1]:,}{of} updates were made."
    if run.stopped is None:
        return f"{made} The log has no end: the run goes on, or was killed."
    if total and run.steps[-1] >= total:
        return made
    return f"{made} The run stopped before its end{f': {run.stopped}' if run.stopped else ''}."


def _totals(run: RunLog) -> dict[str, str]:
    """Return the results of a run and what it took, by name."""
    totals = {f"test {name}": _value(value) for name, value in run.test.items() if name != "updates"}
    for name, best in (("loss", min), ("accuracy", max)):
        values = [number(mapping(one.get("validation")).get(name)) for one in run.epochs]
        if known := [value for value in values if math.isfinite(value)]:
            epoch = run.epochs[values.index(best(known))].get("epoch")
            totals[f"best validation {name}"] = f"{best(known):.4g}, epoch {epoch}"
    if not run.steps:
        return totals
    rows = np.nansum(run.column("rows"))
    totals |= {"updates": f"{run.steps[-1]:,}", "rows trained": f"{rows:,.0f}"}
    seconds, memory = (float(np.fmax.reduce(run.column(name))) for name in ("seconds", "memory"))
    if seconds > 0:
        totals["training time"] = format_seconds(seconds)
    if memory >= 0:  # not NaN
        totals["peak memory, process or GPU"] = format_bytes(memory)
    if budget := run.settings.get("memory"):
        totals["budget of a step"] = str(budget)
    return totals


def _cards(totals: Mapping[str, str]) -> str:
    cards = ""
    for name, told in totals.items():
        value, comma, more = told.partition(", ")  # such as "0.25, epoch 3"
        cards += f"<div><dt>{_text(name + comma + more)}</dt><dd>{_text(value)}</dd></div>"
    return f'<dl class="totals">{cards}</dl>' if cards else ""


def _note(note: str) -> str:
    return f'<p class="note">{_text(note)}</p>'


def _updates(drawn: Sequence[Chart], same: str, count: int, happened: Sequence[RunEvent]) -> str:
    kinds = [
        f'<span><i class="event e{index}"></i> {_text(kind)}</span>'
        for index, kind in enumerate(dict.fromkeys(event.kind for event in happened))
    ]
    told = (
        "Drag over a chart to zoom in all of them; double-click to see all again. Keys: left and right move "
        "the line, + and - zoom, Escape shows all. "
    )
    if count > MOST_POINTS:
        told += f"The {count:,} updates share {MOST_POINTS} points: a line is their mean, its band goes "
        told += "from the smallest to the largest value. "
    choices = "".join(f'<option value="{one}">{one or "none"}</option>' for one in _SMOOTHED)
    inside = [
        f'<p class="hint">{told}</p><p class="choice"><label>Smoothing, in points of a curve '
        f'<select id="smoothing">{choices}</select></label></p>{_grid(drawn)}' * bool(drawn),
        f'<p class="legend">Events, at the bottom of each chart: {" ".join(kinds)}</p>'
        * bool(kinds and drawn),
        f'<p class="constant">Always the same: {_text(same)}.</p>' * bool(same),
    ]
    return _section("Over the updates", "".join(inside))


def _grid(drawn: Iterable[Chart]) -> str:
    return f'<div class="grid">{"".join(map(_figure, drawn))}</div>'


def _figure(chart: Chart) -> str:
    unit = ", ".join([chart["unit"]] * bool(chart["unit"]) + ["logarithmic"] * chart["log"])
    place, title, label = (_text(chart[name]) for name in ("id", "title", "label"))
    return (
        f'<figure id="{place}"><figcaption><h3>{title}</h3><small>{_text(unit)}</small></figcaption>'
        f'<output></output><div class="plot"><svg tabindex="0" role="img" aria-label="{label}"></svg></div>'
        "</figure>"
    )


def _flow(packed: Mapping[str, Any], flow: FlowLog) -> str:
    if not packed["figures"]:
        return "<p>No layer had a gradient.</p>"
    named = [f"{name} {kind}".strip() for name, kind in zip(packed["layers"], packed["classes"], strict=True)]
    more = "A cell shows the largest value of its updates. " * ("low" in packed["figures"][0])
    heat, *one = _LAYER_CHARTS
    return (
        f'<p class="hint">Click a layer, or use up and down, to see its figures. {more}{_text(MARK_RULE)}</p>'
        f'<p class="choice"><label>Figure <select id="figure">'
        f"{_options(_FIGURES[one['name']] for one in packed['figures'])}</select></label> "
        f'<label>Layer <select id="layer-choice">{_options(named)}</select></label></p>'
        f'{_figure(heat)}<p class="legend"><span id="least"></span><i></i><span id="most"></span>'
        f'<i class="zero"></i>zero<i class="none"></i>no gradient</p>{_grid(one)}{_layers(packed, flow)}'
    )


def _options(names: Iterable[str]) -> str:
    return "".join(f'<option value="{index}">{_text(name)}</option>' for index, name in enumerate(names))


def _layers(packed: Mapping[str, Any], flow: FlowLog) -> str:
    columns = zip(packed["layers"], packed["classes"], packed["marks"], *flow.values[-1], strict=True)
    rows = "".join(
        f'<tr><td><button data-layer="{index}" aria-pressed="false">{_text(name)}</button></td>'
        f"{_cells([kind, mark, *map(_value, figures)])}</tr>"
        for index, (name, kind, mark, *figures) in enumerate(columns)
    )
    summary = f"<summary>{len(flow.layers)} layers: marks and last figures</summary>"
    table = f"{_head(('layer', 'class', 'mark', *_FIGURES))}<tbody>{rows}</tbody>"
    return f'<details id="layers">{summary}<div class="scroll"><table>{table}</table></div></details>'


def _memory(plans: Sequence[Line]) -> str:
    plan = plans[-1] if plans else {}
    owners = {name: number(size) for name, size in mapping(plan.get("bytes")).items()}
    owners = {name: size for name, size in owners.items() if size > 0}
    largest = max(owners.values(), default=0.0)
    rows = "".join(
        f'<tr><th scope="row">{_text(name)}</th><td>{format_bytes(size)}</td><td><svg class="bar" '
        f'aria-hidden="true"><rect width="{100 * size / largest:.4g}%" height="100%" '
        f'fill="{COLOURS.get(name, COLOURS["other"])}"/></svg></td></tr>'
        for name, size in owners.items()
    )
    total = f"In all {format_bytes(sum(owners.values()))}, from update {_value(plan.get('step'))} on."
    if "activations" not in owners:  # the cut comes from readings of whole steps
        total += " What is left of the budget is for a micro-batch."
    return f'<p class="hint">{_text(total)}</p><table class="bars">{rows}</table>' if rows else ""


def _event(event: RunEvent) -> tuple[str, str, str]:
    updates = f"{event.first:,}" + (f" to {event.last:,}" if event.last > event.first else "")
    return event.kind, updates, f"{event.amount:,}"


def _epochs(run: RunLog) -> str:
    fields = ["epoch", "updates", "loss", "learning_rate", "seconds", "samples_per_second"]
    fields += [
        name for name in ("dropped", "skipped") if any(number(one.get(name)) > 0 for one in run.epochs)
    ]
    titles = [name.replace("samples", "rows").replace("_", " ") for name in fields]
    titles[3:3] = [f"validation {name}" for name in validations(run)]
    rows: list[list[str]] = []
    for one in run.epochs:
        values = [one.get(name) for name in fields]
        values[3:3] = map(mapping(one.get("validation")).get, validations(run))
        rows.append([*map(_value, values)])
    return _table(titles, rows)


def _plans(plans: Sequence[Line]) -> str:
    return "".join(
        f"<h3>From update {_text(_value(plan.get('step')))} on</h3>{_pre(str(plan['text']))}"
        for plan in plans[-10:]
        if plan.get("text")
    )


def _machine(start: Line) -> Mapping[str, Any]:
    known = {name.replace("_", " "): start[name] for name in _MACHINE if start.get(name) is not None}
    return {**known, **mapping(start.get("machine"))}


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{title}</h2>{inside}</section>" if inside else ""


def _pre(text: str) -> str:
    kind = "" if "\n" in text else "command"  # a single line wraps
    return f'<pre tabindex="0" class="{kind}">{_text(text)}</pre>' if text else ""


def _pairs(values: Mapping[str, Any]) -> str:
    inside = "".join(
        f'<tr><th scope="row">{_text(name)}</th><td>{_text(_value(value))}</td></tr>'
        for name, value in values.items()
        if value is not None
    )
    return f'<div class="scroll"><table class="pairs">{inside}</table></div>' if inside else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = [*rows]
    if not rows:
        return ""
    if len(rows) > MOST_ROWS:
        gap = [f"{len(rows) - MOST_ROWS:,} more rows", *[""] * (len(head) - 1)]
        rows[MOST_ROWS // 2 : -MOST_ROWS // 2] = [gap]
    lines = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table>{_head(head)}<tbody>{lines}</tbody></table></div>'


def _head(names: Iterable[str]) -> str:
    return f"<thead><tr>{_cells(names, 'th')}</tr></thead>"


def _cells(texts: Iterable[str], kind: str = "td") -> str:
    return "".join(f"<{kind}>{_text(text)}</{kind}>" for text in texts)


def _value(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}" if abs(value) < 10**15 else "very large"
        case float():
            return f"{value:.4g}" if math.isfinite(value) else ""
        case str():
            return value
        case _:
            return json.dumps(value)


def _text(text: object) -> str:
    """Escape text for a page, also within quotes; replace lone surrogates, which UTF-8 cannot encode."""
    return html.escape(str(text).encode("utf-8", "replace").decode("utf-8"))
