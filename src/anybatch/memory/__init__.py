"""Memory of a step: the ledger, the meter that fills it, fake tensors, devices."""

from anybatch.memory.device import CARDS, Device, find_device, parse_memory
from anybatch.memory.fake import (
    FakeMode,
    Fakes,
    dense_only,
    drop_left_fakes,
    replaced_by_fakes,
    sparse_refused,
    undisturbed,
)
from anybatch.memory.ledger import OWNERS, Ledger
from anybatch.memory.meter import Meter
from anybatch.memory.reading import MemoryReading
from anybatch.memory.recording import Mark, Recording, continued

__all__ = [
    "CARDS",
    "OWNERS",
    "Device",
    "FakeMode",
    "Fakes",
    "Ledger",
    "Mark",
    "MemoryReading",
    "Meter",
    "Recording",
    "continued",
    "dense_only",
    "drop_left_fakes",
    "find_device",
    "parse_memory",
    "replaced_by_fakes",
    "sparse_refused",
    "undisturbed",
]
