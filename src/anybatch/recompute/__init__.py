"""Activation policies of blocks: keep, recompute or offload; the result is the same to the bit"""

from anybatch.recompute import offload
from anybatch.recompute.apply import apply_policies
from anybatch.recompute.blocks import POLICIES, Asked, Choice, choose_blocks, find_blocks

__all__ = ["POLICIES", "Asked", "Choice", "apply_policies", "choose_blocks", "find_blocks", "offload"]
