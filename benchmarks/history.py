"""The history of the benchmarks: a file per machine, a JSON line per run, and the picture of all of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.report import slug
from benchmarks.results import Raw
from benchmarks.thresholds import over, ratio

FOLDER = Path("benchmarks/history")
PICTURE = Path("docs/history.svg")
LEFT, WIDE, ROW, HEAD = 150, 330, 46, 58  # pixels: names, curves, a case, the title of a machine

Record = Mapping[str, Any]


def record_of(raw: Raw) -> Record:
    """What a run leaves behind: CPU time relative to the hand-written loop, as median and its interval."""
    ratios = {race.case.name: ratio(race, "anybatch", "cpu") for race in raw.races}
    return {
        "date": raw.date,
        "hardware": raw.hardware,
        "versions": {name: raw.versions[name] for name in ("torch", "anybatch")},
        "cpu": {name: [round(x, 4) for x in (one.median, one.low, one.high)] for name, one in ratios.items()},
        "thousand": {
            race.case.name: round(over(race, 1_000), 4) for race in raw.races if race.training.get("hand")
        },
        "limit": {
            race.case.name: race.case.threshold for race in raw.races if race.case.threshold is not None
        },
    }


def append(raw: Raw, folder: Path = FOLDER) -> Path:
    """Add the run to the file of its machine."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{slug(raw.hardware)}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record_of(raw)) + "\n")
    return path


def read(folder: Path = FOLDER) -> list[list[Record]]:
    """The runs of each machine, oldest first."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jsonl"))]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def draw(machines: Sequence[Sequence[Record]]) -> str:
    """All runs as SVG: a curve for each case that has a limit, for light and dark screens."""
    parts, y = [], 0
    for runs in machines:
        cases = list(dict.fromkeys(name for run in runs for name in run["limit"]))
        dates = " to ".join(dict.fromkeys((runs[0]["date"], runs[-1]["date"])))
        parts += [f'<text x="16" y="{y + 26}" class="bold">{escape(runs[0]["hardware"])}</text>']
        told = f"{dates}, runs: {len(runs)}; the dashed line is the limit"
        parts += [f'<text x="16" y="{y + 46}" class="soft">{told}</text>']
        y += HEAD
        for name in cases:
            parts += _case(name, runs, y)
            y += ROW
        y += 12
    return _SVG.format(height=max(y, HEAD), body="\n".join(parts))


def _case(name: str, runs: Sequence[Record], top: int) -> Iterator[str]:
    limit = [run["limit"][name] for run in runs if name in run["limit"]][-1]
    shown = [(index, run["cpu"][name]) for index, run in enumerate(runs) if name in run["cpu"]]
    values = [limit, 1.0, *[value for _, three in shown for value in three]]
    low, high = min(values), max(values)

    def x(index: int) -> float:
        return round(LEFT + 8 + (WIDE - 16) * (index / (len(runs) - 1) if len(runs) > 1 else 0.5), 1)

    def y(value: float) -> float:
        return round(top + 8 + (ROW - 18) * (1 - (value - low) / ((high - low) or 1)), 1)

    last = shown[-1][1][0]
    yield f'<text x="16" y="{top + 27}">{escape(name)}</text>'
    yield f'<path class="limit" d="M{LEFT} {y(limit)}H{LEFT + WIDE}"/>'
    yield f'<path class="curve" d="M{"L".join(f"{x(index)} {y(three[0])}" for index, three in shown)}"/>'
    for index, (median, least, most) in shown:
        yield f'<path class="range" d="M{x(index)} {y(least)}V{y(most)}"/>'
        yield f'<circle cx="{x(index)}" cy="{y(median)}" r="3"/>'
    kind = "over" if last > limit else "good"
    yield f'<text x="{LEFT + WIDE + 14}" y="{top + 27}" class="{kind}">{last:.3f}</text>'
    yield f'<text x="{LEFT + WIDE + 66}" y="{top + 27}" class="soft">limit {limit:g}</text>'


_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" font-family="sans-serif" font-size="14">
<title>CPU time of one update relative to the hand-written loop, run by run</title>
<style>
  svg {{ --page: #fff; --text: #1f2328; --soft: #59636e; --line: #0b61c9; --over: #bc4c00; --good: #1a7f37; }}
  @media (prefers-color-scheme: dark) {{
    svg {{ --page: #14181d; --text: #e6edf3; --soft: #9198a1; }}
    svg {{ --line: #79b4ff; --over: #ffa657; --good: #56d364; }}
  }}
  text {{ fill: var(--text); }} .soft {{ fill: var(--soft); font-size: 12px; }} .bold {{ font-weight: 600; }}
  .over {{ fill: var(--over); }} .good {{ fill: var(--good); }}
  circle {{ fill: var(--line); }} path {{ fill: none; stroke: var(--line); }}
  .curve {{ stroke-width: 2; }} .range {{ stroke-width: 5; opacity: 0.35; }}
  .limit {{ stroke: var(--soft); stroke-dasharray: 4 4; }}
</style>
<rect width="640" height="{height}" rx="8" style="fill: var(--page)"/>
{body}
</svg>
"""
