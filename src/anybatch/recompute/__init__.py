"""Activation policies of blocks: keep, recompute or offload; the result is the same to the bit"""

from anybatch.recompute.apply import apply_policies as apply_policies
from anybatch.recompute.blocks import (
    POLICIES as POLICIES,
    WHOLE as WHOLE,
    Asked as Asked,
    Choice as Choice,
    choose_blocks as choose_blocks,
    find_blocks as find_blocks,
)
from anybatch.recompute.offload import Offload as Offload
