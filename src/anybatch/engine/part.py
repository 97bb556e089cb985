"""Part: the rows of one `add`, micro-batch by micro-batch: forward, backward, and what is left to do."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybatch import core
from anybatch.core import tree
from anybatch.engine.gradients import Apart, InPlace, accumulation_dtype
from anybatch.engine.plan import Plan
from anybatch.engine.sums import UNDECIDED, Division, Sums
from anybatch.engine.task import Reader, Task
from anybatch.losses import Evaluated, Loss, Share
from anybatch.state import Snapshot, rng

_SHOWN = 9  # parts of a cut that are written out
NO_READER = Reader()


class Tried(NamedTuple):
    """The experience of earlier attempts at one `add`."""

    redone: tuple[int, ...] = ()  # as of `Sums`
    is_guarded: bool = False  # look at each micro-batch before it is added
    scale_limit: float = math.inf  # the largest loss scale
    last: frozenset[int] = frozenset()  # first rows of micro-batches that were tried again uncut


NOTHING_TRIED = Tried()


class Ways:
    """The choices that are the same for every micro-batch of an `add`.

    Args:
        plan: how rows are cut, and in which dtypes.
        task: what it is carried out on.
        is_whole: the rows are a whole batch, not one `add` of a window.
        is_dry: gradients are only shown, so they need not be finite.
    """

    def __init__(self, plan: Plan, task: Task, *, is_whole: bool, is_dry: bool) -> None:
        self.plan, self.is_whole = plan, is_whole
        # If the batch is not cut, the loss is torch's own, bit-identical. The total weight of a window, or of
        # several ranks, is unknown before its end.
        is_open = not is_whole or task.strategy.is_many or bool(task.guess)
        self.loss = task.loss if plan.is_cut or is_open else task.loss.uncut()
        # gradients of a micro-batch, until it is over
        self.holds_whole = not is_whole or task.strategy.is_lockstep
        self.is_late = is_open or (plan.non_finite == "drop" and plan.is_cut)
        # each micro-batch is looked at before it is added
        self.is_guarded = (task.scale.is_on or plan.non_finite == "drop") and not is_dry
        self.is_lockstep = task.strategy.is_lockstep
        is_many = task.strategy.is_many
        self.adds_over_ranks = is_many and (self.is_lockstep or task.is_synced(plan))
        self.is_plain = not is_whole or self.loss.is_plain  # a window has opened its loss
        # others are told when the last backward begins, and may take gradients as it finishes them
        is_told = is_many and is_whole and self.is_plain and not self.adds_over_ranks
        self.tells_last = is_told and not (self.is_guarded or is_dry)
        self.computing = None
        if plan.precision.is_mixed:
            self.computing = partial(plan.precision.computing, task.network.kinds)
        self.can_add_in_place = task.network.is_wide
        if plan.accumulate != "auto":
            chosen = plan.accumulation_dtype
            self.can_add_in_place = all(
                accumulation_dtype(p.dtype, chosen) == p.dtype for p in task.network.parameters
            )


class Part:
    """The rows of one `add`: their sums so far, and the micro-batches that are left.

    Attributes:
        sums: of the micro-batches that are done.
        reader: of their cost; None for none.
        is_guarded: look at each micro-batch before it is added.
        tried: grows while micro-batches are undone.
        scale_limit: the largest loss scale of the current micro-batch.
        scale_before: the loss scale before the current micro-batch lowered it; None if it has not.
    """

    def __init__(
        self,
        task: Task,
        ways: Ways,
        batch: core.Batch,
        sums: Sums,
        window: Sums | None,
        *,
        share: Share | None,
        tried: Tried,
    ) -> None:
        self.task, self.ways, self.batch, self.reader = task, ways, batch, task.reader
        self.is_guarded = ways.is_guarded or tried.is_guarded
        self.sums = sums
        sums.redone += tried.redone
        self._window = window
        if window is not None:
            sums.division = window.division
        self.tried, self.scale_limit = tried, tried.scale_limit
        self._share = share
        self._cut, self._done = ways.plan.parts, 0
        self.scale_before: dict[str, float] | None = None
        self._micro: core.Micro | None = None
        self._is_told = False  # callbacks are told of the last micro-batch that is done
        if task.callbacks.begin:
            core.call(task.callbacks.begin, self.count)

    @property
    def count(self) -> int:
        """Micro-batches that are done, with those of the window before these."""
        return len(self.sums.rows) + (0 if self._window is None else len(self._window.rows))

    @property
    def offset(self) -> int:
        """Rows of the window before these."""
        return 0 if self._window is None else self._window.total

    @property
    def is_open(self) -> bool:
        """True once the first pass is over, if the loss makes one."""
        return self.ways.is_plain or self._share is not None

    @property
    def left(self) -> Sequence[Sequence[int]]:
        """Row indices of the micro-batches still to be done, the current one first."""
        return self._cut.parts[self._done :]

    def listeners(self, before: Snapshot) -> tuple[Sequence[Callable[[], object]], ...]:
        """Return what is called when the rows of a micro-batch are there, and when its gradient is added."""
        begun = [self.task.strategy.next] if self.ways.is_lockstep else []
        looks = [before.look] if before.notes else []
        tells = [self._tell_done] if self.task.callbacks.micro_batch else []
        return begun, [*looks, *tells]

    def _tell_done(self) -> None:
        event = core.MicroBatchDone(index=self.count - 1, rows=self.sums.rows[-1])
        core.call(self.task.callbacks.micro_batch, event)

    def first_pass(self, passes: ExitStack, before: Snapshot) -> None:
        """Enter the loss's own context, in which a loss that mixes rows makes a pass over the whole batch."""
        ways, task = self.ways, self.task
        reader = self.reader or NO_READER

        def put_back() -> None:
            before.put_modules_back()
            reader.begin_first(self.batch.rows)

        with ways.plan.precision.computing(task.network.kinds):
            along = ways.loss.along(self.batch, self._cut.sizes, task.model, put_back)
            self._share = passes.enter_context(along)
        reader.first_done()

    def micro_batches(self, before: Snapshot) -> Iterator[core.Micro]:
        """Yield the micro-batches that are left; note first what making one may change."""
        left, self._micro = self.left, None
        micro_batches = self.batch.micro_batches(left)
        for _ in left:
            self._is_told = False
            if before.notes:
                before.begin()
            self._micro = micro = next(micro_batches)
            if self.sums.scale_before is not None:
                self.task.scale.begin(self.scale_limit)
            gradients, reader = self.sums.gradients, self.reader
            if gradients is not None:
                gradients.begin()
            if reader is not None:
                reader.begin(micro, 0 if gradients is None else _nbytes(self, gradients))
            yield micro
            del micro  # before the next one is made

    def done(self) -> None:
        """Mark the current micro-batch as done: its rows are not run again."""
        self._done += 1
        self._is_told = True
        self.scale_before = self._micro = None
        self.scale_limit = self.tried.scale_limit  # a fixed loss scale comes back for the next one

    def leave_out(self) -> None:
        """Drop the current micro-batch: neither its rows nor their weight count."""
        rows = len(self.left[0])
        self.sums.rows.append(rows)
        self.sums.total += rows
        self.sums.dropped += rows
        self.done()

    def cut_smaller(self, most: int) -> None:
        """Cut the rows that are left into micro-batches of at most so many rows."""
        left = core.Cut(tuple(self.left))
        # Parts that were cut by tokens differ in rows, but all need as much memory.
        rest = left.halved() if self.batch.order else left.of_at_most(most)
        self._cut = core.Cut((*self._cut.parts[: self._done], *rest.parts))

    def sizes(self) -> list[int]:
        """Return the rows of all micro-batches, done and left."""
        return [*self.sums.rows, *map(len, self.left)]

    def place(self) -> str:
        """Return the current micro-batch and its rows, for an error."""
        if not self.is_open:
            return "the first pass over the rows of the batch"
        rows, sizes, single = self._cut.parts[self._done - self._is_told], self.sizes(), ""
        if len(rows) == 1 < len(sizes) and self.ways.is_whole:
            shown = sizes if len(sizes) <= _SHOWN else [*sizes[:2], "...", *sizes[-2:]]
            single = f"; the cut {'+'.join(map(str, shown))} leaves one row"
        trimmed = ", ".join([f"batch{path}" for path in self.batch.trimmed])
        cut_off = f', trimmed to its longest row in {trimmed} (order="length")' if trimmed else ""
        after = "a callback, after " if self._is_told else ""
        index = self.count - self._is_told
        return f"{after}micro-batch {index} ({self.rows_in_words(rows)} of the batch{single}){cut_off}"

    def rows_in_words(self, rows: Sequence[int]) -> str:
        """Return these rows by their numbers in the window."""
        return self.batch.rows_in_words(self.offset + rows[0], self.offset + rows[-1] + 1)

    def devices(self) -> str:
        """Return a note for an error if the rows, the model and the loss are on several devices; else ""."""
        network, rows = self.task.network, self.batch.leaves
        if self._micro is not None:
            with suppress(core.BatchError):  # `collate` may return other objects
                rows = tree.flatten(self._micro.rows).leaves
        buffers = network.state.buffers_now()
        found = {"rows": rows, "parameters": network.everyone, "buffers": buffers}
        places = {name: sorted({str(one.device) for one in ones}) for name, ones in found.items()}
        told = [f"{name} on {' and '.join(ones)}" for name, ones in places.items() if ones]
        if len({*chain.from_iterable(places.values())}) < 2:
            return ""
        return (
            f"Got {', '.join(told)}. Move rows with .to(device), or in collate=; a loss with loss.to(device)."
        )

    def loss_of(self, index: Sequence[int]) -> Loss:
        """Return the loss of these rows."""
        if self._share is None:
            return self.ways.loss
        first = self.offset + index[0]
        return self._share(first, first + index[-1] + 1 - index[0])

    def evaluate(self, micro: core.Micro) -> Evaluated:
        """Run the model and the loss on the rows of a micro-batch."""
        ways, task, sums = self.ways, self.task, self.sums
        loss = ways.loss if self._share is None else self.loss_of(micro.indices)
        if ways.computing is None:
            terms = loss.evaluate(task.model, micro.rows)
        else:
            with ways.computing():
                terms = loss.evaluate(task.model, micro.rows)
        known = sums.division.coefficients
        if sums.gradients is None and (not known or terms.sums.keys() == known.keys()):
            self._open(terms, len(micro.indices))
            known = sums.division.coefficients
        if terms.sums.keys() != known.keys():
            raise core.LossError(
                f"Expected the same terms from every micro-batch, got {sorted(terms.sums)} after "
                f"{sorted(known)}. Return ab.Total.zero() for a term that has nothing to add."
            )
        if self.reader is not None:
            self.reader.forward_done()
        return terms

    def _open(self, terms: Evaluated, rows: int) -> None:
        """Fix the divisors after the first forward, and how gradients are accumulated."""
        ways, sums = self.ways, self.sums
        division = sums.division
        if division is UNDECIDED:
            known = core.OpenBatch() if ways.is_late else self.batch
            guess = 0.0 if ways.adds_over_ranks else self.task.guess or 1.0
            division = Division.decide(ways.loss, known, terms, rows, guess=guess)
            if ways.adds_over_ranks and division.divisors is None and len(terms.sums) > 1:
                raise core.LossError(
                    f"Expected a loss of one term with SyncBatchNorm or shards, got {[*terms.sums]}, each of "
                    "which needs a backward of its own. Return one Total."
                )
        for name, one in terms.sums.items():
            division.like[name] = one.dtype, one.device
        banks = [*division.coefficients]
        banks = banks if division.divisors is None else banks[:1]
        task = self.task
        due = task.callbacks.due() if task.callbacks.of_micro_gradients else ()
        if self.is_guarded or due or len(banks) > 1 or not ways.can_add_in_place:
            gradients = Apart(
                task.network.parameters,
                dtype=ways.plan.accumulation_dtype,
                names=banks,
                is_looked_at=self.is_guarded,
                is_whole=bool(due) or ways.holds_whole or ways.plan.non_finite == "drop",
                tell=partial(self._tell, due) if due else None,
            )
        else:
            gradients = InPlace(task.network.parameters, banks[0])
        sums.gradients, sums.division = gradients, division  # last: weights take memory, which may run out

    def _tell(self, due: core.Functions, held: Mapping[str, Mapping[nn.Parameter, Tensor]]) -> None:
        names, shown = self.task.names(), dict[str, list[Tensor]]()
        for bank in held.values():
            for parameter, gradient in bank.items():
                shown.setdefault(names[parameter], []).append(gradient)
        if self._micro is not None:
            micro = self._micro._replace(indices=self.batch.callers(self._micro.indices))
            core.call(due, micro, shown, self.task.scale.value)

    def backward(self, terms: Evaluated) -> None:
        """Accumulate the gradient of a micro-batch, and count its sums and weights.

        Raises:
            NonFinite: the loss or a gradient is not finite, and each micro-batch is looked at.
        """
        sums, task = self.sums, self.task
        division = sums.division
        values, weights = terms.sums, None if division.is_counted else terms.weigh()
        del terms  # and with it the model's outputs, as far as backward does not need them
        flowing: dict[str, Tensor] = {}
        for name, one in values.items():
            if one.requires_grad and division.coefficients[name]:
                flowing[name] = one
        if self.is_guarded and len(flowing) < len(values) and not core.all_finite(list(values.values())):
            raise core.NonFinite("loss")
        if self.ways.adds_over_ranks and len(flowing) < len(values):
            raise core.LossError(
                "Expected terms of the loss that depend on parameters on every rank with SyncBatchNorm or "
                f"shards, got {len(flowing)} of {len(values)}: others wait in backward. Give every rank rows "
                "that count."
            )
        if flowing:
            sums.has_flowed = True
            is_last = self.ways.tells_last and self._done + 1 == len(self._cut.parts)
            is_last = is_last and task.progress.judge is None  # which runs rows before the sums are sent
            if is_last and self.reader is None and isinstance(sums.gradients, InPlace):
                task.strategy.flow(partial(sums.ahead, values, weights, len(self.left[0])))
            try:
                self._flow(flowing)
            except core.NonFinite:  # the sums were looked at with the gradients
                raise core.NonFinite(
                    "gradient" if core.all_finite(list(values.values())) else "loss"
                ) from None
            finally:
                for parameter in task.network.reached:  # not ours, and they may share memory with ours
                    parameter.grad = None
        assert self._micro is not None  # noqa: S101 - it was evaluated
        sums.count(values, weights, len(self._micro.indices))
        if self.reader is not None:
            self.reader.done()

    def accompany(self, rows: Any) -> None:
        """Run a micro-batch of weight 0, and put back what its forward has changed.

        Other ranks wait for its collectives, and send their gradients.

        Raises:
            OutOfMemoryError: it does not fit.
        """
        before = Snapshot(self.task.network.state, self.task.effects)
        self.task.strategy.next()
        try:
            with rng.preserved():
                self._run_along(rows)
        except Exception as error:
            if isinstance(error, core.AnybatchError) or not core.ran_out_of_memory(error):
                raise
            raise core.OutOfMemoryError(
                "Expected a micro-batch of weight 0 to fit into memory, as other ranks have more, got none "
                f"left ({core.released(error)}). No update was made. Free memory, or make rows smaller."
            ) from None
        before.put_modules_back()

    def _run_along(self, rows: Any) -> None:
        sums = self.sums
        self._micro = None
        if sums.gradients is not None:
            sums.gradients.begin()
        terms = self.evaluate(core.Micro(rows=rows, indices=range(sums.total, sums.total + 1))).sums
        division = sums.division
        flowing = {n: one for n, one in terms.items() if one.requires_grad and division.coefficients[n]}
        self._flow(flowing, {name: torch.zeros_like(one) for name, one in flowing.items()})
        for parameter in self.task.network.reached:
            parameter.grad = None

    def _flow(self, flowing: Mapping[str, Tensor], cotangents: Mapping[str, Tensor] | None = None) -> None:
        gradients, division, scale = self.sums.gradients, self.sums.division, self.task.scale.value
        assert gradients is not None  # noqa: S101 - `evaluate` has opened them
        cotangents = cotangents or division.cotangents.get(scale) or division.made_cotangents(scale)
        gradients.add(flowing, cotangents, 1 / scale)

    @property
    def has_accepted(self) -> bool:
        """True if anything of the current micro-batch has reached the gradient sums."""
        return self.sums.gradients is not None and self.sums.gradients.has_accepted


def _nbytes(part: Part, gradients: InPlace | Apart) -> int:
    """Return the bytes of gradient sums."""
    held = [one for bank in gradients.banks.values() for one in bank.values()]
    if part.ways.is_lockstep:  # FSDP itself may hold them, as before a sum over copies
        held = [core.local(one) for one in part.task.network.parameters]
    return sum(one.untyped_storage().nbytes() for one in held if one.layout is torch.strided)
