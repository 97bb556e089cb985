"""`python -m benchmarks.gpu`: each section in a process of its own; a page and raw figures after each."""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from anybatch.core import accelerator, format_bytes
from benchmarks.gpu.page import pictures, render
from benchmarks.gpu.sections import SECTIONS, Bench, Figure, NeedsPackage, eight_lengths
from benchmarks.machine import hardware, versions

RESULTS = Path("benchmarks/results/gpu")
LEAST_FREE = 2 * 2**30  # bytes of a device
_TERM = 143  # exit code of a process that a signal has ended


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", help="such as mps; without it the accelerator of this machine")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all sections together")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS], metavar="SECTION")
    parser.add_argument(
        "--rehearse", action="store_true", help="sizes a hundred times smaller, also on a CPU"
    )
    parser.add_argument("--out", type=Path, help=f"folder; without it $OUT, or one in {RESULTS}")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--lengths", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--broken", help=argparse.SUPPRESS)  # a section that fails on purpose
    return parser.parse_args()


def child(options: argparse.Namespace) -> int:
    """Run one section; each figure is a line of JSON on the standard output as soon as it is there."""
    bench = Bench(options.device, "rehearse" if options.rehearse else "card")
    if options.lengths:
        print(json.dumps(eight_lengths(bench)))
        return 0
    if options.broken == options.section:
        raise RuntimeError(f"{options.section} is broken on purpose")
    try:
        for figure in SECTIONS[options.section][0](bench):
            print("figure " + json.dumps(asdict(figure)), flush=True)
    except NeedsPackage as error:
        print(f"needs {error}", flush=True)
    return 0


class Run:
    """The sections so far, and the files that hold them."""

    def __init__(self, options: argparse.Namespace, device: str, folder: Path) -> None:
        self.options, self.device, self.folder = options, device, folder
        self.began = time.monotonic()
        self.sections: list[dict[str, Any]] = []
        self.running: subprocess.Popen[str] | None = None
        place = torch.device(device)
        memory = None if place.type == "cpu" else accelerator.free_and_total(place)
        self.about = {
            "date": date.today().isoformat(),
            "device": accelerator.name_of(place) if place.type != "cpu" else hardware(),
            "kind": device,
            "memory": format_bytes(memory[1]) if memory else "",
            "driver": driver(),
            "system": platform.platform(),
            "rehearsal": bool(options.rehearse),
            "versions": dict(versions(("transformers", "accelerate", "lightning"))),
        }

    def section(self, name: str, seconds: float) -> dict[str, Any]:
        """Run one section in a process of its own, within some seconds; keep the figures that it gave."""
        command = [sys.executable, "-m", "benchmarks.gpu", "--section", name, "--device", self.device]
        command += ["--rehearse"] * self.options.rehearse
        command += ["--broken", self.options.broken] if self.options.broken else []
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # for deterministic products
        found: dict[str, Any] = {"name": name, "figures": [], "needs": "", "error": "", "seconds": 0.0}
        self.sections.append(found)
        began, errors = time.monotonic(), self.folder / f"{name}.log"
        with errors.open("w", encoding="utf-8") as log:
            self.running = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )
            signal.signal(signal.SIGALRM, lambda *_: self.end())
            signal.alarm(max(1, int(seconds)))
            assert self.running.stdout is not None
            for line in self.running.stdout:
                kind, _, rest = line.partition(" ")
                if kind == "figure":
                    found["figures"].append(json.loads(rest))
                elif kind == "needs":
                    found["needs"] = rest.strip()
            code = self.running.wait()
            signal.alarm(0)
            self.running = None
        found["seconds"] = round(time.monotonic() - began, 1)
        if code:
            told = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
            is_over = found["seconds"] >= int(seconds)
            found["error"] = (
                f"ended after {seconds:.0f} s" if is_over else f"exit code {code}: {told[-1][:300]}"
            )
        else:
            errors.unlink()
        return found

    def end(self) -> None:
        """End the process of the section that runs, and those that it has started."""
        if self.running is not None:
            os.killpg(self.running.pid, signal.SIGKILL)

    def write(self) -> None:
        """Write raw figures, the page and its pictures, as far as they are there."""
        raw = {**self.about, "sections": self.sections}
        (self.folder / "figures.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
        drawn = pictures(raw, self.folder)
        (self.folder / "README.md").write_text(render(raw, drawn), encoding="utf-8")


def driver() -> str:
    """Return the version of the driver, where a tool tells it."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def verdict(section: dict[str, Any]) -> str:
    """Return one line: holds, falls short with the worst figure, not run, or crashed."""
    wrong = [one for one in section["figures"] if not Figure(**one).holds]
    if section["error"]:
        return f"broken: {section['error']}"
    if section["needs"]:
        return f"not run: needs {section['needs']}"
    if wrong:
        one = wrong[0]
        value = one["value"] if isinstance(one["value"], str) else f"{one['value']:.4g}"
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"falls short: {one['row']}, {one['what']}: {value} (at most {one['limit']:g}){more}"
    return f"holds: {len(section['figures'])} figures"


def find_device(options: argparse.Namespace) -> str | None:
    """Return the name of the device to run on; None if there is none, or too little of it is free."""
    kind = options.device or accelerator.find()
    if kind is None and options.rehearse:
        kind = "cpu"
    if kind is None:
        print("no accelerator found by this torch: sections run small on the CPU instead (--rehearse)")
        return None
    if kind == "sim":
        from tests.accelerator.simulated import load

        load()
    if torch.device(kind).type != "cpu" and not options.rehearse:
        found = accelerator.free_and_total(torch.device(kind))
        if found is not None and found[0] < LEAST_FREE:
            print(
                f"only {format_bytes(found[0])} of {kind} are free; end what holds the rest, 2 GiB are needed"
            )
            return None
    return kind


def folder_of(options: argparse.Namespace, name: str) -> Path:
    """Return the folder of results, made."""
    default = RESULTS / f"{date.today().isoformat()}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
    folder = options.out or Path(os.environ.get("OUT") or default)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.json").touch()
    return folder


def main(options: argparse.Namespace) -> int:
    """Run the sections; return 0, 1 if one is broken, 2 if nothing can run on a device or be written."""
    kind = find_device(options)
    options.rehearse = options.rehearse or kind is None
    device = kind or "cpu"
    name = "rehearsal" if options.rehearse else accelerator.name_of(torch.device(device))
    try:
        folder = folder_of(options, name)
    except OSError as error:
        print(f"results cannot be written: {error}; name another folder with --out")
        return 2
    run = Run(options, device, folder)
    print(", ".join(f"{value}" for value in [*run.about.values()][1:6] if value), flush=True)

    def stop(*_: object) -> None:
        run.end()
        run.write()
        print(f"stopped; what was done is in {folder}")
        sys.exit(_TERM)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    for section in options.only:
        left = 60 * options.minutes - (time.monotonic() - run.began)
        if left < 5:
            print(f"{section:<10} not reached", flush=True)
            run.sections.append({"name": section, "figures": [], "needs": "", "error": "", "seconds": -1.0})
            continue
        found = run.section(section, min(left, SECTIONS[section][1]))
        run.write()
        print(f"{section:<10} {verdict(found)}; {found['seconds']:.0f} s", flush=True)
    run.write()
    print(f"page: {folder / 'README.md'}")
    is_broken = any(one["error"] for one in run.sections)
    return 2 if kind is None else int(is_broken)


if __name__ == "__main__":
    chosen = arguments()
    sys.exit(child(chosen) if chosen.section or chosen.lengths else main(chosen))
