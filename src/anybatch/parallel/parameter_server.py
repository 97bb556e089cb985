"""Parameter servers: workers compute the rows of a batch, servers hold the parameters and update them."""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import fsum
from typing import Any

import numpy as np
import torch

from anybatch import core
from anybatch.engine import Plan, Strategy, Task, learning_rate_of
from anybatch.losses import WholeBatch
from anybatch.parallel.fingerprint import contents
from anybatch.parallel.messages import weights_of
from anybatch.parallel.on_ray import RayCluster
from anybatch.parallel.ranges import even
from anybatch.parallel.scheduler import Scheduler
from anybatch.parallel.server import Layout, options_of
from anybatch.parallel.worker import Folded, OutsideValues, fixed_of, identity, settings_of
from anybatch.state import rng


class ParameterServer(Strategy):
    """Servers that hold the parameters, and workers that compute the gradients; any number of each, exact.

    A batch is cut into units of rows. Each worker takes a unit, computes its gradient sums with the newest
    parameters, in micro-batches, and takes the next. Servers add the sums in the order of the units, divide
    once by the weight of the whole batch, and make the update. So the bits do not depend on the number or
    speed of workers, or on lost ones: a unit of a worker that ended is given to another, with the same random
    numbers, and is counted once. Servers keep nothing between calls: parameters, state and sums lie in Ray's
    object store, and a call of a server that ended is repeated by a new one.

    The driver, which is this process, has the model and the optimizer as usual: parameters are new after each
    step, and `optimizer.state_dict()` fetches its state. So schedulers, checkpoints and resuming work as
    without servers. Workers receive what changes between steps: parameters, buffers, and modes, numbers and
    strings of modules. If the loss or the model reads another number, such as a global, and it changes, the
    step is refused.

    Servers and workers are Ray actors; Ray starts at the first step. It needs the extra `anybatch[server]`.
    Everyone who reaches Ray's ports and has its token can run code.

    Args:
        servers: shards of the parameters, of equal size.
        workers: number of workers. Workers without a unit wait.
        cluster: address of a Ray cluster, such as "10.0.0.1:6379". None starts Ray on this machine.
        units: number of parts of a batch, at least one per worker; with two or more the rows of the next unit
            arrive in time. The result depends on it as on the size of micro-batches.
        device: kind of the device of workers, such as "cpu"; None for that of the model. On any but the CPU
            each worker has one GPU.

    Attributes:
        counts: totals so far: pushes to each server, bytes pushed, units given to a second worker (back-ups)
            and done twice (units repeated), workers and servers replaced. The report of a step has its own.

    Raises:
        PlanError: a number out of range, too few GPUs, or Ray is not installed.

    Example:
        >>> ParameterServer(servers=1, workers=2)
        ParameterServer(servers=1, workers=2)
    """

    is_many = True
    is_elsewhere = True

    def __init__(
        self,
        servers: int = 1,
        workers: int = 2,
        *,
        cluster: str | RayCluster | None = None,
        units: int = 8,
        device: str | torch.device | None = None,
    ) -> None:
        for name, value in (("servers", servers), ("workers", workers), ("units", units)):
            core.check_whole(name, value, least=1)
        if workers > units:
            warnings.warn(
                f"Expected at most as many workers as units, got workers={workers} and units={units}: some "
                f"workers have nothing to do. Pass units={workers} or more.",
                stacklevel=2,
            )
        self._device = None if device is None else torch.device(device).type
        self.servers, self.workers = servers, workers
        self._where, self._units = cluster, units
        self.counts: Counter[str] = Counter()
        self._scheduler: Scheduler | None = None
        self._cluster: RayCluster | None = None
        self._is_loaded = False  # the servers have the optimizer's state
        self._hooks: list[Any] = []

    def __repr__(self) -> str:
        return f"ParameterServer(servers={self.servers}, workers={self.workers})"

    def __enter__(self) -> "ParameterServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def begin(self, task: Task, settings: Plan) -> None:
        """Raise PlanError for a step that servers cannot run."""
        if isinstance(task.loss, WholeBatch):
            raise core.PlanError(
                f"Expected a loss that is summed over rows, got {type(task.loss).__name__}, in which "
                "the rows of all workers meet. Start one process per GPU with torchrun instead."
            )
        odd = {
            "clip_value=, which clamps entries of the whole batch's gradient": not math.isinf(
                settings.clip_value
            ),
            f"non_finite={settings.non_finite!r}": settings.non_finite != "raise",
            "a loss scale (fp16), which each worker would choose by itself": settings.precision.loss_scale
            is not None,
            'BatchNorm in training mode; Pass Options(batch_norm="frozen") for the running statistics, or '
            "use ab.batch_norm_to_group_norm(model)": bool(task.network.batch_norms)
            and settings.batch_norm != "frozen",
            "a compiled model": task.network.is_static,
            "callbacks of gradients or micro-batches, which only workers have": task.callbacks.are_inside,
            "gradients from before the step; Call optimizer.zero_grad()": any(
                p.grad is not None for p in task.network.parameters
            ),
        }
        for text, is_there in odd.items():
            if is_there:
                what, _, advice = text.partition("; ")
                raise core.PlanError(
                    f"Expected a step that workers can do, got {what}. {advice or 'Leave it out'}."
                )

    def carry_out_elsewhere(
        self, task: Task, batch: core.Batch, settings: Plan, remote: Callable[[str], Any]
    ) -> core.StepReport:
        """Make one update with all rows; `remote` returns a factory of a worker's step for a device type."""
        if not batch.rows:
            raise core.PlanError(
                f"Expected at least one row, got {batch.rows}. Skip empty batches before the step."
            )
        before = self.counts
        try:
            report = self._carry_out(task, batch, settings, remote)
        finally:
            if self._scheduler is not None:
                self.counts = before + self._scheduler.counts  # a new object: callers may keep the old one
                self._scheduler.counts.clear()
        return replace(report, counts=self.counts - before)

    def _carry_out(
        self, task: Task, batch: core.Batch, settings: Plan, remote: Callable[[str], Any]
    ) -> core.StepReport:
        began = time.perf_counter()
        scheduler = self._prepared(task, settings, remote)
        # Drawn from the driver's stream, which is restored. The parameters make it differ per update.
        with rng.preserved():
            seed = rng.derive_seed(int(torch.randint(2**62, ())), sum(one for _, one in self._known))
        sizes = even(batch.rows, min(self._units, batch.rows))
        options, learning_rate = options_of(task.optimizers), learning_rate_of(task.optimizers)
        try:
            folded = scheduler.fold([_rows(batch, one) for one in sizes], seed)
            weights, norm, values = self._commit(scheduler, folded, settings, options)
        except core.NonFiniteLossError as error:
            if scheduler.failed is None:
                raise
            own = sizes[scheduler.failed]
            raise core.NonFiniteLossError(
                f"{error} A worker counted from its own first row, within rows {own[0]} to {own[-1]} of the "
                "batch."
            ) from None
        if values:
            scheduler.layout.write(values, task.network.parameters)
            self._known = contents(task.network.parameters)
            self._updated(task)
        report, seconds = _report(folded, weights, norm, task), time.perf_counter() - began
        # The learning rate is that before the schedulers' step.
        return replace(report, learning_rate=learning_rate, seconds=seconds)

    def _commit(
        self, scheduler: Scheduler, folded: Sequence[Folded], settings: Plan, options: Any
    ) -> tuple[dict[str, float], float, list[Any]]:
        weights = weights_of([{"weights": one.weights, "shared": one.is_shared} for one in folded])
        if not any(weights.values()):
            return weights, math.nan, []
        coefficients = folded[0].coefficients
        factors = [c / weights[name] if weights[name] else 0.0 for name, c in coefficients.items()] or [1.0]
        norm = math.sqrt(scheduler.merge(factors))
        if not math.isfinite(norm):
            raise core.NonFiniteLossError(
                f"Expected a gradient of finite norm, got {norm}. No update was made. Make the loss smaller, "
                "or accumulate in a wider dtype."
            )
        scale = min(1.0, settings.clip_norm / (norm + 1e-6))
        used = frozenset[int]().union(*[one.used for one in folded])
        return weights, norm, scheduler.update(scale, used, options)

    def _prepared(self, task: Task, settings: Plan, remote: Callable[[str], Any]) -> Scheduler:
        fixed, modes = fixed_of(task), settings_of(task)
        shapes = [(one.shape, one.dtype) for one in fixed]
        held = *task.network.parameters, *task.optimizers
        made_of: list[Any] = [*map(id, held), shapes, len(modes), {**task.loss.coefficients}]
        now = modes, contents(fixed)
        if self._scheduler is None or made_of != self._made_of:
            self._scheduler, self._made_of = self._started(task, settings, remote), made_of
        elif now != self._fixed:
            self._scheduler.fix(modes, fixed)
        self._outside.refuse_changes()
        self._fixed = now
        scheduler, layout, parameters = self._scheduler, self._scheduler.layout, task.network.parameters
        if not self._is_loaded or self._known != contents(parameters):
            states: list[Any] = [state for _, state in scheduler.snapshots]  # stays if parameters changed
            if not self._is_loaded:
                for one in task.optimizers:
                    one.state_dict()  # fetches state from the servers of another step
                states = [scheduler.cluster.put(one) for one in layout.split(task.optimizers, parameters)]
            rooms = [np.empty(size, layout.dtype) for size in layout.sizes]
            values = [layout.flat(parameters, shard, room) for shard, room in enumerate(rooms)]
            scheduler.load(values, states)
            self._is_loaded, self._known = True, contents(parameters)  # as after an update
        return scheduler

    def _started(self, task: Task, settings: Plan, remote: Callable[[str], Any]) -> Scheduler:
        parameters, optimizers = task.network.parameters, task.optimizers
        layout = Layout.of(parameters, optimizers, self.servers, settings.accumulation_dtype)
        device = self._device or parameters[0].device.type
        if self._scheduler is not None:
            warnings.warn(
                "Expected the trained parameters and optimizers of the last step, got others: servers and "
                "workers start again, which takes seconds. Freezing or unfreezing layers does it once; give "
                "each Step a ParameterServer of its own.",
                stacklevel=2,
            )
            self.bring_state()
            self._scheduler.end()
            self._scheduler = None
        if self._cluster is None:
            where, gpus = self._where, int(device != "cpu")
            self._cluster = RayCluster(where, gpus) if where is None or isinstance(where, str) else where
        try:
            scheduler = Scheduler(self._cluster, remote(device), layout, identity(task), workers=self.workers)
        except BaseException:
            self.stop()
            raise
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for one in optimizers:
            self._hooks += [
                one.register_state_dict_pre_hook(self.bring_state),
                one.register_load_state_dict_post_hook(self.forget_state),
                one.register_step_pre_hook(self.hand_back),
            ]
        self._optimizers, self._parameters, self._outside = optimizers, parameters, OutsideValues(task)
        self._is_loaded = False
        return scheduler

    def _updated(self, task: Task) -> None:
        self._is_loaded = False  # so that `hand_back` leaves the state there
        try:
            for optimizer in task.optimizers:
                optimizer.step()  # without gradients, for schedulers that count steps
        finally:
            self._is_loaded = True
        task.progress.updates += 1
        for one in task.schedulers:
            one.step()
        task.progress.note(task.schedulers)

    def bring_state(self, *_: object) -> None:
        """Copy the optimizer state from the servers into this process's optimizers."""
        scheduler = self._scheduler
        if scheduler is not None and self._is_loaded:
            states = [scheduler.cluster.get(state) for _, state in scheduler.snapshots]
            scheduler.layout.join(states, self._optimizers, self._parameters)

    def forget_state(self, *_: object) -> None:
        """Send the state of this process's optimizers to the servers at the next step."""
        self._is_loaded = False

    def hand_back(self, *_: object) -> None:
        """Copy the state here before this process's optimizers make an update themselves."""
        self.bring_state()
        self.forget_state()

    def add_worker(self) -> None:
        """Add a worker."""
        self.workers += 1
        if self._scheduler is not None:
            self._scheduler.add_worker()

    def remove_worker(self) -> None:
        """Remove a worker; its units go to others.

        Raises:
            PlanError: it is the last worker.
        """
        if self.workers == 1:
            raise core.PlanError(
                f"Expected another worker to stay, got {self.workers} in all. Call stop() instead."
            )
        self.workers -= 1
        if self._scheduler is not None:
            self._scheduler.remove_worker()

    def stop(self) -> None:
        """End servers and workers; this process keeps parameters and state. The next step starts new ones."""
        try:
            self.bring_state()
        finally:
            cluster, self._cluster, self._scheduler = self._cluster, None, None
            if cluster is not None:
                cluster.close()


def _rows(batch: core.Batch, indices: range) -> Any:
    if isinstance(batch, core.ColumnBatch):
        return next(batch.only(indices).cut(len(indices)))
    if isinstance(batch, core.SampleBatch):
        return [batch.given[row] for row in indices]
    assert isinstance(batch, core.TensorBatch)  # noqa: S101 - there is no other that a step admits
    return batch.only(indices).whole


def _report(
    folded: Sequence[Folded], weights: Mapping[str, float], norm: float, task: Task
) -> core.StepReport:
    loss = task.loss
    terms = {
        name: fsum(one.totals.get(name, 0.0) for one in folded) / (1 if loss.divided else weight)
        if weight
        else math.nan
        for name, weight in weights.items()
    }
    used = [loss.coefficients.get(name, 1.0) * value for name, value in terms.items() if weights[name]]
    cut = tuple(size for one in folded for size in one.cut)
    return core.StepReport(
        loss=fsum(used) if used else math.nan,
        terms=terms,
        weights=weights,
        rows=sum(cut),
        micro_batches=len(cut),
        grad_norm=norm,
        updated=any(weights.values()),
        cut=cut,
        update=task.progress.updates,
    )
