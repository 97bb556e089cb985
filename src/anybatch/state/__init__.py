"""Snapshots of all that code may change: random streams, buffers, modes, gradients, attributes"""

from anybatch.state import rng as rng
from anybatch.state.draws import (
    SeenDraws as SeenDraws,
    device_of as device_of,
    eager as eager,
    has_own_generator as has_own_generator,
    is_dropout as is_dropout,
    plain_kernels as plain_kernels,
)
from anybatch.state.objects import Contents as Contents, ObjectState as ObjectState, Reachable as Reachable
from anybatch.state.snapshot import (
    Effects as Effects,
    ModuleState as ModuleState,
    Snapshot as Snapshot,
    evaluating as evaluating,
)
