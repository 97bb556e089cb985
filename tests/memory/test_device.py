"""Devices that are here, and those that are not; readings, against patterns whose peak is known."""

import gc
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.core import accelerator
from anybatch.core.errors import PlanError
from anybatch.memory import MemoryReading, device as module
from anybatch.memory.device import find_device, parse_memory, room_of

ROOT = Path(__file__).parents[2]
# Files of a machine with 1000 KiB, of which 300 are free; we take 50 KiB, of which 20 hold tensors.
MACHINE = {
    "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 300 kB\nHugePages_Total: 0\n",
    "proc/self/status": "Name: a\nVmSize: 400 kB\nRssAnon: 50 kB\nVmData: 90 kB\n",
}
NESTED = {
    "proc/self/cgroup": "5:cpu,memory:/a/b\n1:cpu:/\n0::/u/v\n",
    "sys/fs/cgroup/u/v/memory.max": "max\n",
    "sys/fs/cgroup/u/memory.max": f"{900 * 1024}\n",
    "sys/fs/cgroup/u/memory.high": f"{800 * 1024}\n",
    "sys/fs/cgroup/u/memory.current": f"{700 * 1024}\n",
    "sys/fs/cgroup/u/memory.stat": f"inactive_file {150 * 1024}\n",
}
CONTAINER = {  # the path is the host's, and not to be seen
    "proc/self/cgroup": "0::/docker/1234\n",
    "sys/fs/cgroup/memory.max": f"{200 * 1024}\n",
    "sys/fs/cgroup/memory.current": f"{200 * 1024}\n",
}


@pytest.mark.parametrize(
    ("files", "limits", "all_of_it", "free"),
    [
        ({}, {}, 1000 - 30, 300 + 20),
        (NESTED, {}, 800 - 30, 800 - 530),
        (CONTAINER, {}, 200 - 30, 20),
        ({}, {resource.RLIMIT_AS: 600}, 600 - 380, 600 - 380),
        ({}, {resource.RLIMIT_DATA: 130}, 130 - 70, 130 - 70),
    ],
    ids=["machine", "control groups", "container", "address space", "data"],
)
def test_what_tensors_may_take(
    files: Any, limits: Any, all_of_it: int, free: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in (MACHINE | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    monkeypatch.setattr(module, "held_by_malloc", lambda: 20 * 1024)
    limit = lambda kind: (1024 * limits[kind] if kind in limits else -1, -1)  # noqa: E731
    monkeypatch.setattr(resource, "getrlimit", limit)
    known = [parse_memory(memory, find_device("cpu")) for memory in ("100%", "auto")]
    assert known == [1024 * all_of_it, int(0.9 * 1024 * free)]
    assert room_of(torch.device("cpu")) == known[1]


def test_all_runs_where_the_system_does_not_tell_its_memory() -> None:
    command = [sys.executable, "-m", "tests.untold"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_room_of_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("recommended_max", 100), ("driver_allocated", 70), ("current_allocated", 40)):
        monkeypatch.setattr(torch.mps, f"{name}_memory", lambda size=size: size, raising=False)
    assert accelerator.free_and_total(torch.device("mps")) == (70, 100)
    assert room_of(torch.device("mps")) == 63

    def refused(device: object) -> None:
        raise RuntimeError("The device does not support querying the available free memory.")

    monkeypatch.setattr(torch.xpu, "mem_get_info", refused, raising=False)
    assert [room_of(torch.device(kind)) for kind in ("xpu", "mtia", "meta")] == [None] * 3


def test_cards_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_device("cuda:A100").num_bytes == 80 * 10**9
    assert parse_memory("auto", find_device("cuda:t4")) == int(0.9 * 16e9)
    for count, absent in ((0, "cuda"), (0, "cuda:9"), (1, "cuda:1")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda count=count: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert not find_device(absent).is_here
        assert find_device(absent).name == f"{absent} (taken to be a rtx3060)"


@pytest.mark.parametrize("name", ["", "tpu", "cuda:gtx", "cuda:²", "meta"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match="Expected a device to plan for, got "):
        find_device(name)


@pytest.mark.parametrize(
    ("memory", "expected"), [("80%", 12.8e9), ("100 %", 16e9), ("12GB", 12e9), ("1 KiB", 1024), (7, 7)]
)
def test_budget(memory: str | int, expected: float) -> None:
    assert parse_memory(memory, find_device("cuda:t4")) == int(expected)


@pytest.mark.parametrize("memory", ["0%", "101%", "", "much", "-1GB", 0, -5, True, 1.5, None, "12 gigs"])
def test_no_budget_is_refused(memory: object) -> None:
    with pytest.raises(PlanError, match="Expected a "):
        parse_memory(memory, find_device("cuda:t4"))  # type: ignore[arg-type]


MIB = 2**20
LIMIT = 0.01  # relative


def read(work: Callable[[], object]) -> tuple[int, MemoryReading]:
    gc.collect()  # what others left is no event
    found = MemoryReading.begin(["cpu"])
    work()
    found.mark()
    return found.end()[0], found


def known_pattern() -> None:
    first = torch.empty(3 * MIB, dtype=torch.uint8)
    torch.empty(5 * MIB, dtype=torch.uint8)
    del first
    torch.empty(2 * MIB, dtype=torch.uint8)


def test_known_pattern_and_memory_from_before() -> None:
    before = [torch.empty(MIB)]
    peak, found = read(lambda: (known_pattern(), before.clear()))
    assert peak == pytest.approx(8 * MIB, rel=LIMIT)
    assert (found.events, found.is_exact, found.end()) == (8, True, None)  # two of them are the mark's


def test_no_reading_beside_a_profiler_or_another_reading() -> None:
    found: list[object] = []
    first = MemoryReading.begin(["cpu"])
    found.append(MemoryReading.begin(["cpu"]))
    thread = threading.Thread(target=lambda: found.append(MemoryReading.begin(["cpu"])))
    thread.start()
    thread.join()
    first.end()
    with torch.profiler.profile() as profiler:
        found.append(MemoryReading.begin(["cpu"]))
    assert found == [None] * 3
    lost = MemoryReading.begin(["cpu"])
    with torch.profiler.profile() as profiler:
        torch.ones(3).add(1)
    assert lost.end() is None
    assert any(event.name == "aten::add" for event in profiler.events())
    assert MemoryReading.begin(["cuda"]) is None or torch.cuda.is_initialized()
