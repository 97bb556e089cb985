"""What code may change, noted and put back: random streams, buffers, modes, gradients, attributes."""

from anybatch.state import rng
from anybatch.state.objects import Contents, ObjectState, Reachable, ways
from anybatch.state.snapshot import Stream, Streams, Surroundings, Untouched, evaluating, held, of_process

__all__ = [
    "Contents",
    "ObjectState",
    "Reachable",
    "Stream",
    "Streams",
    "Surroundings",
    "Untouched",
    "evaluating",
    "held",
    "of_process",
    "rng",
    "ways",
]
