"""Snapshots of all that code may change: random streams, buffers, modes, gradients, attributes"""

from anybatch.state import rng
from anybatch.state.draws import (
    SeenDraws,
    device_of,
    expected_of_bernoulli,
    has_own_generator,
    plain_kernels,
    stream_of,
)
from anybatch.state.objects import Contents, ObjectState, Reachable
from anybatch.state.snapshot import Effects, ModuleState, Snapshot, evaluating

__all__ = [
    "Contents",
    "Effects",
    "ModuleState",
    "ObjectState",
    "Reachable",
    "SeenDraws",
    "Snapshot",
    "device_of",
    "evaluating",
    "expected_of_bernoulli",
    "has_own_generator",
    "plain_kernels",
    "rng",
    "stream_of",
]
