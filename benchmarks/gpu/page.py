"""The page of a run, its pictures, its verdicts, and the table of docs/gpu.md."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import table

Found = Mapping[str, Any]  # of a section, as it wrote it


def verdict(found: Found | None) -> str:
    """Return a section's line: holds, falls short, not reached, not run, or crashed."""
    if found is None:
        return "not reached"
    if found["crashed"]:
        return f"crashed: {'; '.join(found['crashed'])}"
    judged = [one for one in found["figures"] if one["limit"] is not None and one["value"] is not None]
    needs = f"needs {', '.join(found['needs'])}" if found["needs"] else ""
    if not judged:
        return f"not run: {needs or 'nothing to judge on this device'}"
    short = [one for one in judged if not one["value"] <= one["limit"]]
    tail = f"; some cases not run: {needs}" if needs else ""
    if found["late"]:
        tail += f"; not reached: {', '.join(found['late'])}"
    if short:
        worst = [f"{one['case']}: {one['name']} {one['value']:.4g} (limit {one['limit']:g})" for one in short]
        return f"falls short in {len(short)} of {len(judged)}: {'; '.join(worst[:6])}{tail}"
    return f"holds ({len(judged)} figures){tail}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _section(name: str, found: Found | None) -> list[str]:
    lines = ["", f"## {name}", "", verdict(found)]
    if not found or not found["figures"]:
        return lines
    columns = list(dict.fromkeys(one["name"] for one in found["figures"]))
    rows: dict[str, dict[str, str]] = {}
    for one in found["figures"]:
        mark = (
            "**"
            if one["limit"] is not None and one["value"] is not None and one["value"] > one["limit"]
            else ""
        )
        rows.setdefault(one["case"], {})[one["name"]] = f"{mark}{_shown(one['value'])}{mark}"
    body = [(case, *(cells.get(column, "") for column in columns)) for case, cells in rows.items()]
    return [*lines, "", *table(("case", *columns), body)]


def write(folder: Path, head: Mapping[str, Any], sections: Mapping[str, Found | None]) -> None:
    """Write the raw figures, the page and the pictures."""
    raw = {"head": head, "sections": sections, "verdicts": {n: verdict(f) for n, f in sections.items()}}
    (folder / "gpu.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    lines = [f"# anybatch on {head['device']}", "", *(f"- {key}: {value}" for key, value in head.items())]
    lines += ["", *table(("section", "result"), [(n, verdict(f)) for n, f in sections.items()])]
    for name, found in sections.items():
        lines += _section(name, found)
    lines += ["", "## Pictures", "", _draw(folder, sections)]
    (folder / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _draw(folder: Path, sections: Mapping[str, Found | None]) -> str:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "not drawn: needs matplotlib"
    told: list[str] = []
    wanted = {
        "budgets": (("allocated 10", "reserved 10"), "bytes / budget, step 10"),
        "speed": (("step", "window", "batch loss", "accelerate", "fabric"), "seconds / loop by hand"),
    }
    for name, (columns, label) in wanted.items():
        figures = [
            one for one in (sections.get(name) or {"figures": []})["figures"] if one["name"] in columns
        ]
        if not figures:
            continue
        cases = list(dict.fromkeys(one["case"] for one in figures))
        figure = Figure(figsize=(8, 1 + 0.3 * len(cases)), layout="constrained")
        axes = figure.add_subplot()
        for column in columns:
            points = [(one["value"], cases.index(one["case"])) for one in figures if one["name"] == column]
            axes.plot([x for x, _ in points], [y for _, y in points], "o", label=column)
        axes.axvline(1, color="gray")
        axes.set_yticks(range(len(cases)), cases)
        axes.set_xlabel(label)
        axes.legend(fontsize=7)
        figure.savefig(folder / f"{name}.png", dpi=100)
        told.append(f"![{label}]({name}.png)")
    return "\n".join(told) or "nothing to draw yet"


BEGIN, END = "<!-- runs: written by python -m benchmarks.gpu -->", "<!-- end of runs -->"


def rows_of(results: Path) -> list[Sequence[str]]:
    """Return a row for each run that lies in the folder of results."""
    rows: list[Sequence[str]] = []
    for path in sorted(results.glob("*/gpu.json")):
        raw = json.loads(path.read_text(encoding="utf-8"))
        held = sum(one.startswith("holds") for one in raw["verdicts"].values())
        head = raw["head"]
        page = f"[page](../benchmarks/results/gpu/{path.parent.name}/gpu.md)"
        rows.append((head["date"], head["device"], head["torch"], f"{held} of {len(raw['verdicts'])}", page))
    return rows


def rewrite(docs: Path, readme: Path, results: Path) -> None:
    """Write the table of docs/gpu.md and the status line of README from the runs that are there."""
    rows = rows_of(results)
    header = ("date", "device", "torch", "sections that hold", "")
    body = "\n".join(table(header, rows)) if rows else "No run on a card yet."
    text = docs.read_text(encoding="utf-8")
    text = re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{body}\n\n{END}", text, flags=re.DOTALL)
    docs.write_text(text, encoding="utf-8")
    text = readme.read_text(encoding="utf-8")
    readme.write_text(re.sub(r"\*\*Status: alpha\.\*\*.*", lambda _: status(rows), text), encoding="utf-8")


def status(rows: Sequence[Sequence[str]]) -> str:
    """Return README's status line."""
    if not rows:
        return (
            "**Status: alpha.** Nobody has run it on a GPU yet: please run `make gpu` and paste its page "
            "in an issue."
        )
    date, device, _, held, _ = rows[-1]
    return (
        f"**Status: alpha.** Last measured on {device} ({date}): {held} sections hold "
        "([what falls short](docs/gpu.md)). Please run `make gpu` on yours."
    )
