"""Sharded models (FSDP2): each rank holds a shard of every weight; micro-batches run in lockstep."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anybatch.core import OpenBatch, PlanError, RankError, is_shard, local, torch_private as private, tree
from anybatch.engine import Gradient, Part, Plan, Restart, Sums, Task, accompany, norm_of
from anybatch.integrations import wants_router_loss
from anybatch.losses import ModelTerms, WholeBatch
from anybatch.parallel.group import Group, answered, gather_values, leave_error, rank
from anybatch.parallel.messages import NO_UPDATE
from anybatch.parallel.replicate import Replicate
from anybatch.state import rng

_ROWS = 2  # of a micro-batch of weight 0: as many as a BatchNorm needs


class Collective(NamedTuple):
    """A collective of FSDP: an all-gather of weights, or a reduce-scatter of gradients."""

    part: Any  # the sharded module
    sizes: tuple[int, int]  # elements of the output and of the input
    like: Tensor  # of their dtype and device
    group: Any
    op: Any = None  # None for an all-gather

    def replay(self, replicas: Group) -> None:
        """Take part, with weights that others need, and zero gradients, also in their sum over `replicas`."""
        if self.op is None:
            self.part.unshard()
            self.part.reshard()
            return
        output, zeros = map(self.like.new_zeros, self.sizes)
        with answered(self.group):
            dist.reduce_scatter_single(output, zeros, group=self.group, op=self.op)
            if replicas is not None:
                dist.all_reduce(output, group=replicas)


@dataclass(slots=True)
class Collectives:
    """The collectives of a sharded module, which FSDP calls (`set_custom_all_gather`, ...)."""

    part: Any  # the module
    calls: list[Collective]  # collects those of the current micro-batch
    everyone: Group  # of the step, whose ranks an error names

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the memory of a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any = None, async_op: bool = False
    ) -> Any:
        """Gather, or add up and scatter where there is an `op`."""
        sizes = output_tensor.numel(), input_tensor.numel()
        self.calls.append(Collective(self.part, sizes, input_tensor.new_empty(0), group, op))
        with answered(self.everyone):
            if op is not None:
                return dist.reduce_scatter_single(
                    output_tensor, input_tensor, op=op, group=group, async_op=async_op
                )
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class Shard(Replicate):
    """Exact data parallelism for a model prepared with `torch.distributed.fsdp.fully_shard`.

    The model is taken as it is, with its mesh, mixed precision and resharding. FSDP gathers weights and adds
    gradients up in every micro-batch, so all ranks run equally many: ranks agree on the number before the
    first forward, and those with fewer run micro-batches of weight 0 on rows that they had before. The
    gradient is divided once, by the weight of all ranks. So ranks may have different numbers of rows, tokens
    and micro-batches, also none.

    If memory runs out on a rank, or it raises, it takes part in the collectives that are left, with gradients
    of zeros. Then all begin the step again, with smaller micro-batches on that rank, or all raise. In the
    first micro-batch of a run the collectives are not known yet: there the others wait for the timeout of the
    process group.

    `strategy="auto"` chooses this for a sharded model, with the defaults.

    Args:
        hold: keep gradients unsharded until the last micro-batch, and add them up over ranks once per step.
            This needs memory for the whole gradient on each rank. False adds up in every micro-batch. None
            holds them in steps where the `memory=` of every rank has room for it.

    Raises:
        PlanError: when a step is made, for a model that is not sharded as a whole, or over several meshes.

    Example:
        >>> import anybatch as ab
        >>> ab.Options(strategy=Shard(hold=True)).strategy.hold
        True
    """

    is_lockstep = True
    _least = 1  # rank

    def __init__(self, *, hold: bool | None = None) -> None:
        super().__init__()
        self.hold = hold
        self._model: Any = None
        self._orders: dict[bool, Sequence[Collective]] = {}  # of a micro-batch; True: of a first pass
        self._is_inside = False  # others wait for collectives of this `add`
        self._is_first = False  # in the first pass of a loss over all rows
        self._row: Any = None
        self._rows, self._row_of = _ROWS, -1  # of that; updates that had been made when it came
        self._calls: list[Collective] = []  # of the current micro-batch

    def take(self, model: nn.Module) -> None:
        """Read a sharded model; raise PlanError for parameters outside of its shards, and several meshes."""
        if not hasattr(model, "reset_iter_state"):
            raise PlanError(
                f"Expected fully_shard(model) on the model itself, got it on parts of a "
                f"{type(model).__name__}, or a torch before 2.13, whose FSDP cannot be reset after an error. "
                "Call fully_shard(model) after the parts."
            )
        plain = [name for name, p in model.named_parameters() if not hasattr(p, "device_mesh")]
        if plain:
            raise PlanError(
                f"Expected every parameter in a shard, got {plain[:3]} outside. Leave out `ignored_params`, "
                "and initialise lazy parameters before fully_shard(model)."
            )
        shards: list[Any] = [*model.parameters()]
        meshes, placed = {p.device_mesh for p in shards}, {p.placements for p in shards}
        if len(meshes) > 1:
            raise PlanError(
                f"Expected all shards on one mesh, got {len(meshes)}. Pass the same mesh to every "
                "fully_shard(...)."
            )
        (mesh,) = meshes
        axes: int = mesh.ndim
        if {tuple([one.is_shard() for one in found]) for found in placed} != {
            (False,) * (axes - 1) + (True,)
        }:
            raise PlanError(
                f"Expected shards along the last axis of a mesh of one or two, as fully_shard makes them, "
                f"got {sorted(map(str, placed))}. Other axes, such as those of tensor parallelism, are not "
                "supported."
            )
        if axes == 2 and mesh.size() != dist.get_world_size():
            raise PlanError(
                f"Expected a mesh of two axes over all {dist.get_world_size()} ranks, got {mesh.size()}. "
                "Make it with init_device_mesh, or use a mesh of one axis."
            )
        self._model, self._orders, self._row = model, {}, None
        dtypes = private.dtypes_of_shards(model)
        self._can_wait = all(torch.promote_types(one, torch.float32) == one for one in dtypes)
        wide = max(one.itemsize for one in dtypes)
        self._whole_bytes = sum(p.numel() * max(wide, p.itemsize) for p in shards)
        self._parts: list[Any] = [one for one in model.modules() if hasattr(one, "reset_iter_state")]
        self._shards, self._replicas = private.connections_of_shards(model)
        self.group = self._shards if axes == 1 else None

    def ready(self, model: nn.Module) -> None:
        """Reshard what a forward without backward has left unsharded; check a model that is new."""
        if model is not self._model:
            self.take(model)
        if private.keeps_weights(private.groups_of_shards(model)):
            raise PlanError(
                f"Expected weights that are resharded after backward, got a {type(model).__name__} with "
                "set_reshard_after_backward(False), which keeps those from before the update. Leave it out."
            )
        for one in self._parts:
            one.reshard()

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Run forwards in lockstep; after an error others wait for this rank until their timeout."""
        orders, self._orders, self._is_inside = self._orders, {}, True
        try:
            yield
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            self._orders, self._is_inside = orders, False
            self.ready(self._model)

    def begin(self, task: Task, settings: Plan) -> None:
        """Begin a step or a window; raise PlanError for what sharded models do not support."""
        refused = {
            "a model with router losses": isinstance(task.loss, ModelTerms) and wants_router_loss(task.model),
            f"precision={str(settings.precision)!r}": settings.precision.loss_scale is not None,
            'non_finite="drop"': settings.non_finite == "drop",
            "SyncBatchNorm in training mode": task.is_synced(settings),
            "a callback with micro_gradients": bool(task.callbacks.of_micro_gradients),
            "trained parameters of the loss": not all(map(is_shard, task.network.parameters)),
        }
        if found := [name for name, is_asked in refused.items() if is_asked]:
            raise PlanError(
                f"Expected a step that a sharded model supports, got {found[0]}. Leave it out; instead of "
                "float16 use bfloat16."
            )
        super().begin(task, settings)
        if self.hold and not self._can_wait:
            dtypes = sorted(map(str, private.dtypes_of_shards(task.model)))
            raise PlanError(
                f"Expected gradients of at least float32 to hold them, got {dtypes}: FSDP adds them up. Say "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32), or leave hold=True out."
            )
        self.is_held, self._spare = False, 0.0
        if self._row_of == self._updates:
            self._row = None  # it may be why no update was made: zero times NaN is NaN
        task.progress.unchecked = (
            "ranks wait for each other in a sharded model: run ab.check before fully_shard"
        )

    def open(self, part: Part) -> None:
        """Agree on the number of micro-batches; a rank that has seen no row yet gets those of another."""
        self._part, left = part, part.left
        for name, _ in part.ways.plan.blocks:
            _, *inside = self._model.get_submodule(name).modules()
            if any(hasattr(one, "reset_iter_state") for one in inside):
                raise PlanError(
                    f"Expected a recomputed or offloaded block without other shards inside, got {name}, of "
                    "which a part has a fully_shard of its own: torch does not gather it when the block runs "
                    "again. Call fully_shard on the block alone, or leave recompute out."
                )
        for one in self._parts:  # the caller or another step may have changed the options of FSDP
            recorder = Collectives(one, self._calls, self.group)
            one.set_gradient_divide_factor(1.0)
            one.set_force_sum_reduction_for_comms(True)
            one.set_custom_all_gather(recorder)
            one.set_custom_reduce_scatter(recorder)
        self._model.set_is_last_backward(True)
        if left and (self._row is None or self._rows > len(left[0])):  # no more than a micro-batch
            self._rows = min(_ROWS, len(left[0]))
            with rng.preserved():  # `collate` may draw
                (micro,) = part.batch.micro_batches([left[0][: self._rows]])
            self._row, self._row_of = tree.map_leaves(_copied, micro.rows), self._updates
        fits = self._spare >= self._whole_bytes and self._can_wait and not part.sums.redone
        holds = fits if self.hold is None else self.hold
        message = {
            "open": len(left),
            "row": self._row is not None,
            "shown": bool(part.task.callbacks.gradients),
            "hold": holds and False in self._orders,
        }
        said = self._agree(message)
        while any("open" not in one for one in said):  # they learn that this rank begins, or begins again
            said = self._agree(message)
        if len({one["shown"] for one in said}) > 1:
            raise PlanError(
                f"Expected callbacks with `gradients` on all ranks or on none, got some. {NO_UPDATE}"
            )
        self._count, self._at = max(one["open"] for one in said), 0  # of this `add`; those that have begun
        self.is_held = all(one["hold"] for one in said)
        if self.is_held:
            part.reader = None  # a budget counts what a sum in each micro-batch takes
        if self._count and not all(one["row"] for one in said):
            source = [one["row"] for one in said].index(True)
            mine = self._row if rank(self.group) == source else None
            rows = gather_values(mine, lambda size: self._agree({"bytes": size}), self._device, self.group)
            if self._row is None:
                self._row, self._row_of = rows[source], self._updates
        self._is_inside, self._is_first = self._count > 0, isinstance(part.ways.loss, WholeBatch)
        self._calls.clear()
        self._gathered = None

    def first(self, micros: Iterable[tuple[Any, int]]) -> Iterator[tuple[Any, int]]:
        """Yield the micro-batches of a first pass, then those of 0 rows, as many as others have more."""
        missing = ((tree.map_leaves(_copied, self._row), 0) for _ in repeat(None))
        for at, micro in zip(range(1, self._count + 1), chain(micros, missing), strict=False):
            self._at = at
            self._calls.clear()
            yield micro
            private.reset_shards(self._model)  # each forward gathers all weights again
            self._note()
        self._is_inside, self._at = False, 0  # ranks meet in `gather`, and before the second pass

    def _gather(
        self, said: Sequence[Mapping[str, Any]], values: Sequence[Tensor]
    ) -> tuple[list[Tensor], int]:
        self._enter(said)
        return super()._gather(said, values)

    def _enter(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Begin this attempt again with a rank that does."""
        if any("open" in one for one in said):
            raise Restart(self._part, self._part.sizes())

    def spare(self, num_bytes: float) -> None:
        """Note the bytes that a budget leaves free: gradients are held if all fit."""
        self._spare = num_bytes

    def next(self) -> None:
        """Begin a micro-batch; the last one adds up gradients that were held."""
        if self._is_first:
            self._enter(self._agree({"second": True}))
            self._is_inside, self._is_first = True, False
        if self._at:
            self._note()
        self._at += 1
        self._calls.clear()
        is_synced, sums_replicas = self._syncs(self._at)
        for one in self._parts:
            one.set_requires_gradient_sync(is_synced, recurse=False)
            one.set_requires_all_reduce(is_synced and sums_replicas, recurse=False)

    def _syncs(self, at: int) -> tuple[bool, bool]:
        """Return True if a micro-batch adds up gradients over shards, and over replicas."""
        is_last = at == self._count
        return is_last or not self.is_held, is_last or not self._can_wait

    def missing(self, part: Part) -> Iterator[Any]:
        """Yield rows for micro-batches of weight 0, as many as this rank has fewer than others."""
        while self._at < self._count:
            yield tree.map_leaves(_copied, self._row)
        if self._at:
            self._note()
        self._is_inside = False
        if not part.ways.is_whole:
            self._enter(self._agree({"done": True}))

    def _note(self) -> None:
        """Note the order of collectives, which is complete after a micro-batch that reduces."""
        self._orders.setdefault(self._is_first, [*self._calls])

    def _settle(self, message: Mapping[str, Any], sums: Sums, sent: Any) -> Any:
        """Exchange the last message; take part if another rank adds rows to its window, or begins again."""
        said = self._agree(message)
        while any("open" in one for one in said):
            if not isinstance(sums.batch, OpenBatch):
                self._enter(said)
            accompany(sums)
            said = self._agree(message)
        return said

    def reduce(self, gradients: Gradient) -> Gradient:
        """Return the gradients, which FSDP has added up; add up their norm."""
        mine = norm_of([local(one) for one in gradients.values()])
        total = mine.double().square().to(self._device)
        with answered(self.group):
            dist.all_reduce(total, group=self._shards)
        self._norm = total.sqrt().to(mine.dtype)
        self._is_apart = False
        return gradients

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """Return the 2-norm of all shards, of which this rank has some."""
        return self._norm

    def undo(self, said: str, kind: type[Exception]) -> None:
        """Take part in the collectives that are left, before all begin again; raise if they are unknown."""
        self._leave(kind(said))
        if self.is_broken:
            raise kind(
                f"Expected the first micro-batch of a run to succeed at once with a sharded model, got "
                f"{said!r}. Other ranks wait in its collectives, so it was not run again. Start all ranks "
                "again with a smaller micro_batch."
            )

    def abandon(self, error: BaseException) -> None:
        """Take part in the collectives that are left, then tell the other ranks."""
        self._leave(error)
        if not isinstance(error, Restart):  # which the next `open` tells
            super().abandon(error)

    def _leave(self, error: BaseException) -> None:
        if not self._is_inside:
            return
        self._is_inside = False
        private.reset_shards(self._model)
        order = self._orders.get(self._is_first)
        if order is None or isinstance(error, RankError):
            self.is_broken = True
            if not isinstance(error, RankError):  # this rank waits for another, which is at fault
                leave_error(f"{type(error).__name__}: {error}", self.group)
            return
        try:
            done = len(self._calls)
            for at in range(max(self._at, 1), self._count + 1):
                is_synced, sums_replicas = self._syncs(at)
                calls = [one for one in order if is_synced or one.op is None]
                for one in calls[done if at == self._at else 0 :]:
                    one.replay(self._replicas if sums_replicas else None)
        except RankError:
            self.is_broken = True


def _copied(one: Tensor) -> Tensor:
    return one.detach().clone()
