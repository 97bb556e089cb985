"""The collectives of a micro-batch: recorded, so that a rank that fails takes part in the rest with zeros."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from anybatch.parallel.group import Group, answered


class Collective(NamedTuple):
    """A collective of FSDP: an all-gather of weights, or a reduce-scatter of gradients."""

    reduces: bool
    sizes: tuple[int, int]  # elements of the output and of the input
    dtype: torch.dtype
    device: torch.device
    group: Any
    op: Any = None

    def replay(self, replicas: Group) -> None:
        """Take part with zeros; a reduce-scatter is followed by a sum over `replicas`, if there are any."""
        output, zeros = (torch.zeros(size, dtype=self.dtype, device=self.device) for size in self.sizes)
        with answered(self.group):
            if not self.reduces:
                dist.all_gather_single(output, zeros, group=self.group)
                return
            dist.reduce_scatter_single(output, zeros, group=self.group, op=self.op)
            if replicas is not None:
                dist.all_reduce(output, group=replicas)


class Recorder:
    """The collectives of FSDP, which it calls (`set_custom_all_gather`, `set_custom_reduce_scatter`)."""

    def __init__(self) -> None:
        self.calls: list[Collective] = []  # of the current micro-batch

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the memory of a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Gather, or add up and scatter where there is an `op`."""
        sizes = output_tensor.numel(), input_tensor.numel()
        reduces = op is not None
        kind = input_tensor.dtype, input_tensor.device
        self.calls.append(Collective(reduces, sizes, *kind, group, op))
        with answered(group):
            if reduces:
                return dist.reduce_scatter_single(
                    output_tensor, input_tensor, op=op, group=group, async_op=async_op
                )
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
