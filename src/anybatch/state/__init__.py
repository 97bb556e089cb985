"""What code may change, noted and put back: random streams, buffers, modes, gradients, attributes."""

from anybatch.state import rng
from anybatch.state.objects import Contents, ObjectState, Reachable, ways
from anybatch.state.snapshot import Effects, ModuleState, Snapshot, evaluating

__all__ = [
    "Contents",
    "Effects",
    "ModuleState",
    "ObjectState",
    "Reachable",
    "Snapshot",
    "evaluating",
    "rng",
    "ways",
]
