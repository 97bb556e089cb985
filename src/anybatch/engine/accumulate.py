"""One fold over micro-batches: forward, backward, sums and weights. Nothing here handles a failure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from anybatch.core import (
    Batch,
    LossError,
    Micro,
    NonFinite,
    NonFiniteLossError,
    Number,
    OpenBatch,
    all_finite,
)
from anybatch.engine.division import UNDECIDED, Division, to_host
from anybatch.engine.gradients import Apart, InPlace, Sums, accumulation_dtype
from anybatch.engine.plan import Plan
from anybatch.engine.strategy import Agreed
from anybatch.engine.task import Task
from anybatch.losses import Evaluated, Loss


@dataclass(frozen=True, slots=True)
class Redone:
    """A micro-batch that was undone: memory ran out in it, or its gradient overflowed."""

    rows: int  # rows it had
    may_be_cut: bool  # whether smaller ones would do, and give the same result


class Accumulator:
    """Sums, weights and gradients of the micro-batches of a step, or of a window.

    Args:
        plan: how rows are cut, and in which dtypes.
        task: on what.
        batch: the logical batch, as far as it is known.
        is_guarded: look at each micro-batch before it is added.
        is_dry: nothing is looked at, as gradients are only to be shown.
        window: the sums of the window that these rows belong to.
        redone: micro-batches undone by earlier attempts.
        scale_limit: the largest loss scale, after an earlier attempt has overflowed.
        last_tries: first rows of micro-batches that were tried again, though they cannot be cut.

    Attributes:
        share: gives the loss of the rows of these indices.
        rows: rows of each micro-batch that was added or left out.
        dropped: rows of micro-batches that were left out.
        is_updated: whether optimizers have written to parameters, which cannot be undone.
    """

    def __init__(
        self,
        plan: Plan,
        task: Task,
        batch: Batch,
        *,
        is_guarded: bool = False,
        is_dry: bool = False,
        window: "Accumulator | None" = None,
        redone: Sequence[Redone] = (),
        scale_limit: float = math.inf,
        last_tries: frozenset[int] = frozenset(),
    ) -> None:
        self.plan, self.task, self.batch = plan, task, batch
        self.model: Any = task.model  # that losses call
        # Uncut, a loss is torch's own to the bit. In a window nobody knows; on a rank it is not.
        is_part = plan.is_cut or window is not None or bool(task.add_rows) or task.strategy.is_many
        self.loss = task.loss if is_part else task.uncut_loss
        self.is_in_window = window is not None or isinstance(batch, OpenBatch)
        self.is_synced = task.is_synced(plan)
        self.is_guarded = (is_guarded or plan.is_guarded) and not is_dry
        self._is_dry = is_dry
        # No closure over this object: a circle would keep its tensors until garbage is collected.
        self.share: Callable[[Sequence[int]], Loss] = (
            partial(_same, self.loss) if window is None else partial(_shifted, window)
        )
        self._is_shown = task.is_shown and any(one.wants_micro and one.is_due for one in task.observers)
        self._is_apart = self._is_shown or bool(task.add_rows)
        self._computing = task.computing(plan)
        self._reader = task.reader
        self._window = window
        self._sums: list[Mapping[str, Number]] = []  # without graph, one entry per micro-batch
        self._weights: list[Mapping[str, Number]] = []
        self.rows: list[int] = []
        self.redone: list[Redone] = [*redone]
        self.dropped = 0
        self.scale_before = task.scale.state()
        self._scale_limit = self.scale_limit = scale_limit
        self.last_tries = last_tries
        self._is_scaled = task.scale.value != 1.0
        self.is_updated = self._has_flowed = False
        self._division = UNDECIDED
        self._micro: Micro | None = None
        self._values: dict[str, float] = {}
        self.agreed: Agreed | None = None  # what all ranks together have
        self.gradients: InPlace | Apart | None = None
        self._beside: list[Tensor] = []  # stands for the sums of a window that is planned
        for observer in task.observers:
            observer.begin(self.count)

    @property
    def offset(self) -> int:
        """Rows of the window before these."""
        return 0 if self._window is None else sum(self._window.rows)

    @property
    def count(self) -> int:
        """Micro-batches that are done, those of the window before these among them."""
        return len(self.rows) + (0 if self._window is None else len(self._window.rows))

    def begin(self, micro: Micro) -> None:
        """The next micro-batch: nothing of it is accepted yet."""
        self._micro = micro
        if self._is_scaled:
            self.task.scale.begin(self.scale_limit)
        if self.gradients is not None:
            self.gradients.begin()
        if self._reader is not None:
            self._reader.begin(micro, 0 if self.gradients is None else _nbytes(self.gradients, self.plan))

    def restart(self, batch: Batch) -> bool:
        """Take the rows of the next `add` of a window; False where that needs an accumulator of its own."""
        gradients = self.gradients
        if not isinstance(gradients, InPlace) or self._is_scaled:
            return False
        self.batch = batch
        self._sums, self._weights, self.rows = [], [], []
        gradients.restart()
        return True

    def forget_scale(self) -> None:
        """A micro-batch is over: a fixed loss scale that gave way in it comes back for the next."""
        self.scale_limit = self._scale_limit

    def evaluate(self, micro: Micro) -> Evaluated:
        """Forward: the model and the loss on the rows of a micro-batch."""
        loss = self.share(micro.indices)
        if self._computing is None:
            terms = loss.evaluate(self.model, micro.rows)
        else:
            with self._computing():
                terms = loss.evaluate(self.model, micro.rows)
        if self._division is UNDECIDED:
            self._open(terms, len(micro.indices))
        known = self._division.coefficients
        if terms.sums.keys() != known.keys():
            raise LossError(
                f"Expected the same terms from every micro-batch, got {sorted(terms.sums)} after "
                f"{sorted(known)}. Return ab.Total.zero() for a term that has nothing to add."
            )
        if self._reader is not None:
            self._reader.forward_done()
        return terms

    def backward(self, terms: Evaluated) -> None:
        """Backward: accumulate; then the sums and weights of the micro-batch count.

        Raises:
            NonFinite: the loss or a gradient is not finite, and each micro-batch is looked at.
        """
        sums, division = terms.sums, self._division
        weights = None if division.is_counted else terms.weigh()
        del terms  # and with it the model's outputs, as far as backward does not need them
        flowing: dict[str, Tensor] = {}
        for name, one in sums.items():
            if one.requires_grad and division.coefficients[name]:
                flowing[name] = one
        if self.is_guarded and len(flowing) < len(sums) and not all_finite(list(sums.values())):
            raise NonFinite("loss")
        if self.is_synced and len(flowing) < len(sums):
            raise LossError(
                "Expected terms of the loss that depend on parameters on every rank with SyncBatchNorm, got "
                f"{len(flowing)} of {len(sums)}: others wait in backward. Give every rank rows that count."
            )
        if flowing:
            self._has_flowed = True
            try:
                self._flow(flowing)
            except NonFinite:  # the sums were looked at with the gradients
                raise NonFinite("gradient" if all_finite(list(sums.values())) else "loss") from None
            finally:
                for parameter in self.task.reached:  # not ours, and they may share memory with ours
                    parameter.grad = None
            if self.task.add_rows and not self._beside:
                self._hold_beside()
        self._sums.append(_all_kept(sums))
        if weights is not None:
            self._weights.append(_all_kept(weights))
        self.rows.append(len(self._micro.indices) if self._micro is not None else 0)
        self._micro = None
        if self._reader is not None:
            self._reader.done()

    def _flow(self, flowing: Mapping[str, Tensor]) -> None:
        gradients, division, scale = self.gradients, self._division, self.task.scale.value
        assert gradients is not None  # noqa: S101 - `evaluate` has opened them
        cotangents = division.cotangents.get(scale) or division.made_cotangents(scale)
        if isinstance(gradients, Apart) and division.divisors is None and len(cotangents) > 1:
            gradients.add_each(flowing, cotangents, 1 / scale)
        else:
            gradients.add([*flowing.values()], [*map(cotangents.__getitem__, flowing)], 1 / scale)

    def _hold_beside(self) -> None:
        """Take as much memory as a window's sums do, beside those that a cut or wider `add` has itself."""
        assert self.gradients is not None  # noqa: S101 - they have grown
        is_cut = self.plan.micro_batch < self.task.add_rows
        for bank in self.gradients.taken().banks.values():
            for parameter, value in bank.items():
                if is_cut or value.dtype != parameter.dtype:
                    copies = 2 if self.plan.compensated else 1  # the rounding errors
                    self._beside += [torch.empty_like(value) for _ in range(copies)]

    def _open(self, terms: Evaluated, rows: int) -> None:
        """After the first forward: what divides which term, and when; how gradients are accumulated."""
        division = UNDECIDED if self._window is None else self._window._division
        if division is UNDECIDED:
            # Where micro-batches may be left out, or others come, nobody knows the weight before the end.
            is_window = self._window is not None or bool(self.task.add_rows) or self.task.strategy.is_many
            is_late = is_window or (self.plan.non_finite == "drop" and self.plan.is_cut)
            given = OpenBatch() if is_late else self.batch
            division = Division.decide(self.loss, given, terms, rows, is_synced=self.is_synced)
            if self.is_synced and division.divisors is None and len(terms.sums) > 1:
                raise LossError(
                    f"Expected a loss of one term with SyncBatchNorm on several ranks, got {[*terms.sums]}, "
                    "each of which needs a backward of its own. Return one Total."
                )
        for name, one in terms.sums.items():
            division.like[name] = one.dtype, one.device
        self.gradients = self._accumulation(division)
        self._division = division  # last: weights take memory, which may run out

    def _accumulation(self, division: Division) -> InPlace | Apart:
        plan, parameters = self.plan, self.task.parameters
        banks = list(division.coefficients)
        banks = banks if division.divisors is None else banks[:1]
        chosen = plan.accumulation_dtype
        is_wide = self.task.is_wide
        if chosen is not None:
            is_wide = all(accumulation_dtype(p.dtype, chosen) == p.dtype for p in parameters)
        is_looked_into = self.is_guarded or plan.compensated or self._is_apart
        if is_looked_into or len(banks) > 1 or not is_wide:
            return self._apart(banks)
        return InPlace(parameters, banks[0])

    def _apart(self, names: Sequence[str]) -> Apart:
        return Apart(
            self.task.parameters,
            dtype=self.plan.accumulation_dtype,
            names=names,
            compensated=self.plan.compensated,
            is_looked_at=self.is_guarded,
            is_whole=self.is_in_window or self._is_apart or self.plan.non_finite == "drop",
            tell=self._tell if self._is_shown else None,
        )

    def _tell(self, held: Mapping[str, Mapping[nn.Parameter, Tensor]]) -> None:
        shown: dict[str, list[Tensor]] = {}
        names = self.task.names()
        for bank in held.values():
            for parameter, gradient in bank.items():
                shown.setdefault(names[parameter], []).append(gradient)
        if self._micro is not None:
            micro = self._micro._replace(indices=self.batch.callers(self._micro.indices))
            for observer in self.task.observers:
                if observer.wants_micro and observer.is_due:
                    observer.micro(micro, shown, self.task.scale.value)

    @property
    def has_accepted(self) -> bool:
        """Whether anything of the micro-batch at hand has reached the sums of gradients."""
        return self.gradients is not None and self.gradients.has_accepted

    def leave_out(self, rows: int) -> None:
        """Go on without the micro-batch at hand: neither its rows nor their weight count."""
        self.rows.append(rows)
        self.dropped += rows

    def absorb(self, other: "Accumulator") -> None:
        """Merge the micro-batches of one `add` into the sums of the window."""
        gradients = other.gradients
        if gradients is not None:
            if self._division is UNDECIDED:
                self._division = other._division
            if isinstance(gradients, InPlace):
                self._window_gradients().absorb_in_place(gradients)
            else:
                gradients.close()
                self._window_gradients().absorb(gradients.gradients())
        self._sums += other._sums
        self._weights += other._weights
        self.rows += other.rows
        self.redone += other.redone
        self.dropped += other.dropped
        self._has_flowed = self._has_flowed or other._has_flowed
        other.batch, other._micro = OpenBatch(), None  # lets the rows go

    def fold(self) -> dict[str, Any]:
        """Sums, weights and provisional divisors as plain values, for a checkpoint."""
        return self._division.plain() | {
            "sums": [to_host(sums) for sums in self._sums],
            "weights": [to_host(weights) for weights in self._weights],
            "has_flowed": self._has_flowed,
        }

    def restore(self, fold: Mapping[str, Any], banks: Mapping[str, Sums], errors: Mapping[str, Sums]) -> None:
        """Go on from what `fold` gave, and from sums of gradients."""
        self._division = Division.of(fold)
        self._sums, self._weights = [*map(dict, fold["sums"])], [*map(dict, fold["weights"])]
        self._has_flowed = bool(fold["has_flowed"])
        self._window_gradients().restore(banks, errors)

    def _window_gradients(self) -> Apart:
        """The sums of a window, into which those of each `add` are merged."""
        if self.gradients is None:
            self.gradients = self._apart([*self._division.coefficients])
        assert isinstance(self.gradients, Apart)  # noqa: S101 - a window has no others
        return self.gradients

    def weights(self) -> dict[str, float]:
        """The weight of each term over all micro-batches; promised and added-up weights must agree.

        Raises:
            LossError: they do not, or no term depends on a parameter of the optimizer.
        """
        if not self._sums:  # all was left out
            return {}
        divisors = self._division.divisors
        known = {} if divisors is None else to_host(divisors)
        if known:
            _check_weights(known, "the whole batch")
        hosted = [to_host(weights) for weights in self._weights]
        for index, one in enumerate(hosted):
            _check_weights(one, f"micro-batch {index}")
        added = {name: math.fsum(one[name] for one in hosted) for name in (hosted[0] if hosted else ())}
        for name, promised in known.items():  # unless the loss has counted the whole batch already
            if hosted and not math.isclose(promised, added[name], rel_tol=1e-6):
                raise LossError(
                    f"Expected the weights of the micro-batches to add up to the batch's {promised:g} for "
                    f"{name!r}, got {added[name]:g}. "
                    "Rows that differ in length (padding) do not weigh the same: "
                    "return ab.Total(sum, number of valid elements)."
                )
        weights = known or added
        if not self._has_flowed and any(weights.values()):
            raise LossError(
                "Expected a loss that depends on the parameters of the optimizer, "
                f"got terms {sorted(weights)} without gradient. "
                "Look for .detach(), torch.no_grad() or frozen parameters."
            )
        return weights

    def finish(self, weights: Mapping[str, float]) -> dict[nn.Parameter, Tensor]:
        """The gradient of the rows here, divided by the weights of all."""
        if self.gradients is None:
            return {}
        self.gradients.close()
        return self.gradients.gradients().finish(self._division.factors(weights))

    def read(self, weights: Mapping[str, float], *others: Tensor) -> list[float]:
        """Bring the sums to the host, with other scalars, which are returned: each device stops once.

        Raises:
            NonFiniteLossError: a sum is not finite; the message names its rows.
        """
        if self.agreed is not None:
            for name, weight in weights.items():
                divisor = 1 if self.loss.divided else weight
                self._values[name] = self.agreed.totals[name] / divisor if weight else math.nan
            return _all_to_host(others)
        found = _all_to_host([*[sums[name] for name in weights for sums in self._sums], *others])
        means: dict[str, float] = {}
        for index, (name, weight) in enumerate(weights.items()):
            sums = found[index * len(self._sums) : (index + 1) * len(self._sums)]
            if not all(map(math.isfinite, sums)) and weight and not self._is_dry:
                _refuse_sums(sums, self.rows, name, self.batch)
            divisor = 1 if self._division.is_divided else weight
            means[name] = math.fsum(sums) / divisor if weight else math.nan
        self._values = means
        return found[len(found) - len(others) :]

    def value(self, weights: Mapping[str, float]) -> tuple[float, Mapping[str, float]]:
        """The loss of all rows, and that of each term."""
        used: list[float] = []
        for name, value in self._values.items():
            if weights.get(name):
                # A rank without rows has decided no division.
                coefficients = self._division.coefficients or self.loss.coefficients
                used.append(coefficients.get(name, 1.0) * value)
        return (math.fsum(used) if used else math.nan), self._values

    def close(self) -> None:
        """Take hooks off."""
        if self.gradients is not None:
            self.gradients.close()


