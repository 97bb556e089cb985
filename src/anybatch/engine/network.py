"""Network: the modules and parameters of a model and its loss, and what follows from them."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from anybatch.batchnorm import BatchNorm, find_batch_norms
from anybatch.core import torch_private as private
from anybatch.engine.gradients import accumulation_dtype
from anybatch.losses import module_of
from anybatch.state import ModuleState, Reachable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """The modules and parameters of a model and its loss, as they stand."""

    modules: Sequence[nn.Module]
    inner: Sequence[nn.Module]  # those of the model alone
    parameters: Sequence[nn.Parameter]  # the trainable ones of the optimizers
    # parameters of the model, or in closures of the loss, that no optimizer here owns, and frozen ones; their
    # `.grad` takes no part in the update and is left alone
    others: Sequence[nn.Parameter]
    batch_norms: Sequence[BatchNorm]  # modules in which rows meet
    devices: Set[torch.device]  # where the parameters are
    is_static: bool  # compiled, anew for each number of rows
    state: ModuleState = field(init=False)  # which a step notes before it begins
    everyone: Sequence[nn.Parameter] = field(init=False)
    reached: Sequence[nn.Parameter] = field(init=False)  # not ours, but backward may reach them
    trained: Set[nn.Parameter] = field(init=False)
    kinds: Set[str] = field(init=False)  # of the devices that compute
    is_wide: bool = field(init=False)  # no dtype is narrower than that of its gradient's sum

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("state", ModuleState(self.modules))
        put("everyone", (*self.parameters, *self.others))
        put("reached", tuple([p for p in self.others if p.requires_grad]))
        put("trained", frozenset(self.parameters))
        put("kinds", {device.type for device in self.devices} - {"meta"})
        put("is_wide", all(accumulation_dtype(p.dtype) == p.dtype for p in self.parameters))

    @staticmethod
    def of(model: nn.Module, loss: object, held: Sequence[nn.Parameter], *, is_mixed: bool) -> "Network":
        """Read a model and its loss.

        Args:
            model: the model.
            loss: the loss, as the caller gave it.
            held: the parameters of the optimizers.
            is_mixed: rows meet in the loss, which sees all of them: its BatchNorms do not depend on the cut.
        """
        inner = [*model.modules()]
        modules = list(dict.fromkeys([*inner, *module_of(loss).modules()]))
        inside, parameters = _parameters_of(modules), [p for p in held if p.requires_grad]
        # Backward reaches those in closures of the loss, as a GAN's other network: their `.grad` is kept.
        beside, trained = _parameters_of(Reachable([loss], has_classes=False).modules), frozenset(parameters)
        return Network(
            modules=modules,
            inner=inner,
            parameters=parameters,
            others=[p for p in dict.fromkeys((*inside, *held, *beside)) if p not in trained],
            batch_norms=find_batch_norms(inner if is_mixed else modules),
            devices={p.device for p in inside},
            is_static=any(map(private.is_static, inner)),
        )

    @property
    def is_synced(self) -> bool:
        """True if rows of all ranks meet in a SyncBatchNorm."""
        return any(isinstance(norm, nn.SyncBatchNorm) for norm in self.batch_norms)


def _parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [p for one in modules for p in private.parameters_of(one).values() if p is not None]
