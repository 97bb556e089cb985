"""The report: raw results as Markdown tables, aligned so that they read well in a terminal too."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.ratios import Ratio
from benchmarks.results import Exactness, Head, Memory, Race, Raw, names
from benchmarks.thresholds import Verdict, growth, head_time, over, ratio

PAGES = Path("README.md"), Path("docs/speed.md")
BEGIN, END = "<!-- bench: written by python -m benchmarks --page -->", "<!-- end of bench -->"
MODELS = {
    "mlp": "tiny MLP",
    "mlp-window": "the same, a window",
    "mlp-uncut": "the same, not split",
    "lenet5": "LeNet-5",
    "lenet5-window": "the same, a window",
    "bert": "BERT-tiny, `ab.ModelLoss`",
    "resnet": "ResNet-18, GroupNorm",
    "gpt": "GPT-like, 4 layers",
}
SPANS = (20, 200, 1_000)  # updates, from the first one on


def render(raw: Raw, verdicts: Sequence[Verdict]) -> str:
    """The whole report."""
    versions = ", ".join(f"{name} {version}" for name, version in raw.versions.items())
    lines = [
        f"# anybatch benchmarks ({raw.config}), {raw.date}",
        "",
        f"{raw.hardware}, one thread. {versions}, commit {raw.commit or 'unknown'}.",
        *("", "## Thresholds", "", *_thresholds(verdicts)),
        *("", "## Time of a plain update over the hand-written loop's, same cut", "", *_races(raw.races)),
        "",
        "Medians of paired ratios, measured in turn in one process, with the 95 % interval of the median.",
        "Identical: after the race anybatch's weights are those of the hand-written loop, bit for bit.",
        "Garbage: objects per update that only the garbage collector frees (it is off while the clock runs).",
        *_trainings(raw.races),
        *("", "## Relative error in float64", "", *_exactness(raw.exactness)),
        "",
        "Gradient: micro-batches of unequal weight, against one whole-batch backward. Parameters: a few",
        "updates with equal weights, against the hand-written loop: a fair race is one where all end alike.",
    ]
    if raw.memory:
        lines += [
            *("", "## Peak tensor bytes of one update", "", *_memory(raw.memory)),
            "",
            "Held: parameters and optimizer state, part of the peaks. The batch is the caller's and not in",
            "them. Growth is that of the peak above what is held.",
        ]
    if raw.heads:
        title = "## Cross-entropy of a large vocabulary, in blocks over all logits at once"
        lines += [
            *("", title, "", *_heads(raw.heads)),
            "",
            "Time, and peak bytes with hidden and weight, of forward and backward in float32; errors in",
            "float64.",
        ]
    return "\n".join(lines) + "\n"


def file_name(raw: Raw) -> str:
    """`what_hardware_date.md`, in lower case and without blanks."""
    return f"steps-{raw.config}_{slug(raw.hardware)}_{raw.date}.md"


def slug(hardware: str) -> str:
    """Return the name of a machine as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table with padded columns, the first one to the left and the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (w - 1)}:" if i else "-" * w for i, w in enumerate(widths)]
    return [line(header), f"| {' | '.join(rule)} |", *(line(row) for row in rows)]


def _thresholds(verdicts: Sequence[Verdict]) -> list[str]:
    rows = [(v.what, f"{v.measured:.5g}", f"{v.limit:g}", "pass" if v.holds else "FAIL") for v in verdicts]
    return table(("threshold", "measured", "at most", "result"), rows)


def _races(races: Sequence[Race]) -> list[str]:
    header = (
        "case",
        "rows x micro-batches",
        "contestant",
        "wall",
        "95 %",
        "CPU",
        "95 %",
        "pairs",
        "garbage",
        "at most",
    )
    return table(header, [row for race in races for row in _race_rows(race)])


def _race_rows(race: Race) -> Iterator[tuple[str, ...]]:
    case = race.case
    cut = f"{case.rows} x {case.micro_batches}"
    yield (
        case.name,
        cut,
        "hand",
        f"{race.step_s * 1e3:.3g} ms",
        "",
        "",
        "",
        "",
        f"{race.garbage['hand']:.2g}",
        "",
    )
    for name in race.wall:
        if name == "hand":
            continue
        wall, cpu = ratio(race, name, "wall"), ratio(race, name, "cpu")
        limit = f"{case.threshold:g}" if name == "anybatch" and case.threshold else ""
        identical = " (identical)" if name == "anybatch" and not race.difference else ""
        clocks = (f"{wall.median:.3f}", _interval(wall), f"{cpu.median:.3f}", _interval(cpu))
        yield case.name, cut, name + identical, *clocks, str(wall.pairs), f"{race.garbage[name]:.2g}", limit