class Tally(NamedTuple):
    """What the rows here add up to."""

    weights: dict[str, float]
    totals: dict[str, float]  # the summed loss of each term, on the host
    is_shared: bool  # weights are those of all ranks: 1 for a sum, all rows for a whole-batch loss
    like: dict[nn.Parameter, torch.dtype]  # the trained parameters in order, with the dtype of the sum


def tally(sums: Accumulator) -> Tally:
    """What the rows of one rank add up to, to be added to that of others.

    Raises:
        NonFiniteLossError: a summed loss is not finite; the message names its rows.
        LossError: as `Accumulator.weights`.
    """
    weights, totals = sums.weights(), dict[str, float]()
    for name, weight in weights.items():
        values = _all_to_host([one[name] for one in sums._sums])  # pyright: ignore[reportPrivateUsage]
        if not all(map(math.isfinite, values)) and weight:
            _refuse_sums(values, sums.rows, name, sums.batch)
        totals[name] = math.fsum(values)
    chosen = sums.plan.accumulation_dtype
    like = {p: accumulation_dtype(p.dtype, chosen) for p in sums.task.parameters}
    is_shared = sums._division.divisors is not None  # pyright: ignore[reportPrivateUsage]
    return Tally(weights, totals, is_shared, like)


def _nbytes(gradients: InPlace | Apart, plan: Plan) -> int:
    """Bytes of the sums, and of their rounding errors."""
    held = [one for bank in gradients.taken().banks.values() for one in bank.values()]
    dense = sum(one.untyped_storage().nbytes() for one in held if one.layout is torch.strided)
    return 2 * dense if plan.compensated else dense


