"""What the benchmarks of memory share: records kept as JSON, a report, a judgement, children."""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.machine import hardware, versions
from benchmarks.report import table
from benchmarks.thresholds import Verdict

Record = Mapping[str, Any]
"""One measurement, as JSON knows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """Everything one run measured, and on what."""

    kind: str
    config: str
    date: str
    hardware: str
    versions: Mapping[str, str]
    records: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list[str])

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Raw":
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @property
    def file_name(self) -> str:
        """`what_hardware_date.md`, in lower case and without blanks."""
        on = re.sub(r"[^a-z0-9]+", "-", self.hardware.lower()).strip("-")
        return f"{self.kind}-{self.config}_{on}_{self.date}.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One benchmark: how records are judged and shown.

    Attributes:
        kind: what file names begin with.
        title: of the report.
        judge: every threshold with what was measured.
        sections: lines of Markdown after the thresholds.
        packages: whose versions the report names.
    """

    kind: str
    title: str
    judge: Callable[[Sequence[Record]], Iterable[Verdict]]
    sections: Callable[[Sequence[Record]], Iterable[str]]
    packages: tuple[str, ...] = ("transformers",)

    def parser(self) -> argparse.ArgumentParser:
        """The options that all of them have."""
        parser = argparse.ArgumentParser(description=self.title)
        parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="where results go")
        parser.add_argument("--raw", type=Path, help="report and judge these raw results, measure nothing")
        parser.add_argument("--child", help=argparse.SUPPRESS)  # one part, in a process of its own
        parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
        return parser

    def collected(
        self, records: Iterable[Record], *, config: str, device: str = "cpu", notes: Sequence[str] = ()
    ) -> Raw:
        """Records with what they were measured on."""
        return Raw(
            kind=self.kind,
            config=config,
            date=date.today().isoformat(),
            hardware=hardware(device),
            versions=dict(versions(self.packages)),
            records=[dict(record) for record in records],
            notes=list(notes),
        )

    def render(self, raw: Raw) -> str:
        """The whole report."""
        on = ", ".join(f"{name} {version}" for name, version in raw.versions.items())
        threads = "" if "cpu" not in raw.records[0].get("device", "cpu") else ", one thread"
        judged = [
            (v.what, f"{v.measured:.5g}", f"{v.limit:g}", "pass" if v.holds else "FAIL")
            for v in self.judge(raw.records)
        ]
        lines = [
            f"# {self.title} ({raw.config}), {raw.date}",
            *("", f"{raw.hardware}{threads}. {on}."),
            *("", "## Thresholds", "", *table(("threshold", "measured", "at most", "result"), judged)),
            *self.sections(raw.records),
            *(line for note in raw.notes for line in ("", note)),
        ]
        return "\n".join(lines) + "\n"

    def finish(self, raw: Raw, folder: Path, *, keep: bool = True) -> int:
        """Write raw results and report, say which thresholds do not hold; the exit code."""
        path = folder / raw.file_name
        if keep:
            raw.save(path.with_suffix(".json"))
        text = self.render(raw)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        failed = [verdict.what for verdict in self.judge(raw.records) if not verdict.holds]
        print(f"\n{text}\nreport: {path}")
        print("\n".join(f"FAILED: {what}" for what in failed) or "all thresholds hold")
        return 1 if failed else 0


def child(
    module: str, arguments: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> list[Record]:
    """Records of one part, measured in a process of its own; one with `error` if it did not end well."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "records.jsonl"
        command = [sys.executable, "-m", module, *arguments, "--out", str(out)]
        code = subprocess.run(command, check=False, env=environment).returncode
        records = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return records if code == 0 else [*records, {"model": arguments[-1], "error": f"exit code {code}"}]


def write_lines(records: Iterable[Record], path: Path) -> None:
    """Each record as soon as it is there, so that a process that dies leaves the earlier ones."""
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
            file.flush()


def sound(records: Sequence[Record]) -> Iterator[Record]:
    """Those that were measured."""
    return (record for record in records if "error" not in record)


def broken(records: Sequence[Record]) -> Iterator[Verdict]:
    """A run that ended early passes no threshold."""
    for record in records:
        if "error" in record:
            yield Verdict(what=f"{record['model']}: {record['error'][:100]}", measured=1, limit=0)
