"""`python -m benchmarks.gpu`: every section in a process of its own, the files written after each."""

import argparse
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from anybatch.core import accelerator
from benchmarks.gpu import costs, page, values
from benchmarks.gpu.notes import Notes
from benchmarks.machine import versions

ROOT = Path(__file__).parents[2]
SECTIONS: dict[str, Callable[[Notes], None]] = {
    "selftest": values.selftest, "exact": values.exact, "precision": values.precision,
    "budgets": costs.budgets, "plan": costs.plan, "oom": values.oom, "speed": costs.speed,
    "offload": costs.offload,
}  # fmt: skip
HIDDEN = {"lengths": costs.lengths}
LIMIT, LIMITS = 60, {"selftest": 120, "budgets": 120}  # seconds
GRACE = 20  # seconds that a section may take beyond its time, before it is ended
PACKAGES = ("transformers", "accelerate", "lightning", "pytest", "matplotlib")
BROKEN = "ANYBATCH_GPU_BREAK"  # names a section that shall crash, for the test of that


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="for all sections")
    parser.add_argument("--rehearse", action="store_true", help="a hundred times smaller; needs no card")
    parser.add_argument("--device", help="such as cuda:1; else the accelerator that is found")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS), help="some sections")
    parser.add_argument("--section", choices=[*SECTIONS, *HIDDEN], help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder of the files")
    parser.add_argument(
        "--table", action="store_true", help="only write the table of runs in docs and README"
    )
    options = parser.parse_args(arguments)
    if options.table:
        page.rewrite(ROOT / "docs" / "gpu.md", ROOT / "README.md", ROOT / "benchmarks" / "results" / "gpu")
        return 0
    return _child(options) if options.section else _parent(options)


def _device(name: str) -> torch.device:
    if name == "sim":
        from tests.accelerator.simulated import load

        load()
    return torch.device(name)


def _child(options: argparse.Namespace) -> int:
    """Run one section."""
    device, name = _device(options.device), options.section
    notes = Notes(name, device, options.out, small=options.rehearse, seconds=options.seconds)
    if options.rehearse:
        torch.set_num_threads(1)
    with notes.case(name):
        if os.environ.get(BROKEN) == name:
            raise RuntimeError("broken on purpose")
        (SECTIONS | HIDDEN)[name](notes)
    notes.state["done"] = True
    notes.write()
    return 0


def _find(options: argparse.Namespace) -> tuple[str, str]:
    """Return the device, and why it cannot be used, if so."""
    if options.rehearse:
        return options.device or _rehearsal(), ""
    name = options.device or accelerator.find()
    if name is None:
        return "cpu", "no accelerator is found"
    try:
        device = torch.device(name)
        torch.ones((), device=device).item()
        room = accelerator.free_and_total(device)
    except (RuntimeError, AssertionError) as error:  # no driver, an old one, or a full device
        return "cpu", f"{name} cannot be used: {str(error).splitlines()[0][:200]}"
    if room is not None and room[0] < 2 * 2**30:
        return "cpu", f"{name} is busy: {room[0] / 2**30:.1f} GiB of it are free, and 2 are needed"
    return name, ""


def _rehearsal() -> str:
    try:
        from tests.accelerator.simulated import build

        build()
    except Exception:  # no compiler, or no pytest
        return "cpu"
    return "sim"


def _head(name: str) -> dict[str, Any]:
    device = _device(name)
    room = accelerator.free_and_total(device)
    return {
        "device": accelerator.name_of(device) if name != "cpu" else "CPU",
        "memory": f"{room[1] / 2**30:.1f} GiB, {room[0] / 2**30:.1f} free" if room else "not counted",
        "driver": _driver(),
        "date": datetime.date.today().isoformat(),
        "system": platform.platform(),
        **dict(versions(PACKAGES)),
    }


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "not known"


def _folder(options: argparse.Namespace, head: dict[str, Any]) -> Path:
    if options.out or os.environ.get("OUT"):
        folder = options.out or Path(os.environ["OUT"])
    elif options.rehearse:
        folder = ROOT / "runs" / "gpu-rehearsal"
    else:
        slug = re.sub(r"[^A-Za-z0-9]+", "-", head["device"]).strip("-").lower()
        folder = ROOT / "benchmarks" / "results" / "gpu" / f"{head['date']}-{slug}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").touch()
    return folder


def _parent(options: argparse.Namespace) -> int:
    began = time.monotonic()
    name, why = _find(options)
    if why:
        print(f"{why}; the rehearsal runs on the CPU instead.", flush=True)
        options.rehearse, name = True, "cpu"
    head = _head(name)
    try:
        folder = _folder(options, head)
    except OSError as error:
        print(f"The results cannot be written: {error}. Name a folder with --out.")
        return 2
    print(*(f"{key}: {value}" for key, value in head.items()), sep="\n", flush=True)
    found: dict[str, Any] = _earlier(folder, head) | dict.fromkeys(options.only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    page.write(folder, head, found)
    with tempfile.TemporaryDirectory() as temporary:
        for section in options.only:
            left = options.minutes * 60 - (time.monotonic() - began)
            if left < 5:
                continue
            seconds = min(left, LIMITS.get(section, LIMIT))
            began_section = time.monotonic()
            found[section] = _run(options, name, section, seconds, Path(temporary) / f"{section}.json")
            found[section]["seconds"] = time.monotonic() - began_section
            page.write(folder, head, found)
            print(f"{section}: {page.verdict(found[section])}", flush=True)
    print(
        "", *(f"{one:<10} {page.verdict(result)}" for one, result in found.items()), f"\n{folder}", sep="\n"
    )
    if not options.rehearse and folder.is_relative_to(ROOT / "benchmarks" / "results" / "gpu"):
        page.rewrite(ROOT / "docs" / "gpu.md", ROOT / "README.md", folder.parent)
    if any(one and one["crashed"] for name, one in found.items() if name in options.only):
        return 1
    return 2 if why else 0


def _earlier(folder: Path, head: dict[str, Any]) -> dict[str, Any]:
    """Return the sections that ran before, with --only, on this device and day; else those of a whole run."""
    empty: dict[str, Any] = dict.fromkeys(SECTIONS)
    text = (folder / "gpu.json").read_text(encoding="utf-8")
    raw = json.loads(text) if text else {"head": {}}
    is_same = all(raw["head"].get(name) == head[name] for name in ("device", "date", "torch"))
    return empty | raw["sections"] if is_same else empty


def _run(
    options: argparse.Namespace, device: str, section: str, seconds: float, path: Path
) -> dict[str, Any]:
    """Run a section in a child; return what it wrote, also where it crashed or was ended."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--section", section, "--device", device]
    command += ["--out", str(path), "--seconds", str(seconds), *(["--rehearse"] if options.rehearse else [])]
    told = ""
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # for deterministic products
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, env=environment) as child:
        try:
            code = child.wait(seconds + GRACE)
            told = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            told = f"ended after {seconds + GRACE:.0f} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    empty = {"figures": [], "crashed": [], "needs": [], "late": [], "done": False}
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else empty
    if told.startswith("ended"):
        found["late"].append(f"the rest, {told}")
    elif told and not found["done"]:
        found["crashed"].append(told)
    return found


if __name__ == "__main__":
    sys.exit(main())
