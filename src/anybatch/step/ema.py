"""EMA: the average of a step's weights over its updates."""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from anybatch import core
from anybatch.core import torch_private as private
from anybatch.step.step import Step


class EMA(core.Callback):
    """A callback of any step that averages the weights exponentially over updates (Polyak averaging).

    After the first update the average is the weights, after each later one `decay * average + (1 - decay) *
    weights`, as in `torch.optim.swa_utils`. Only updates count: the number of micro-batches and skipped steps
    do not matter. 16-bit weights are averaged in float32. The average is one more copy of the weights on
    their device, which the budget of a step does not include. Parameters that are not trained are left out.

    Args:
        decay: weight of the old average in each update, from 0 to below 1.
        buffers: also average floating-point buffers, such as the statistics of BatchNorm. Otherwise the
            average is used with the model's current buffers.
        validate: run a trainer's validation with the averaged weights.

    Attributes:
        updates: updates in the average so far.
        average: the averaged values by parameter name, empty before the first update.

    Raises:
        PlanError: the decay is out of range; the model is sharded; or a `BatchLoss`, which makes no update.

    Example:
        >>> import torch
        >>> from anybatch import Step
        >>> model, ema = torch.nn.Linear(2, 1), EMA(decay=0.9)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = Step(model, torch.nn.MSELoss(), optimizer, callbacks=[ema])
        >>> for _ in range(4):
        ...     report = step((torch.zeros(4, 2), torch.ones(4, 1)))
        >>> with ema.weights():
        ...     averaged = model.bias.item()
        >>> ema.updates, averaged < model.bias.item()
        (4, True)
    """

    def __init__(self, decay: float = 0.999, *, buffers: bool = False, validate: bool = True) -> None:
        if not 0 <= decay < 1:
            raise core.PlanError(
                f"Expected decay from 0 to below 1, got {decay}. Use 0.99 to average over about 100 updates."
            )
        self.decay, self.buffers, self.validate = decay, buffers, validate
        self.updates = 0
        self._step: Step | None = None
        self.average: dict[str, Tensor] = {}
        self._mix: Callable[..., None] = get_ema_multi_avg_fn(decay)

    def attached(self, step: Step) -> None:
        """Keep the step whose weights are averaged."""
        name = type(step.model).__name__
        if step.strategy.is_lockstep:  # no checkpoint has an average of it
            said = f"a model that is not sharded, got a {name} with fully_shard. Leave ab.EMA out."
        elif not step.optimizers:
            said = f"an ab.Step, got an ab.BatchLoss of {name}. Your loop makes the update: average after it."
        elif self._step is not None and self._step.model is not step.model:
            said = f"one model, got a second one, a {name}. Make an ab.EMA for each."
        else:
            self._step = step
            self._refuse_other()
            return
        raise core.PlanError(f"Expected, to average weights, {said}")

    @torch.no_grad()
    def update(self, report: core.StepReport) -> None:
        """Add the weights to the average if the step made an update."""
        if not report.updated or self._step is None:
            return
        averaged, current = list[Tensor](), list[Tensor]()
        for name, (*_, value) in self._places(self._step).items():
            if name not in self.average:
                dtype = torch.float32 if value.dtype in core.SHORT_DTYPES else value.dtype
                self.average[name] = value.detach().to(dtype, copy=True)
                continue
            average = self.average[name] = self.average[name].to(value.device)  # on the host after a resume
            averaged.append(average)
            current.append(value.detach().to(average.dtype))
        if averaged:
            self._mix(averaged, current, self.updates)
        self.updates += 1

    def _places(self, step: Step) -> dict[str, list[Tensor]]:
        """Return the tensors that hold each averaged value, the most precise last."""
        places: dict[str, list[Tensor]] = {}
        for name, parameter in step.model.named_parameters():
            name = private.plain_name(name)
            if parameter.requires_grad or name in self.average:
                full = step.masters.of(parameter)
                places[name] = [parameter] if full is None else [parameter, full]
        if self.buffers:
            places |= {private.plain_name(name): [buffer] for name, buffer in step.model.named_buffers()}
        return {name: place for name, place in places.items() if place[0].is_floating_point()}

    @contextmanager
    def weights(self, step: Step | None = None) -> Generator[None]:
        """Put the averaged weights into a step's model inside this context, and its own back afterwards.

        Before the first update nothing changes. Do not train inside.

        Args:
            step: the step whose model gets the weights; afterwards they are bit-identical to before. None for
                the step that has this callback.
        """
        step = step or self._step
        places = {} if step is None else self._places(step)
        pairs = [(one, self.average[name]) for name in places.keys() & self.average for one in places[name]]
        with torch.no_grad():
            before = [one.clone() for one, _ in pairs]
        try:
            _write((one, average) for one, average in pairs)
            yield
        finally:
            _write((one, own) for (one, _), own in zip(pairs, before, strict=True))

    def validation(self, trainer: Any) -> AbstractContextManager[None]:
        """Return a context with the averaged weights, or an empty one if `validate` is False."""
        return self.weights(trainer.step) if self.validate else nullcontext()

    def state_dict(self) -> Mapping[str, Any]:
        """Return the average and the number of updates in it."""
        return {"updates": self.updates, "average": dict(self.average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the average and the number of updates in it."""
        if {"updates", "average"} - state.keys():
            raise core.CheckpointError(f"Expected the result of EMA.state_dict(), got keys {sorted(state)}.")
        self.updates = state["updates"]
        self.average = {name: value.clone() for name, value in state["average"].items()}
        self._refuse_other()

    def _refuse_other(self) -> None:
        """Refuse the average of another model."""
        if self._step is None:
            return
        known = [*self._step.model.named_parameters(), *self._step.model.named_buffers()]
        shapes = {private.plain_name(name): tuple(one.shape) for name, one in known}
        for name, value in self.average.items():
            if shapes.get(name) != tuple(value.shape):
                raise core.CheckpointError(
                    f"Expected an average of this model's weights, got {name!r} of shape "
                    f"{tuple(value.shape)}; the model has {shapes.get(name, 'none')}. Load the state of its "
                    "own ab.EMA."
                )


@torch.no_grad()
def _write(pairs: Any) -> None:
    for place, value in pairs:
        place.copy_(value)
