"""More than one rank, and models that are wrapped for it: refused, unless the caller synchronises"""

from collections.abc import Iterable
from typing import Literal, get_args

import torch.distributed as dist
from torch import nn

from anybatch.core import PlanError

StrategyName = Literal["single", "local"]

# By name: not every torch has all of them, and who looks should not load them.
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")


def check_strategy(strategy: object) -> None:
    """Refuse with a PlanError what is neither "single" nor "local"."""
    if strategy not in get_args(StrategyName):
        raise PlanError(
            f'Expected strategy to be one of {get_args(StrategyName)}, got {strategy!r}. "single" is one '
            'process; "local" makes an update of its own in each process, and you synchronise.'
        )


def refuse_ranks(modules: Iterable[nn.Module], strategy: StrategyName) -> None:
    """Refuse with a PlanError more than one rank, unless it is "local", and wrapped models in any case.

    These exchange gradients or weights in each micro-batch, of which every rank has a number of its own.
    """
    for kind in {type(module) for module in modules}:
        for one in kind.__mro__:
            if one.__name__ in _WRAPPERS and one.__module__.startswith("torch."):
                raise PlanError(
                    f"Expected a model in one process, got one wrapped in {one.__name__}, which exchanges "
                    "gradients or weights in every micro-batch. Pass the model itself, as in model.module; "
                    'with several ranks say strategy="local" and synchronise after each update.'
                )
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and strategy != "local":
        raise PlanError(
            f"Expected one rank, got a process group of {ranks}: gradients are not added up over ranks yet, "
            'so replicas would drift apart. Train in one process, or say strategy="local" and synchronise '
            "the parameters yourself."
        )
