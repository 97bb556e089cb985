"""What code may change, noted and put back: random streams, buffers, modes, gradients, attributes."""

from anybatch.state import rng
from anybatch.state.objects import Remembered
from anybatch.state.reach import Inside, ways
from anybatch.state.snapshot import Effects, ModuleState, Snapshot, evaluating

__all__ = [
    "Effects",
    "Inside",
    "ModuleState",
    "Remembered",
    "Snapshot",
    "evaluating",
    "rng",
    "ways",
]
