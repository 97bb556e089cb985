"""The page of a run: its tables in Markdown, two pictures, and the table of docs/gpu.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import table


def render(raw: Mapping[str, Any], drawn: Sequence[str]) -> str:
    """Return the page."""
    from benchmarks.gpu.__main__ import verdict

    what = "Rehearsal" if raw["rehearsal"] else "Measured"
    on = ", ".join(f"{name} {version}" for name, version in raw["versions"].items())
    memory = f", {raw['memory']}" if raw["memory"] else ""
    told = f", driver {raw['driver']}" if raw["driver"] else ""
    rows = [
        (
            one["name"],
            "not reached" if one["seconds"] < 0 else verdict(one),
            f"{max(0.0, one['seconds']):.0f}",
        )
        for one in raw["sections"]
    ]
    lines = [
        f"# {what} on {raw['device']}, {raw['date']}",
        "",
        f"{raw['device']}{memory}{told}. {raw['system']}. {on}.",
        "",
        "Ratios are within this run. A figure in bold is over its limit.",
        "",
        *table(("section", "result", "seconds"), rows),
        *[line for name in drawn for line in ("", f"![{name}]({name})")],
    ]
    figures = [one for section in raw["sections"] for one in section["figures"]]
    for name in dict.fromkeys(one["table"] for one in figures):
        mine = [one for one in figures if one["table"] == name]
        columns = [*dict.fromkeys(one["what"] for one in mine)]
        cells = {(one["row"], one["what"]): _shown(one) for one in mine}
        body = [
            (row, *[cells.get((row, column), "") for column in columns])
            for row in dict.fromkeys(one["row"] for one in mine)
        ]
        lines += ["", f"## {name[0].upper()}{name[1:]}", "", *table((name, *columns), body)]
    return "\n".join(lines) + "\n"


def _shown(figure: Mapping[str, Any]) -> str:
    value, limit = figure["value"], figure["limit"]
    text = value.replace("|", "/").replace("\n", " ") if isinstance(value, str) else f"{value:.4g}"
    is_over = limit is not None and (isinstance(value, str) or not value <= limit)
    return f"**{text}**" if is_over else text


def pictures(raw: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw bytes within budgets, and speed beside the loop by hand; return the names of the files."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return []
    figures = [one for section in raw["sections"] for one in section["figures"]]
    drawn: list[str] = []
    for name, tables, whats, label in (
        ("budgets.png", ("budgets",), ("steps 2 to 10: allocated", "reserved"), "share of the budget"),
        (
            "speed.png",
            ("speed",),
            ("step", "window", "BatchLoss", "accelerate"),
            "time over the loop by hand",
        ),
    ):
        mine = [one for one in figures if one["table"] in tables and not isinstance(one["value"], str)]
        rows = [*dict.fromkeys(one["row"] for one in mine if one["what"] in whats)]
        if not rows:
            continue
        figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.35 * len(rows)), layout="constrained")
        height = 0.8 / len(whats)
        for index, what in enumerate(whats):
            found = {one["row"]: one["value"] for one in mine if one["what"] == what}
            places = [place + index * height for place, row in enumerate(rows) if row in found]
            axes.barh(places, [found[row] for row in rows if row in found], height, label=what)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_yticks([place + 0.4 - height / 2 for place in range(len(rows))], rows)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.legend(loc="lower right", fontsize="small")
        figure.savefig(folder / name, dpi=110)
        pyplot.close(figure)
        drawn.append(name)
    return drawn