def _same(loss: Loss, index: Sequence[int]) -> Loss:
    return loss


def _shifted(window: "Accumulator", index: Sequence[int]) -> Loss:
    """The loss of rows of an `add`, counted from the first row of the window."""
    offset = sum(window.rows)
    return window.share(range(offset + index[0], offset + index[-1] + 1))


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


def _all_kept(values: Mapping[str, Number]) -> dict[str, Number]:
    kept: dict[str, Number] = {}
    for name, value in values.items():
        kept[name] = _kept(value)
    return kept


def _refuse_sums(sums: Sequence[float], rows: Sequence[int], name: str, batch: Batch) -> NoReturn:
    bad = [index for index, value in enumerate(sums) if not math.isfinite(value)]
    first = sum(rows[: bad[0]])
    raise NonFiniteLossError(
        f"Expected a finite loss, got {sums[bad[0]]} for {name!r} in micro-batches {bad} of {len(sums)} "
        f"(the first one holds {batch.rows_in_words(first, first + rows[bad[0]])}). No update was made. "
        "Look for bad data in these rows of the batch, a mean over no valid target, too high a learning "
        "rate, or a sum that overflows float16."
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
    device = next((one.device for one in values if isinstance(one, Tensor) and not one.is_cpu), None)
    if device is None:
        return [*map(float, values)]
    return torch.stack([torch.as_tensor(value).to(device) for value in values]).tolist()
