"""Snapshots of all that code may change: random streams, buffers, modes, gradients, attributes"""

from anybatch.state import rng as rng
from anybatch.state.draws import (
    SeenDraws as SeenDraws,
    eager as eager,
    plain_kernels as plain_kernels,
)
from anybatch.state.objects import Contents as Contents, ObjectState as ObjectState, Reachable as Reachable
from anybatch.state.snapshot import (
    Effects as Effects,
    ModuleState as ModuleState,
    Snapshot as Snapshot,
    evaluating as evaluating,
)
