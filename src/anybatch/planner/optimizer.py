"""An update alone, on fake tensors: as much of a step as can always be traced."""

from collections.abc import Callable, Iterable, Set

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core import tensors_in
from anybatch.core import torch_private as private
from anybatch.engine import Plan, Task, accumulation_dtype
from anybatch.engine import update as optimize
from anybatch.memory import FakeMode, Meter, Recording, stand_ins, undisturbed
from anybatch.planner.trace import advance, faked, loss_module_of, make_state


def trace_update(
    plan: Plan, task: Task, idle: Set[nn.Parameter], rows: Iterable[Tensor]
) -> tuple[Recording, list[Tensor], frozenset[nn.Parameter]]:
    """The update alone, on fake tensors; the state that optimizers hold in it, and for whom it was made."""
    mode = FakeMode()
    with (
        private.disable_current_modes(),  # as in `trace`
        undisturbed([*task.parameters, *task.others]),
        stand_ins(mode, task.modules, task.optimizers) as fakes,
    ):
        fake = faked(task, fakes)
        lacks = {fakes.of(parameter) for parameter in idle}
        with mode.explained("an update", "choose micro_batch= yourself, without memory="), mode:
            made = make_state(fake, lacks)
            advance(fake)
            gradients = {
                p: torch.zeros_like(p, dtype=accumulation_dtype(p.dtype, plan.accumulation_dtype))
                for p in fake.parameters
                if p not in lacks
            }
            for parameter, gradient in gradients.items():
                if gradient.dtype == parameter.dtype:
                    parameter.grad = gradient
            meter = Meter(
                task.model,
                task.optimizers,
                loss_module=loss_module_of(task),
                batch_leaves=[fakes.of(leaf.detach()) for leaf in rows],
                state=fake.masters.tensors,
                held=list(gradients.values()),
            )
            with meter:
                optimize.clip(gradients, plan.clip_norm)
                with fake.masters.raised(gradients, fake.optimizers):
                    optimize.update(gradients, task.optimizers)
            state = [one for each in task.optimizers for one in tensors_in(list(each.state.values()))]
        found = frozenset(p for p in task.parameters if fakes.of(p) in made)
    return meter.recording, state, found


def has_state(task: Task) -> bool:
    """Whether any optimizer has made its state already."""
    return any(True for one in task.optimizers for _ in tensors_in(list(one.state.values())))


class Watcher(Optimizer):
    """Updates nothing, but sees which parameters got no gradient."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.idle: frozenset[nn.Parameter] = frozenset()
        super().__init__(list(parameters), {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore
        """Look, and leave all as it is."""
        self.idle = frozenset(p for p in optimize.owned([self]) if p.grad is None)
