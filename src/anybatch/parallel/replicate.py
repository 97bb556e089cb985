"""Data parallelism: every rank computes some rows of one logical batch, and all make the same update."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import fsum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch.batchnorm import names_of_batch_norms
from anybatch.core import (
    AnybatchError,
    LossError,
    PlanError,
    RankError,
    local,
    torch_private as private,
)
from anybatch.engine import Agreed, Gradient, Plan, Progress, Sums, Task, accumulation_dtype
from anybatch.parallel.buckets import Buckets
from anybatch.parallel.compression import Codec
from anybatch.parallel.fingerprint import fingerprint, hash_of
from anybatch.parallel.group import Group, Message, all_gather_rows, exchange, rank, ranks
from anybatch.parallel.messages import NO_UPDATE, Early, Messages, Speaker, bank_of, factor_of, weights_of

_SAID = 600  # characters of an error sent to other ranks; they fit a message at 6 bytes each
_SMALL = 1 << 20  # bytes of gradients below which nothing is sent before the last backward is over


class Replicate(Speaker):
    """Exact data parallelism: each rank passes its own rows, and their union is the logical batch.

    Every rank holds the whole model. The gradient of each rank's rows is divided by the weight (rows, tokens)
    of all ranks and summed once per step, after the last micro-batch. So ranks may have different numbers of
    rows and micro-batches, also none: pass `None` or tensors of zero rows. After each update the parameters
    are bit-identical on all ranks.

    A step sends one message of 4 KiB per rank and the gradient in buckets of 8 MiB, however many micro-
    batches there are; with 1 MiB of gradients or more, the message before the last backward and buckets as
    it fills them. A loss over all rows (`ab.WholeBatch`) gathers the model's outputs as well. The first
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
        super().__init__(compression, group)
        self.bytes_sent = 0  # bytes of gradients that this rank passed to collectives in the last step
        self.is_broken = False  # ranks wait at different places, where no message reaches them
        self._is_apart = False  # ranks wait in a collective that is no message
        self._undo: Callable[[], None] = _nothing  # of the gradient that was compressed last
        self._progress, self._updates = Progress(), 0  # updates made before this step
        self._early: Early | None = None  # this step's message, sent before its last backward
        self._is_late = False  # gradients change after backward has made them: nothing is sent early

    def begin(self, task: Task, settings: Plan) -> None:
        """Begin a step or a window; raise PlanError for existing gradients and unsupported settings."""
        self._is_told = self._is_apart = False
        self._gathered, self._undo, self._drift = None, _nothing, {}
        self._progress, self._updates = task.progress, task.progress.updates
        if self.is_broken:
            raise RankError(
                f"Expected all ranks at the same step, got rank {rank(self.group)} that failed while "
                "gradients or statistics of a SyncBatchNorm were summed, or shards gathered. Start all ranks "
                "again from the last checkpoint."
            )
        held = [p for p in task.network.parameters if task.optimizers and p.grad is not None]
        if found := [p for p in held if local(p.grad).count_nonzero()]:
            raise PlanError(
                f"Expected no gradients before a step on several ranks, got some of "
                f"{[task.names()[p] for p in found[:3]]}: they would be added once per rank. Call "
                "optimizer.zero_grad() before the step."
            )
        if not self._is_known:
            if lazy := [name for name, p in task.model.named_parameters() if is_lazy(p)]:
                raise PlanError(
                    f"Expected parameters with values on several ranks, got lazy ones {lazy[:3]}, which each "
                    "rank would draw for itself. Call the model on a few rows before the step is made."
                )
            inside = task.model.modules()
            norms = [one for one in inside if isinstance(one, nn.SyncBatchNorm) and one.training]
            if norms and settings.batch_norm == "micro":
                raise PlanError(
                    'Expected no SyncBatchNorm with batch_norm="micro" on several ranks, got '
                    f"{names_of_batch_norms(task.model, norms)}: it waits for the other ranks in every "
                    "micro-batch, and they may have fewer. Leave batch_norm out for one micro-batch per "
                    'rank, or use BatchNorm, batch_norm="frozen", or ab.batch_norm_to_group_norm(model).'
                )
            if self.compression is not None:
                self.compression.check(task.optimizers)
            self._device = task.network.parameters[0].device
            self._fingerprint = fingerprint(task, settings, self.compression)
        self._task, self._settings = task, settings
        parameters, chosen = task.network.parameters, settings.accumulation_dtype
        like = {p: accumulation_dtype(p.dtype, chosen) for p in reversed(parameters)}
        if like != self._like:  # the last layers are the first in a backward
            self._like, self._order, self._is_ordered = like, "", False
        self.drift.begin(task, is_first=not self._is_known)

    def meet(self, task: Task, parts: int) -> None:
        """Agree on one micro-batch per rank, whose rows meet in a SyncBatchNorm over the same ranks."""
        norms = [norm for norm in task.network.batch_norms if isinstance(norm, nn.SyncBatchNorm)]
        named = names_of_batch_norms(task.model, norms)
        mine = dist.get_process_group_ranks(self.group)
        if any(dist.get_process_group_ranks(one.process_group) != mine for one in norms):
            raise PlanError(
                f"Expected SyncBatchNorm over the ranks of the step, {mine}, got another process group in "
                f"{named}: the result would depend on the split over ranks. Give both the same group."
            )
        counts = [one["parts"] for one in self._agree({"parts": parts})]
        if any(count != 1 for count in counts):
            raise PlanError(
                f"Expected one micro-batch on every rank with SyncBatchNorm in training mode ({named}), got "
                f"{counts} on ranks 0 to {len(counts) - 1}: the batch is split over ranks, whose rows meet "
                "in this layer, and must not be split further. Give every rank rows and no micro_batch, or "
                f'use batch_norm="frozen" or ab.batch_norm_to_group_norm(model). {NO_UPDATE}'
            )
        self._is_apart = True

    def undo(self, said: str, kind: type[Exception]) -> None:
        """Refuse to run a micro-batch again where the other ranks wait in its SyncBatchNorm."""
        if self._is_apart:
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
            raise RankError(
                f"Expected outputs from all {len(said)} ranks with rows, got some without. {NO_UPDATE}"
            )
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

    def flow(self, ahead: Callable[[], Sums]) -> None:
        """Send the message of the step, and buckets as the last backward, which begins now, fills them."""
        if self._nbytes() <= _SMALL or self.compression is not None or self._is_late:
            return
        if any(private.has_backward_hooks(one) for one in self._task.network.modules):
            return  # they may replace gradients that were sent, or write to `.data`
        if self._early is None:
            try:
                message = self._message(ahead())
            except AnybatchError:  # `close` raises it again
                return
            self._early = self._begun(message)
            if "hash" in (brief := self._brief(message)):
                self._early.sent = Message({**brief, "early": True}, self.group)
        self._early.buckets.watch(partial(self._factor, self._early))

    def close(self, sums: Sums) -> dict[str, float]:
        """Add up weights and losses over ranks, and agree on the loss scale; raise if a rank failed."""
        self._undo()  # after an attempt with a gradient that was not finite
        self._is_apart = False
        message, early = self._message(sums), self._stopped()
        message["order"] = self._order  # maybe seen just now
        if early is not None:
            self.drift.look(sums.task)  # its last backward may have written to buffers
        said = self._settle(message, sums, early and early.sent)
        if any("gather" in one for one in said):  # from ranks with rows; this one has none
            self._gather(said, ())
            said = self._agree(message)
        self._refuse(said)
        if "hash" not in said[0]:
            if len({one["order"] for one in said}) > 1:
                self._like, self._order = dict(reversed(self._in_order(self._like).items())), ""
            self._is_ordered = True
            self._compare(said)
        scale, weights = sums.task.scale.state(), weights_of(said)
        sums.task.scale.load({key: min(one["scale"][key] for one in said) for key in scale})
        self._gathered, self._is_apart = None, True
        self._is_summed = not any(weights.values())  # without an update the codec keeps its residual
        reduced: Gradient | None = None
        if not self._is_summed and any("early" in one for one in said):
            early, bank = early or self._begun(message), bank_of(sums)
            failed = bank is None or early.message != message
            reduced = early.buckets.finish(bank or {}, factor_of(message, weights), failed=failed)
            self._is_late = self._is_late or early.buckets.is_changed
            if reduced is None:  # a rank has run its last micro-batch again
                return self.close(sums)
            self._is_summed, self.bytes_sent = True, early.buckets.bytes_sent
        sums.agreed = Agreed(
            totals={name: fsum(one["totals"].get(name, 0.0) for one in said) for name in weights},
            rows=sum(one["rows"] for one in said),
            dropped=sum(one["dropped"] for one in said),
            reduced=reduced and self._in_order(reduced),
        )
        return weights

    def _begun(self, message: Mapping[str, Any]) -> Early:
        return Early(message, Buckets(self._like, self.group, keeps=True))

    def _settle(self, message: Mapping[str, Any], sums: Sums, sent: Message | None) -> Messages:
        return self._agree(message, sent)

    def _stopped(self) -> Early | None:
        """Return what was sent before the last backward was over; nothing more is."""
        early, self._early = self._early, None
        if early is not None:
            early.buckets.unwatch()
            seen = early.buckets.order
            if not self._is_ordered and len(seen) == len(self._like):
                places = {p: place for place, p in enumerate(self._task.network.parameters)}
                self._like = {p: self._like[p] for p in seen}
                self._order = hash_of([places[p] for p in seen])
        return early

    def _in_order(self, found: Mapping[nn.Parameter, Any]) -> dict[nn.Parameter, Any]:
        return {p: found[p] for p in self._task.network.parameters if p in found}

    def reduce(self, gradients: Gradient) -> Gradient:
        """Sum the gradients over ranks, bit-identical on all; raise PlanError for sparse ones."""
        if sparse := sum(one.is_sparse for one in gradients.values()):
            raise PlanError(
                f"Expected dense gradients on several ranks, got {sparse} sparse of {len(gradients)}. "
                "Leave out sparse=True of the embedding."
            )
        codec = self.compression
        if self._is_summed:
            found = gradients
        elif codec is None:
            buckets = Buckets(self._like, self.group, keeps=False)
            found = self._in_order(buckets.finish(gradients) or {})
            self.bytes_sent = buckets.bytes_sent
        else:
            names = self._task.names()
            named = {names[p]: torch.empty_like(p, dtype=dtype) for p, dtype in self._like.items()}
            mine = codec.encode({names[p]: value for p, value in gradients.items()}, named)
            self._undo, self.bytes_sent = codec.undo, mine.nbytes
            counts = [one["bytes"] for one in exchange({"bytes": len(mine)}, self.group)]
            (whole,) = all_gather_rows([mine], counts, self.group)
            sums = codec.decode(whole.split_with_sizes(counts), named)
            found = {p: sums[names[p]] for p in self._like if names[p] in sums}
        self._is_apart = False
        return found

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks, once per step, that this one has failed: they wait in `gather` or `close`."""
        self._undo()
        early = self._stopped()
        if self._is_apart:
            self.is_broken = True
        elif not (self._is_told or self.is_broken or isinstance(error, RankError)):
            self._is_told = True
            with suppress(Exception):  # the caller raises `error`
                if early and self._factor(early) is not None:  # others may have begun the sum
                    early.buckets.finish({}, failed=True)
                said = " ".join([str(error), *getattr(error, "__notes__", ())])[:_SAID]
                made = self._progress.updates if self._progress.updates > self._updates else 0
                exchange({"failed": type(error).__name__, "said": said, "made": made}, self.group)


def _nothing() -> None: ...
