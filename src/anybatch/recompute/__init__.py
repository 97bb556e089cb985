"""Which activations are kept, rebuilt or moved off the device; the result is the same to the bit."""

from anybatch.recompute.apply import applied
from anybatch.recompute.find import POLICIES, Choice, choose, find_blocks
from anybatch.recompute.offload import is_moving

__all__ = ["POLICIES", "Choice", "applied", "choose", "find_blocks", "is_moving"]
