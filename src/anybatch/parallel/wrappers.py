"""The strategy of a step, by name; models wrapped for several devices are unwrapped or refused."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, cast, get_args

from torch import nn

from anybatch.core import PlanError, torch_private as private
from anybatch.engine import Strategy
from anybatch.parallel.group import Group, ranks, start_under_torchrun
from anybatch.parallel.replicate import Replicate
from anybatch.parallel.shard import Shard

StrategyName = Literal["auto", "local", "replicate"]

_DDP = "DistributedDataParallel"
# By name: not every torch has all of them, and looking should not import them.
_SHARDED = "FSDPModule"
_WRAPPERS = (_DDP, "DataParallel", "FullyShardedDataParallel", _SHARDED)

_ADVICE = {
    "FullyShardedDataParallel": "Replace FullyShardedDataParallel(model) by fully_shard(model), of "
    "torch.distributed.fsdp, which is supported",
    "DataParallel": "Replace DataParallel(model) by the model itself, as in model.module",
}


def choose_strategy(strategy: StrategyName | Strategy, group: Group, model: nn.Module) -> Strategy:
    """Return a strategy by name, over these ranks, or the given one. Raise PlanError for others."""
    sharded, is_asked = is_sharded(model), isinstance(strategy, Shard)
    if is_asked > sharded or (sharded and not is_asked and strategy != "auto"):
        raise PlanError(
            f'Expected strategy="auto" or Shard(...) for a model with fully_shard, and Shard for no other, '
            f"got {strategy!r} for a model {'with' if sharded else 'without'} it. For data parallelism, or "
            "an update of one process, leave fully_shard out."
        )
    if sharded:
        strategy = strategy if isinstance(strategy, Shard) else Shard()
        strategy.take(model)
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in get_args(StrategyName):
        raise PlanError(
            f"Expected strategy to be one of {get_args(StrategyName)} or a Replicate(...), got "
            f'{strategy!r}. "auto" sums gradients over all ranks of the process group; "local" makes an '
            "update of its own in each process."
        )
    if strategy == "local":
        return Strategy()
    start_under_torchrun()
    return Replicate(group=group) if ranks(group) > 1 or strategy == "replicate" else Strategy()


def unwrapped(model: nn.Module, strategy: object) -> nn.Module:
    """Return the module in a DistributedDataParallel, without its reduction; refuse hooks and settings."""
    if strategy == "local" or not (isinstance(model, nn.Module) and _wrapper_of(type(model)) == _DDP):
        return model
    if hooks := private.communication_hooks(model):
        raise PlanError(
            f"Expected a DistributedDataParallel without a communication hook, got {hooks[0]}, which would "
            "not be called: anybatch sums gradients itself. Leave it out, and say "
            "strategy=anybatch.parallel.Replicate(compression=...) for compression."
        )
    if told := private.told_to_wrapper(model):
        raise PlanError(
            f"Expected a DistributedDataParallel that was told nothing but its process group, got {told}, "
            "which would have no effect: anybatch calls the module inside, and sums the gradients of all "
            "trained parameters itself. Register hooks with model.module, and freeze what is not to be "
            "summed."
        )
    return cast("nn.Module", model.module)


def group_of(model: nn.Module) -> Group:
    """Return the process group of a DistributedDataParallel; None for other models."""
    return getattr(model, "process_group", None) if _wrapper_of(type(model)) == _DDP else None


def is_sharded(model: nn.Module) -> bool:
    """Return True if `fully_shard` was applied to the model or a part of it."""
    return any(_wrapper_of(type(one)) == _SHARDED for one in model.modules())


def refuse_sharded(model: nn.Module, what: str) -> None:
    """Raise PlanError for a sharded model in what one process does alone."""
    if is_sharded(model):
        raise PlanError(
            f"Expected a model that is not sharded for {what}, got one with fully_shard, in which other "
            "ranks would have to take part. Call it before fully_shard(model)."
        )


def refuse_wrapped(modules: Iterable[nn.Module], strategy: object) -> None:
    """Raise PlanError for models in other wrappers that exchange gradients, and for wrapped parts."""
    for name in {_wrapper_of(type(module)) for module in modules}:
        if name and name != _SHARDED and not (strategy == "local" and name == _DDP):
            advice = _ADVICE.get(name, "Pass the model itself, as in model.module")
            raise PlanError(
                f"Expected a model that is not wrapped, got one wrapped in {name}, which exchanges gradients "
                f"or weights in every micro-batch. {advice}; start one process per device with torchrun, and "
                "gradients are summed over all of them."
            )


def refuse_late_group(strategy: Strategy, name: object) -> None:
    """Raise PlanError if a process group was initialised after a step for one process was made."""
    if not strategy.is_many and name != "local" and ranks() > 1:
        raise PlanError(
            f"Expected a step made after the process group, got a group of {ranks()} ranks that was "
            "initialised later: gradients would not be summed, and replicas drift apart. Make the Step after "
            'init_process_group, or say strategy="local" and synchronise the parameters yourself.'
        )


@lru_cache(maxsize=4096)
def _wrapper_of(kind: type[nn.Module]) -> str:
    found = [one.__name__ for one in kind.__mro__ if one.__module__.startswith("torch.")]
    return next((name for name in found if name in _WRAPPERS), "")
