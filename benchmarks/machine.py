"""What a benchmark ran on: processor or card, versions of the packages that took part, the commit."""

import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def hardware(device: str = "cpu") -> str:
    """The processor and the number of its cores; the name of the card where one was used."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux: the architecture has to do
    return f"{model}, {os.cpu_count()} cores"


def versions(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Python, torch, anybatch and these packages."""
    yield "Python", platform.python_version()
    yield "torch", torch.__version__
    for name in ("anybatch", *packages):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def commit() -> str:
    """The commit of this checkout, with a word if `src` has changes; empty where git cannot tell."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent)
        return done.stdout.strip()

    try:
        head, changes = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "--", "../src")
    except OSError:
        return ""
    return f"{head} with changes" if head and changes else head