def _trainings(races: Sequence[Race]) -> list[str]:
    trained = [race for race in races if race.training.get("hand")]
    header = ("case", *(f"1 to {updates:,}" for updates in SPANS), "trainings", "at most")
    rows = [
        (
            *(race.case.name, *(f"{over(race, updates):.3f}" for updates in SPANS)),
            *(str(len(race.training["hand"])), f"{race.case.thousand:g}"),
        )
        for race in trained
    ]
    return [
        *("", "## CPU time of the first updates over the hand-written loop's", "", *table(header, rows), ""),
        "Sums from the first update on, the compared ones included; the updates after those measured as",
        "measured ones of their kind. At most: 1,000 updates.",
    ] * bool(trained)


def page(raw: Raw) -> str:
    """The table of README and docs/speed.md."""
    found = {race.case.name: race for race in raw.races}
    header = ("model, rows x micro-batches", "updates 1 to 20", "1 to 200", "1 to 1,000", "a plain update")
    rows = [
        (
            f"{model}, {race.case.rows} x {race.case.micro_batches}",
            *(f"{over(race, updates):.2f}" if race.training.get("hand") else "" for updates in SPANS),
            *(
                f"{ratio(race, peer, 'cpu').median:.2f}" if peer in race.cpu else ""
                for peer in ("anybatch", "accelerate", "fabric")
            ),
        )
        for model, race in ((model, found.get(name)) for name, model in MODELS.items())
        if race is not None
    ]
    head = f"{raw.hardware}, one thread, torch {raw.versions['torch']}, {raw.date}, commit {raw.commit}."
    return "\n".join([*table((*header, "accelerate", "Fabric"), rows), "", head])


def rewrite(raw: Raw, pages: Sequence[Path] = PAGES) -> None:
    """Write the table between the marks of the pages."""
    for path in pages:
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        path.write_text(f"{before}{BEGIN}\n\n{page(raw)}\n\n{END}{after}", encoding="utf-8")


def _interval(value: Ratio) -> str:
    return f"{value.low:.3f}..{value.high:.3f}" if value.pairs > 5 else ""  # fewer say nothing


def _exactness(entries: Sequence[Exactness]) -> list[str]:
    contestants = names(entry.gradient for entry in entries)
    rows = [
        (entry.task, what, *(f"{errors[name]:.1e}" if name in errors else "" for name in contestants))
        for entry in entries
        for what, errors in (("gradient", entry.gradient), ("parameters", entry.parameters))
    ]
    return table(("case", "of the", *contestants), rows)


def _memory(entries: Sequence[Memory]) -> list[str]:
    header = (
        "task",
        "contestant",
        "micro-batches",
        "held",
        "peak",
        "batch",
        "micro-batches",
        "peak",
        "batch",
        "growth",
    )
    rows = [
        (
            *(entry.case.task, name),
            *(str(entry.case.few), f"{entry.held:,}", f"{entry.few[name]:,}", f"{entry.batch[0]:,}"),
            *(str(entry.case.many), f"{entry.many[name]:,}", f"{entry.batch[1]:,}"),
            f"{growth(entry, name):.3%}",
        )
        for entry in entries
        for name in entry.few
    ]
    return table(header, rows)


def _heads(entries: Sequence[Head]) -> list[str]:
    header = ("words", "tokens", "width", "time", "pairs", "held", "peak", "all logits", "ratio", "error")
    rows = [
        (
            *(f"{size:,}" for size in (entry.case.vocabulary, entry.case.tokens, entry.case.width)),
            *(f"{head_time(entry).median:.3f}", str(head_time(entry).pairs), f"{entry.held:,}"),
            *(f"{entry.peak[name]:,}" for name in ("anybatch", "hand")),
            *(f"{entry.peak['anybatch'] / entry.peak['hand']:.3f}", f"{max(entry.error.values()):.1e}"),
        )
        for entry in entries
    ]
    return table(header, rows)
