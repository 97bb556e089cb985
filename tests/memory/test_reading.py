"""Readings of the peak of a stretch of code, against patterns whose peak is known."""

import gc
import threading
from collections.abc import Callable

import pytest
import torch

from anybatch.memory import MemoryReading

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
