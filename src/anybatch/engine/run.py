"""One pass of the fold over a batch: add micro-batches, update once, or put everything back."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybatch.core import (
    Batch,
    LossError,
    NonFinite,
    NonFiniteLossError,
    Number,
    OpenBatch,
    StepReport,
    all_finite,
)
from anybatch.engine import update as optimize
from anybatch.engine.before import AtHand, Before
from anybatch.engine.gradients import Gradients, is_marked, mark
from anybatch.engine.plan import Plan
from anybatch.engine.task import Task
from anybatch.losses import Evaluated, Loss


@dataclass(frozen=True, slots=True)
class Redone:
    """A micro-batch that was undone: memory ran out in it, or its gradient overflowed.

    Attributes:
        rows: rows it had.
        may_be_cut: whether smaller ones would do, and give the same result.
    """

    rows: int
    may_be_cut: bool


def too_large(redone: Sequence[Redone]) -> int:
    """Rows of the smallest micro-batch that is to be smaller from now on; 0 where there is none.

    Example:
        >>> too_large([Redone(8, may_be_cut=True), Redone(4, may_be_cut=True), Redone(2, may_be_cut=False)])
        4
    """
    return min((one.rows for one in redone if one.may_be_cut), default=0)


class Run:
    """One pass of the fold: add micro-batches, update, clear. Any failure can be undone until the update.

    Args:
        plan: what was decided.
        task: what it is carried out on.
        batch: the logical batch, as far as it is known.
        loss: the loss for this batch; divisors are asked of it once.
        is_guarded: look at each micro-batch before it is added, whatever the plan says.

    Attributes:
        before: what an undo puts back.
        scale_before: the loss scale that it puts back.
        at_hand: the micro-batch at hand, and what it may change.
        gradients: the sums, and which parameters have accepted the micro-batch at hand.
        rows: rows of each micro-batch that is in the sums.
        redone: each micro-batch that was undone, because memory ran out or its gradient overflowed.
        dropped: rows of micro-batches that were left out.
        is_updated: whether the optimizers have stepped, which cannot be undone.
    """

    def __init__(self, plan: Plan, task: Task, batch: Batch, loss: Loss, *, is_guarded: bool = False) -> None:
        self._plan, self._task, self._batch, self._loss = plan, task, batch, loss
        self.is_guarded = is_guarded or plan.is_guarded
        self._kinds = task.kinds if plan.precision.is_mixed else ()
        self.before = Before(task, streams=task.streams.to_note(draws=batch.draws))
        self.at_hand = AtHand(task, self.before)
        for parameter in (*task.parameters, *task.others):
            parameter.grad = None
        self._sums: list[Mapping[str, Number]] = []  # without graph, one entry per micro-batch
        self._weights: list[Mapping[str, Number]] = []
        self.rows: list[int] = []
        self.redone: list[Redone] = []
        self.dropped = 0
        self.scale_before = task.scale.state()
        self._flowed = False  # whether any term carried a gradient
        self.gradients = _NONE  # until the first forward
        self.is_updated = False

    def begin(self, *, draws: bool = False, in_window: bool = False) -> None:
        """The next micro-batch; see `AtHand.begin`."""
        self.gradients.begin()
        self.at_hand.begin(draws=draws, in_window=in_window)

    def add(self, micro: Any, loss: Loss, rows: int, *, again: bool = False) -> None:
        """Forward, backward, accumulate.

        Args:
            micro: the rows.
            loss: of these rows.
            rows: how many.
            again: some parameters have accepted this very micro-batch already, before its backward failed.
        """
        with self._plan.precision.computing(self._kinds):
            terms = loss.evaluate(self._task.model, micro)
        if not self.rows:
            self._open(terms, rows, again=again)
        elif terms.sums.keys() != self._coefficients.keys():
            raise LossError(
                f"Expected the same terms from every micro-batch, got {sorted(terms.sums)} after "
                f"{sorted(self._coefficients)}. Return ab.Total.zero() for a term that has nothing to add."
            )
        sums = terms.sums
        weights = {} if loss.counted and self._divisors is not None else terms.weigh()
        del terms  # and with it the model's outputs, as far as backward does not need them
        try:
            self._backward(sums, weights, rows, again=again)
        except NonFinite:  # of those that flow back it was looked at, too
            raise NonFinite("gradient" if all_finite(list(sums.values())) else "loss") from None
        kept = [{name: _kept(value) for name, value in values.items()} for values in (sums, weights)]
        self._sums.append(kept[0])  # nothing fails from here on
        if weights:
            self._weights.append(kept[1])
        self.rows.append(rows)

    @property
    def scale(self) -> float:
        """The loss scale at hand."""
        return self._task.scale.value

    def leave_out(self, rows: int) -> None:
        """Go on without the micro-batch at hand: neither its rows nor their weight count."""
        self.rows.append(rows)
        self.dropped += rows

    def update(self) -> StepReport:
        """Divide what is still to be divided, clip once, update optimizers and schedulers.

        Raises:
            NonFinite: the gradient is not, of micro-batches that nobody looked at or of their sum.
        """
        weights = self._whole_weights()
        values = self._values(weights)
        empty = not any(weights.values())
        if not (self._flowed or empty):
            raise LossError(
                "Expected a loss that depends on the parameters of the optimizer, "
                f"got terms {sorted(values)} without gradient. "
                "Look for .detach(), torch.no_grad() or frozen parameters."
            )
        gradients = self.gradients.finish(self._late_factors(weights))
        norm = math.nan
        if not empty:
            if not all_finite(list(gradients.values())):
                raise NonFinite("gradient")
            norm = optimize.clip(gradients, self._plan.clip_norm)
            with self._task.masters.raised(gradients, self._task.optimizers):
                optimize.update(gradients, self._task.optimizers, self._plan.foreach)
                self.is_updated = True
            self._task.scale.updated()
            optimize.schedule(self._task.schedulers)
        used = [self._coefficients[name] * value for name, value in values.items() if weights[name]]
        return StepReport(
            loss=math.fsum(used) if used else math.nan,
            terms=values,
            weights=weights,
            rows=sum(self.rows),
            micro_batches=len(self.rows),
            grad_norm=norm,
            updated=not empty,
            cut=tuple(self.rows),
            redone=len(self.redone),
            dropped=self.dropped,
            scale=self._task.scale.value,
            too_large=too_large(self.redone),
        )

    def clear(self) -> None:
        """Drop the gradients; those of parameters that are not ours come back."""
        for parameter in self._task.parameters:
            parameter.grad = None
        self.before.put_gradients_back(self._task.others)

    def mark(self) -> None:
        """Note the sums, as far as `.grad` holds them, so that it shows when somebody else changes them."""
        self._mark = mark(self._task.parameters)

    def is_disturbed(self) -> bool:
        """Whether the sums are no longer those noted."""
        return not is_marked(self._task.parameters, self._mark)

    def undo(self, *, is_skipped: bool = False) -> None:
        """Put everything back as it was before the first micro-batch; after the update, only clear.

        Where it is skipped random streams go on, or the next one would meet what made it bad, for ever.
        """
        self.gradients.close()
        if self.is_updated:
            self.clear()
            return
        reached = self.before.streams_reached() if is_skipped else lambda: None
        self.before.put_gradients_back()  # first what takes no memory
        self._task.scale.load(self.scale_before)
        self.before.put_back()
        reached()

    def _open(self, terms: Evaluated, rows: int, *, again: bool) -> None:
        """After the first forward: who divides by what, and when."""
        names = list(terms.sums)
        self._coefficients = {name: self._loss.coefficients.get(name, 1.0) for name in names}
        # Where micro-batches may be left out nobody knows the weight of the rest before the end.
        whole = OpenBatch() if self._plan.non_finite == "drop" and self._plan.is_cut else self._batch
        self._divisors = self._loss.divisors(whole, terms, rows)
        banks = names
        if self._divisors is not None:
            banks = names[:1]
            divisors = dict.fromkeys(names, 1) if self._loss.divided else self._divisors
            self._cotangents = {
                name: _cotangent(self._coefficients[name], divisors[name], value)
                for name, value in terms.sums.items()
            }
        if again:  # and the sums hold a part of it
            return
        self.gradients.close()
        self.gradients = Gradients(
            self._task.parameters,
            dtype=self._plan.accumulation_dtype,
            compensated=self._plan.compensated,
            banks=banks,
            bucket=self._plan.bucket if self.is_guarded else None,
        )

    def _backward(
        self, sums: Mapping[str, Tensor], weights: Mapping[str, Number], rows: int, *, again: bool
    ) -> None:
        flowing = {
            name: value for name, value in sums.items() if value.requires_grad and self._coefficients[name]
        }
        if self.is_guarded and len(flowing) < len(sums) and not all_finite(list(sums.values())):
            raise NonFinite("loss")
        if not flowing:  # nothing but masked rows
            return
        self._flowed = True
        scale = self._task.scale.value
        try:
            if self._divisors is None:
                is_short = self.is_guarded and self._plan.precision.is_short
                unscale = (_size_of(weights, rows) if is_short else 1.0) / scale
                self.gradients.add_each(flowing, again=again, unscale=unscale)
            else:
                cotangents = [self._cotangents[name] for name in flowing]
                if scale != 1.0:
                    cotangents = [cotangent * scale for cotangent in cotangents]
                self.gradients.add(list(flowing.values()), cotangents, again=again, unscale=1 / scale)
        finally:
            for parameter in self._task.others:  # nobody's, and they may share memory with ours
                parameter.grad = None

    def _whole_weights(self) -> dict[str, float]:
        """The weight of each term over all micro-batches; promised and added-up weights must agree."""
        if not self._sums:  # all was left out
            return {}
        known = {} if self._divisors is None else _to_host(self._divisors)
        _check_weights(known, "the whole batch")
        if not self._weights:  # the loss has counted the whole batch already
            return known
        hosted = [_to_host(weights) for weights in self._weights]
        for index, weights in enumerate(hosted):
            _check_weights(weights, f"micro-batch {index}")
        added = {name: math.fsum(weights[name] for weights in hosted) for name in hosted[0]}
        for name, promised in known.items():
            if not math.isclose(promised, added[name], rel_tol=1e-6):
                raise LossError(
                    f"Expected the weights of the micro-batches to add up to the batch's {promised:g} for "
                    f"{name!r}, got {added[name]:g}. "
                    "Rows that differ in length (padding) do not weigh the same: "
                    "return ab.Total(sum, number of valid elements)."
                )
        return known or added

    def _values(self, weights: Mapping[str, float]) -> dict[str, float]:
        """The value of each term; refuses what is not finite and names the micro-batches it came from."""
        hosted = {name: _all_to_host([sums[name] for sums in self._sums]) for name in weights}
        for name, sums in hosted.items():
            if weights[name]:
                _check_sums(sums, self.rows, name)
        return {
            name: math.fsum(sums) / (1 if self._loss.divided else weights[name])
            if weights[name]
            else math.nan
            for name, sums in hosted.items()
        }

    def _late_factors(self, weights: Mapping[str, float]) -> dict[str, float]:
        if self._divisors is not None:
            return {}
        return {
            name: self._coefficients[name] / weight if weight else 0.0 for name, weight in weights.items()
        }


_NONE = Gradients([], dtype=None, compensated=False, banks=[""])


def without_update(run: Run, rows: int) -> StepReport:
    """The report of a step that was skipped.

    Args:
        run: as far as it got.
        rows: that it would have had.
    """
    return StepReport(
        loss=math.nan,
        terms={},
        weights={},
        rows=rows,
        micro_batches=len(run.rows),
        grad_norm=math.nan,
        updated=False,
        cut=tuple(run.rows),
        redone=len(run.redone),
        scale=run.scale,
    )


def _cotangent(coefficient: float, divisor: Number, like: Tensor) -> Tensor:
    """coefficient / divisor as a scalar like the sum it flows into; 0 where nothing is to be divided."""
    if isinstance(divisor, Tensor) and divisor.device.type == "cpu":
        divisor = divisor.item()  # no device has to stop for it
    if not isinstance(divisor, Tensor):
        return torch.full((), coefficient / divisor if divisor else 0.0, dtype=like.dtype, device=like.device)
    divisor = divisor.to(like.device, like.dtype)
    return torch.where(divisor == 0, 0, coefficient / divisor)


def _size_of(weights: Mapping[str, Number], rows: int) -> float:
    """A power of two near the weight of a micro-batch, or near its rows where the weight is on a device.

    What is divided last is larger by so much, and would overflow at a scale at which nothing else does.
    """
    known = [float(one) for one in weights.values() if not (isinstance(one, Tensor) and one.is_cuda)]
    return 2.0 ** max(0, math.frexp(max([*known, rows]))[1] - 1)


def _kept(value: Number) -> Number:
    """The number without its graph, and without the rows some kernels (`mse_loss`) leave in its storage.

    On the host a tensor kept from each micro-batch would lie between those that come and go, so that the
    allocator finds no room where it found some before: 4 % of a step of LeNet-5.
    """
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "cpu":
        return value.item()
    value = value.detach()
    return value.clone() if value.untyped_storage().nbytes() > value.element_size() else value


def _check_sums(sums: Sequence[float], rows: Sequence[int], name: str) -> None:
    bad = [index for index, value in enumerate(sums) if not math.isfinite(value)]
    if bad:
        first = sum(rows[: bad[0]])
        raise NonFiniteLossError(
            f"Expected a finite loss, got {sums[bad[0]]} for {name!r} in micro-batches {bad} of {len(sums)} "
            f"(the first one holds rows {first} to {first + rows[bad[0]] - 1}). No update was made. Look for "
            "bad data in these rows of the batch, a mean over no valid target, too high a learning rate, or "
            "a sum that overflows float16."
        )


def _check_weights(weights: Mapping[str, float], where: str) -> None:
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise LossError(
                f"Expected a finite weight of at least 0 for {name!r}, got {weight} in {where}. "
                "Count rows or tokens."
            )


def _all_to_host(values: Sequence[Number]) -> list[float]:
    """Scalars as numbers; those of a device come in one go, so that it stops once."""
    device = next((value.device for value in values if isinstance(value, Tensor)), None)
    if device is None:
        return [float(value) for value in values]
    return torch.stack([torch.as_tensor(value).to(device) for value in values]).tolist()


def _to_host(weights: Mapping[str, Number]) -> dict[str, float]:
    return {name: float(weight) for name, weight in weights.items()}
