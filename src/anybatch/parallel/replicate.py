"""Data parallelism: every rank computes some rows of one logical batch, and all make the same update."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import fsum
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch.batchnorm import names_of_batch_norms
from anybatch.core import LossError, NonFiniteLossError, PlanError, RankError, all_finite, local
from anybatch.engine import Agreed, Gradient, Plan, Progress, Strategy, Sums, Task, accumulation_dtype
from anybatch.parallel.compression import Codec
from anybatch.parallel.fingerprint import Drift, fingerprint, refuse_differences, refuse_drift
from anybatch.parallel.group import Group, all_gather_rows, answered, exchange, rank, ranks, sending_device

_NO_UPDATE = "No rank has made the update."
_SAID = 600  # characters of an error sent to other ranks; they fit a message at 6 bytes each
_BUCKET = 8 << 20  # bytes of gradients sent together; a larger gradient is sent alone, without a copy


class Replicate(Strategy):
    """Exact data parallelism: each rank passes its own rows, and their union is the logical batch.

    Every rank holds the whole model. The gradient of each rank's rows is divided by the weight (rows, tokens)
    of all ranks and summed once per step, after the last micro-batch. So ranks may have different numbers of
    rows and micro-batches, also none: pass `None` or tensors of zero rows. After each update the parameters
    are bit-identical on all ranks.

    A step sends one message of 4 KiB per rank and the gradient in buckets of 8 MiB, however many micro-
    batches there are. A loss over all rows (`ab.WholeBatch`) gathers the model's outputs as well. The first
    message of a run also compares model, weights, optimizer, loss and options.

    If a rank fails before the update, no rank makes it, and every rank raises an error that names the first
    that failed. If a rank ends, the others raise a `RankError` within the timeout of the process group.

    Args:
        compression: sends fewer bytes, and changes the result: `DeepGradientCompression(...)`, or
            `Cast("bf16")`. None sends the exact gradient.
        group: the process group; None for the default one, or the group of a DistributedDataParallel.

    Raises:
        PlanError: no process group of at least two ranks is initialised. torchrun initialises one.
    """

    is_many = True
    _least = 2  # ranks

    def __init__(self, compression: Codec | None = None, group: Group = None) -> None:
        if ranks(group) < self._least:
            raise PlanError(
                f"Expected a process group of at least 2 ranks, got {ranks(group)}. Start the program with "
                'torchrun --nproc-per-node 2 program.py, or say strategy="auto", which also runs alone.'
            )
        self.compression, self.group = compression, group
        self.bytes_sent = 0  # bytes of gradients that this rank passed to collectives in the last step
        self._fingerprint: dict[str, str] | None = None
        self._is_known = False  # the fingerprints of all ranks agree
        self._is_told = False  # all ranks know that this step has failed
        self._is_reducing = self._is_meeting = self._is_broken = False
        self._has_encoded = self._is_empty = False
        self.drift = Drift()
        self._progress, self._updates = Progress(), 0  # updates made before this step
        self._gathered: tuple[list[Tensor], int] | None = None

    @property
    def is_broken(self) -> bool:
        """Return True if ranks wait at different places, where no message reaches them."""
        return self._is_broken

    def begin(self, task: Task, settings: Plan) -> None:
        """Begin a step or a window; raise PlanError for existing gradients and unsupported settings."""
        self._is_told, self._gathered, self._has_encoded = False, None, False
        self._is_meeting = False
        self._progress, self._updates = task.progress, task.progress.updates
        if self._is_broken:
            raise RankError(
                f"Expected all ranks at the same step, got rank {rank(self.group)} that failed while "
                "gradients or statistics of a SyncBatchNorm were summed, or shards gathered. Start all ranks "
                "again from the last checkpoint."
            )
        if task.optimizers and any(p.grad is not None for p in task.network.parameters):
            found = [task.names()[p] for p in task.network.parameters if not _is_zero(p.grad)]
            if found:
                raise PlanError(
                    f"Expected no gradients before a step on several ranks, got some of {found[:3]}: they "
                    "would be added once per rank. Call optimizer.zero_grad() before the step."
                )
        if not self._is_known:
            if lazy := [name for name, p in task.model.named_parameters() if is_lazy(p)]:
                raise PlanError(
                    f"Expected parameters with values on several ranks, got lazy ones {lazy[:3]}, which each "
                    "rank would draw for itself. Call the model on a few rows before the step is made."
                )
            if settings.batch_norm == "micro":
                _refuse_sync_batch_norm(task.model)
            if self.compression is not None:
                self.compression.check(task.optimizers)
            self._device = task.network.parameters[0].device
            self._fingerprint = fingerprint(task, settings, self.compression)
        self._task, self._settings = task, settings
        self.drift.begin(task, is_first=not self._is_known)

    def meet(self, task: Task, parts: int) -> None:
        """Agree on one micro-batch per rank, whose rows meet in a SyncBatchNorm.

        Raises:
            PlanError: a rank has none, or several; or a layer adds over other ranks than this step.
        """
        norms = [norm for norm in task.network.batch_norms if isinstance(norm, nn.SyncBatchNorm)]
        named = names_of_batch_norms(task.model, norms)
        mine = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        if any(dist.get_process_group_ranks(one.process_group or dist.group.WORLD) != mine for one in norms):
            raise PlanError(
                f"Expected SyncBatchNorm over the ranks of the step, {mine}, got another process group in "
                f"{named}: the result would depend on the split over ranks. Give both the same group."
            )
        counts = [one["parts"] for one in self._agree({"parts": parts})]
        if any(count != 1 for count in counts):
            self._fail(
                PlanError,
                f"Expected one micro-batch on every rank with SyncBatchNorm in training mode ({named}), got "
                f"{counts} on ranks 0 to {len(counts) - 1}: the batch is split over ranks, whose rows meet "
                "in this layer, and must not be split further. Give every rank rows and no micro_batch, or "
                'use batch_norm="frozen" or ab.batch_norm_to_group_norm(model).',
            )
        self._is_meeting = True

    def undo(self, said: str, kind: type[Exception]) -> None:
        """Refuse to run a micro-batch again where the other ranks wait in its SyncBatchNorm."""
        if self._is_meeting:
            raise kind(
                f"Expected the micro-batch of this rank to succeed at once with SyncBatchNorm, got {said!r}. "
                "Other ranks wait in the layer, so it was not run again: start all ranks from a checkpoint. "
                'Pass fewer rows, or use batch_norm="frozen" or ab.batch_norm_to_group_norm(model).'
            )

    def gather(self, values: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """Join the rows of all ranks; return them, and the number of rows of the ranks before this one."""
        if self._gathered is None:  # otherwise a retry after out-of-memory; other ranks do not gather again
            kinds = [
                (str(one.dtype).removeprefix("torch."), list(one.shape[1:]), one.device.type)
                for one in values
            ]
            said = self._agree({"gather": kinds, "rows": len(values[0]) if values else 0})
            self._gathered = self._gather(said, values)
        return self._gathered

    def _gather(
        self, said: Sequence[Mapping[str, Any]], values: Sequence[Tensor]
    ) -> tuple[list[Tensor], int]:
        if any("gather" not in one and one["rows"] for one in said):
            self._fail(RankError, f"Expected outputs from all {len(said)} ranks with rows, got some without.")
        forms = [one["gather"] for one in said if "gather" in one]
        if any(form != forms[0] for form in forms):
            raise LossError(
                f"Expected outputs and targets of one dtype, shape and kind of device on all ranks, but for "
                f"the rows, got {forms}. Pad them to one length in the model or in `collate`."
            )
        counts = [one["rows"] if "gather" in one else 0 for one in said]
        if not values:
            own = self._device  # on another device another backend would be used, and wait for ever
            values = [
                torch.empty(0, *shape, dtype=getattr(torch, name), device=own if own.type == kind else kind)
                for name, shape, kind in forms[0]
            ]
        return all_gather_rows(values, counts, self.group), sum(counts[: rank(self.group)])

    def close(self, sums: Sums) -> dict[str, float]:
        """Add up weights and losses over ranks, and agree on the loss scale; raise if a rank failed."""
        self._undo()  # after an attempt with a gradient that was not finite
        self._is_meeting = False
        here, _ = sums.read(sums.weigh())
        message = {
            "weights": here,
            "totals": sums.totals,
            # These are the weights of all ranks: 1 for a sum, all rows for a whole-batch loss.
            "shared": sums.division.divisors is not None,
            "rows": sum(sums.rows),
            "dropped": sums.dropped,
            "scale": sums.task.scale.state(),
            "layout": [
                len(sums.task.network.parameters),
                sum(p.numel() for p in sums.task.network.parameters),
                sums.task.progress.updates,
            ],
            "drift": self.drift.message(sums),
        }
        said = self._settle(message, sums)
        if any("gather" in one for one in said):  # from ranks with rows; this one has none
            self._gather(said, ())
            said = self._agree(message)
        layouts = [one["layout"] for one in said]
        if any(one != layouts[0] for one in layouts):
            self._fail(
                PlanError,
                "Expected the same parameters trained and as many updates made on every rank, got "
                f"parameters, elements and updates {layouts}. After an error in an update, load the last "
                "checkpoint.",
            )
        self._compare([one["drift"] for one in said])
        named = [one["weights"] for one in said if one["weights"]]
        if any(one.keys() != named[0].keys() for one in named):
            self._fail(
                LossError, f"Expected the same terms of the loss on every rank, got {[*map(list, named)]}."
            )
        names = [*named[0]] if named else []
        scale = sums.task.scale.state()
        sums.task.scale.load({key: min(one["scale"][key] for one in said) for key in scale})
        sums.agreed = Agreed(
            totals={name: fsum(one["totals"].get(name, 0.0) for one in said) for name in names},
            rows=sum(one["rows"] for one in said),
            dropped=sum(one["dropped"] for one in said),
        )
        self._chosen = sums.plan.accumulation_dtype
        self._gathered, self._is_reducing = None, True
        self._names = sums.task.names() if self.compression else {}
        add = max if any(one["shared"] for one in said) else fsum
        weights = {name: add(one["weights"].get(name, 0.0) for one in said) for name in names}
        self._is_empty = not any(weights.values())
        return weights

    def _settle(self, message: Mapping[str, Any], sums: Sums) -> list[dict[str, Any]]:
        return self._agree(message)

    def reduce(self, gradients: Gradient) -> Gradient:
        """Sum the gradients over ranks, bit-identical on all; raise PlanError for sparse ones."""
        like = {p: accumulation_dtype(p.dtype, self._chosen) for p in self._task.network.parameters}
        if any(one.is_sparse for one in gradients.values()):
            raise PlanError(
                f"Expected dense gradients on several ranks, got sparse ones of {len(gradients)} parameters. "
                "Leave out sparse=True of the embedding."
            )
        if self._is_empty:  # no update, so the codec keeps its residual
            reduced = gradients
        elif self.compression is None:
            reduced = self._all_reduced(gradients, like)
        else:
            reduced = self._compressed(self.compression, gradients, like, self._names)
        self._is_reducing = False
        return reduced

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks, once per step, that this one has failed: they wait in `gather` or `close`."""
        self._undo()
        if self._is_reducing or self._is_meeting:  # a message would reach a collective of something else
            self._is_broken = True
        elif not (self._is_told or self._is_broken or isinstance(error, RankError)):
            self._is_told = True
            with suppress(RankError):  # the caller raises `error`
                said = " ".join([str(error), *getattr(error, "__notes__", ())])[:_SAID]
                made = self._progress.updates if self._progress.updates > self._updates else 0
                exchange({"failed": type(error).__name__, "said": said, "made": made}, self.group)

    def _undo(self) -> None:
        if self._has_encoded and self.compression is not None:
            self.compression.undo()
        self._has_encoded = False

    def _agree(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        if not self._is_known:
            message = {**message, "is": self._fingerprint}
        said = exchange(message, self.group)
        for number, one in enumerate(said):
            if "failed" in one:
                # Every rank skips the same update when non_finite="skip".
                kind = NonFiniteLossError if one["failed"] == NonFiniteLossError.__name__ else RankError
                when = f" after update {one['made']}, which all ranks have made" if one.get("made") else ""
                self._fail(
                    kind,
                    f"Expected all ranks to finish, got {one['failed']} on rank {number}{when}, which says "
                    f"{one['said']!r}.",
                    "No rank has made another." if when else _NO_UPDATE,
                )
        if len({"parts" in one for one in said}) > 1:
            self._fail(
                PlanError,
                "Expected SyncBatchNorm in the same mode on every rank, got it in training on ranks "
                f"{[number for number, one in enumerate(said) if 'parts' in one]} only.",
            )
        if not self._is_known:
            try:
                refuse_differences([one["is"] or {} for one in said])
            except PlanError:
                self._is_told = True
                raise
            self._is_known = True
        return said

    def _compare(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Raise PlanError for drifted ranks; compare everything if one of them loaded something."""
        try:
            refuse_drift(said)
        except PlanError:
            self._is_told = True
            raise
        self.drift.warn_of_same_rows(said)
        if any(one["touched"] for one in said):
            written = {*self.drift.written}
            self._fingerprint = fingerprint(self._task, self._settings, self.compression, written)
            self._is_known = False
            self._agree({})

    def _fail(self, kind: type[Exception], said: str, update: str = _NO_UPDATE) -> NoReturn:
        self._is_told = True
        raise kind(f"{said} {update}")

    def _all_reduced(self, gradients: Gradient, like: Mapping[nn.Parameter, torch.dtype]) -> Gradient:
        """Sum in buckets. A parameter without gradient on this rank counts as zeros if others have one."""
        self.bytes_sent = 0
        has = torch.tensor([float(p in gradients) for p in like])
        found: Gradient = {}
        with answered(self.group):
            for index, bucket in enumerate(_buckets(like)):  # the smallest first
                parts = [_flat(gradients.get(p), p, like[p]) for p in bucket]
                if not index:
                    parts.append(has.to(parts[0].device, parts[0].dtype))
                flat = parts[0] if len(parts) == 1 else torch.cat(parts)
                flat = flat.to(sending_device(parts[0].device, self.group))
                dist.all_reduce(flat, group=self.group)
                self.bytes_sent += flat.nbytes
                values = flat.to(parts[0].device).split_with_sizes([part.numel() for part in parts])
                if not index:
                    has = values[-1]
                found.update(
                    {p: _shaped(value, p, like[p]) for p, value in zip(bucket, values, strict=False)}
                )
        return {p: found[p] for p, count in zip(like, has.tolist(), strict=True) if count}

    def _compressed(
        self,
        codec: Codec,
        gradients: Gradient,
        like: Mapping[nn.Parameter, torch.dtype],
        names: Mapping[nn.Parameter, str],
    ) -> Gradient:
        named = {names[p]: torch.empty_like(p, dtype=dtype) for p, dtype in like.items()}
        mine = codec.encode({names[p]: value for p, value in gradients.items()}, named)
        self._has_encoded, self.bytes_sent = True, mine.nbytes
        counts = [one["bytes"] for one in exchange({"bytes": len(mine)}, self.group)]
        (whole,) = all_gather_rows([mine], counts, self.group)
        found = codec.decode(whole.split_with_sizes(counts), named)
        return {p: found[names[p]] for p in like if names[p] in found}


def _refuse_sync_batch_norm(model: nn.Module) -> None:
    found = [
        name for name, one in model.named_modules() if isinstance(one, nn.SyncBatchNorm) and one.training
    ]
    if found:
        raise PlanError(
            f'Expected no SyncBatchNorm with batch_norm="micro" on several ranks, got {found[:3]}: it waits '
            "for the other ranks in every micro-batch, and they may have fewer. Leave batch_norm out for one "
            'micro-batch per rank, or use BatchNorm, batch_norm="frozen", or '
            "ab.batch_norm_to_group_norm(model)."
        )


def _is_zero(gradient: Tensor | None) -> bool:
    return gradient is None or (all_finite([local(gradient)]) and not bool(local(gradient).count_nonzero()))


def _buckets(like: Mapping[nn.Parameter, torch.dtype]) -> list[list[nn.Parameter]]:
    """Return parameters whose gradients are sent together: one device and dtype, in the common order."""
    buckets: list[list[nn.Parameter]] = []
    kind, size = None, 0
    for p, dtype in like.items():
        nbytes = p.numel() * dtype.itemsize
        if kind != (p.device, dtype.to_real()) or size + nbytes > _BUCKET:
            buckets.append([])
            kind, size = (p.device, dtype.to_real()), 0
        buckets[-1].append(p)
        size += nbytes
    return sorted(buckets, key=lambda bucket: sum(p.numel() for p in bucket))


def _flat(gradient: Tensor | None, p: nn.Parameter, dtype: torch.dtype) -> Tensor:
    if gradient is None:
        gradient = torch.zeros(p.shape, dtype=dtype, device=p.device)
    flat = gradient.contiguous().reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def _shaped(flat: Tensor, p: nn.Parameter, dtype: torch.dtype) -> Tensor:
    return (torch.view_as_complex(flat.view(-1, 2)) if dtype.is_complex else flat).view(p.shape)
