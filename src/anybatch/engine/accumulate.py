"""One fold over micro-batches: forward, backward, sums and weights. Nothing here handles a failure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from anybatch.engine.gradients import Apart, InPlace, Sums, accumulation_dtype, power_of_two
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


class Accumulator:
    """Sums, weights and gradients of the micro-batches of a step, or of a window.

    Where the weight of the whole batch is known from the batch, it divides what flows back (early): with one
    micro-batch that is torch's own arithmetic, bit for bit. Where it is not known before the end (late), a
    power of two near the weight of the first micro-batch stands in for it, and `finish` multiplies by that
    over the weight: powers of two change no digit, and float16 does not overflow.

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
        loss: of a part of the batch, or of the whole.
        share: gives the loss of the rows of these indices.
        is_in_window: whether the rows belong to a window.
        rows: rows of each micro-batch that was added or left out.
        dropped: rows of micro-batches that were left out.
        gradients: how gradients are accumulated.
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
        # Uncut, a loss is torch's own to the bit. In a window nobody knows whether it is.
        is_part = plan.is_cut or window is not None or bool(task.add_rows)
        self.loss = task.loss if is_part else task.uncut_loss
        self.is_in_window = window is not None or isinstance(batch, OpenBatch)
        self.is_guarded = (is_guarded or plan.is_guarded) and not is_dry
        self._is_dry = is_dry
        # No closure over this object: a circle would keep its tensors until garbage is collected.
        self.share: Callable[[Sequence[int]], Loss] = (
            partial(_same, self.loss) if window is None else partial(_shifted, window)
        )
        self._computing = task.computing(plan)
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
        self._is_open = False
        self._coefficients: Mapping[str, float] = {}
        self._divisors: Mapping[str, Number] | None = None
        self._provisional: dict[str, float] = {}
        self._cotangents: dict[float, dict[str, Tensor]] = {}  # by loss scale
        self._is_counted = False
        self._is_apart: bool | None = None
        self._micro: Micro | None = None
        self._is_divided = False
        self._like: dict[str, tuple[torch.dtype, torch.device]] = {}
        self._values: Mapping[str, float] = {}
        self.gradients: InPlace | Apart | None = None
        self._beside: list[Tensor] = []  # stands for the sums of a window that is planned

    @property
    def offset(self) -> int:
        """Rows of the window before these."""
        return 0 if self._window is None else sum(self._window.rows)

    @property
    def number(self) -> int:
        """Micro-batches of the window before these."""
        return 0 if self._window is None else len(self._window.rows)

    def begin(self, micro: Micro) -> None:
        """The next micro-batch: nothing of it is accepted yet."""
        self._micro = micro
        if self._is_scaled:
            self.task.scale.begin(self.scale_limit)
        if self.gradients is not None:
            self.gradients.begin()

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
            terms = loss.evaluate(self.task.model, micro.rows)
        else:
            with self._computing():
                terms = loss.evaluate(self.task.model, micro.rows)
        if not self._is_open:
            self._open(terms, len(micro.indices))
        if terms.sums.keys() != self._coefficients.keys():
            raise LossError(
                f"Expected the same terms from every micro-batch, got {sorted(terms.sums)} after "
                f"{sorted(self._coefficients)}. Return ab.Total.zero() for a term that has nothing to add."
            )
        return terms

    def backward(self, terms: Evaluated) -> None:
        """Backward: accumulate; then the sums and weights of the micro-batch count.

        Raises:
            NonFinite: the loss or a gradient is not finite, and each micro-batch is looked at.
        """
        sums = terms.sums
        weights = None if self._is_counted else terms.weigh()
        del terms  # and with it the model's outputs, as far as backward does not need them
        flowing: dict[str, Tensor] = {}
        for name, one in sums.items():
            if one.requires_grad and self._coefficients[name]:
                flowing[name] = one
        if self.is_guarded and len(flowing) < len(sums) and not all_finite(list(sums.values())):
            raise NonFinite("loss")
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

    def _flow(self, flowing: Mapping[str, Tensor]) -> None:
        gradients, scale = self.gradients, self.task.scale.value
        assert gradients is not None  # noqa: S101 - `evaluate` has opened them
        cotangents = self._cotangents.get(scale) or self._made_cotangents(scale)
        if isinstance(gradients, Apart) and self._divisors is None and len(cotangents) > 1:
            gradients.add_each(flowing, cotangents, 1 / scale)
            return
        values, flows = [*flowing.values()], [*map(cotangents.__getitem__, flowing)]
        if isinstance(gradients, InPlace):
            gradients.add(values, flows)
        else:
            gradients.add(values, flows, unscale=1 / scale)

    def _hold_beside(self) -> None:
        """Take as much memory as the sums of a window do, beside those of an `add` that has its own.

        It has its own where it is cut, and where sums are of another dtype than gradients.
        """
        assert self.gradients is not None  # noqa: S101 - they have grown
        is_cut = self.plan.micro_batch < self.task.add_rows
        for bank in self.gradients.taken().banks.values():
            for parameter, value in bank.items():
                if is_cut or value.dtype != parameter.dtype:
                    copies = 2 if self.plan.compensated else 1  # the rounding errors
                    self._beside += [torch.empty_like(value) for _ in range(copies)]

    def _made_cotangents(self, scale: float) -> dict[str, Tensor]:
        """What flows into each sum at this loss scale; made once for each scale."""
        made: dict[str, Tensor] = {}
        for name, like in self._like.items():
            if self._divisors is None:
                made[name] = torch.full((), scale / self._provisional[name], dtype=like[0], device=like[1])
            else:
                divisor = 1 if self._is_divided else self._divisors[name]
                cotangent = _cotangent(self._coefficients[name], divisor, *like)
                made[name] = cotangent if scale == 1.0 else cotangent * scale
        self._cotangents[scale] = made
        return made

    def _open(self, terms: Evaluated, rows: int) -> None:
        """After the first forward: what divides which term, and when; how gradients are accumulated."""
        names = list(terms.sums)
        plan, loss = self.plan, self.loss
        self._like = {name: (one.dtype, one.device) for name, one in terms.sums.items()}
        self._is_divided = loss.divided
        if self._window is not None and self._window._is_open:
            self._go_on_like(self._window)
        else:
            self._coefficients = dict.fromkeys(names, 1.0) | {**loss.coefficients}
            # Where micro-batches may be left out nobody knows the weight of the rest before the end.
            is_window = self._window is not None or bool(self.task.add_rows)
            is_late = is_window or (plan.non_finite == "drop" and plan.is_cut)
            self._divisors = loss.divisors(OpenBatch() if is_late else self.batch, terms, rows)
            self._is_counted = loss.counted and self._divisors is not None
            if self._divisors is None:
                weights = terms.weigh()
                self._provisional = {name: power_of_two(_size(weights[name], rows)) for name in names}
        self.gradients = self._accumulation(names)
        self._is_open = True  # last: weights take memory, which may run out

    def _go_on_like(self, window: "Accumulator") -> None:
        self._coefficients, self._divisors = window._coefficients, window._divisors
        self._provisional, self._is_counted = window._provisional, window._is_counted
        self._cotangents, self._is_apart = window._cotangents, window._is_apart

    def _accumulation(self, names: Sequence[str]) -> InPlace | Apart:
        plan, parameters = self.plan, self.task.parameters
        banks = names if self._divisors is None else names[:1]
        chosen = plan.accumulation_dtype
        if self._is_apart is None:
            self._is_apart = self.is_guarded or plan.compensated or len(banks) > 1 or self.task.is_apart
            if chosen is None:
                self._is_apart = self._is_apart or not self.task.is_wide
            else:
                wide = [accumulation_dtype(p.dtype, chosen) for p in parameters]
                self._is_apart = self._is_apart or wide != [p.dtype for p in parameters]
        if not self._is_apart:
            return InPlace(parameters, banks[0])
        return Apart(
            parameters,
            dtype=chosen,
            names=banks,
            compensated=plan.compensated,
            is_looked_at=self.is_guarded,
            is_whole=self._window is not None or self.task.is_apart or plan.non_finite == "drop",
            tell=self._tell if self.task.is_shown else None,
        )

    def _tell(self, held: Mapping[str, Mapping[nn.Parameter, Tensor]]) -> None:
        shown: dict[str, list[Tensor]] = {}
        names = self.task.names()
        for bank in held.values():
            for parameter, gradient in bank.items():
                shown.setdefault(names[parameter], []).append(gradient)
        if self._micro is not None:
            for observer in self.task.observers:
                if observer.wants_micro:
                    observer.micro(self._micro, shown, self.task.scale.value)

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
            if not self._is_open:
                self._is_open, self._is_divided = True, other._is_divided
                self._go_on_like(other)
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
        return {
            "coefficients": {name: float(value) for name, value in self._coefficients.items()},
            "provisional": dict(self._provisional),
            "divisors": None if self._divisors is None else _to_host(self._divisors),
            "is_counted": self._is_counted,
            "sums": [_to_host(sums) for sums in self._sums],
            "weights": [_to_host(weights) for weights in self._weights],
            "is_divided": self._is_divided,
            "has_flowed": self._has_flowed,
        }

    def restore(self, fold: Mapping[str, Any], banks: Mapping[str, Sums], errors: Mapping[str, Sums]) -> None:
        """Go on from what `fold` gave, and from sums of gradients."""
        self._is_open = True
        self._coefficients, self._provisional = dict(fold["coefficients"]), dict(fold["provisional"])
        self._divisors, self._is_counted = fold["divisors"], bool(fold["is_counted"])
        self._sums, self._weights = [*map(dict, fold["sums"])], [*map(dict, fold["weights"])]
        self._is_divided, self._has_flowed = bool(fold["is_divided"]), bool(fold["has_flowed"])
        self._window_gradients().restore(banks, errors)

    def _window_gradients(self) -> Apart:
        """The sums of a window, into which those of each `add` are merged."""
        if self.gradients is None:
            self.gradients = Apart(
                self.task.parameters,
                dtype=self.plan.accumulation_dtype,
                names=[*self._coefficients],
                compensated=self.plan.compensated,
                is_looked_at=False,
                is_whole=True,
            )
        assert isinstance(self.gradients, Apart)  # noqa: S101 - a window has no others
        return self.gradients

    def weights(self) -> dict[str, float]:
        """The weight of each term over all micro-batches; promised and added-up weights must agree."""
        if not self._sums:  # all was left out
            return {}
        known = {} if self._divisors is None else _to_host(self._divisors)
        if known:
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

    def finish(self, weights: Mapping[str, float]) -> dict[nn.Parameter, Tensor]:
        """The gradient of the rows here, divided by the weights of all.

        Raises:
            LossError: no term depends on a parameter of the optimizer.
            NonFiniteLossError: a sum is not finite; the message names its rows.
        """
        self._values = self._means(weights)
        if not (self._has_flowed or not any(weights.values())):
            raise LossError(
                "Expected a loss that depends on the parameters of the optimizer, "
                f"got terms {sorted(self._values)} without gradient. "
                "Look for .detach(), torch.no_grad() or frozen parameters."
            )
        if self.gradients is None:
            return {}
        self.gradients.close()
        factors: dict[str, float] = {}
        if self._divisors is None:
            for name, provisional in self._provisional.items():
                weight = weights.get(name)
                factors[name] = self._coefficients[name] * provisional / weight if weight else 0.0
        return self.gradients.gradients().finish(factors)

    def _means(self, weights: Mapping[str, float]) -> dict[str, float]:
        means: dict[str, float] = {}
        for name, weight in weights.items():
            sums = _all_to_host([sums[name] for sums in self._sums])
            if not all(map(math.isfinite, sums)) and weight and not self._is_dry:
                _check_sums(sums, self.rows, name)
            means[name] = math.fsum(sums) / (1 if self._is_divided else weight) if weight else math.nan
        return means

    def value(self, weights: Mapping[str, float]) -> tuple[float, Mapping[str, float]]:
        """The loss of all rows, and that of each term."""
        used: list[float] = []
        for name, value in self._values.items():
            if weights.get(name):
                used.append(self._coefficients[name] * value)
        return (math.fsum(used) if used else math.nan), self._values

    def close(self) -> None:
        """Take hooks off."""
        if self.gradients is not None:
            self.gradients.close()


def _same(loss: Loss, index: Sequence[int]) -> Loss:
    return loss


def _shifted(window: "Accumulator", index: Sequence[int]) -> Loss:
    """The loss of rows of an `add`, counted from the first row of the window."""
    offset = sum(window.rows)
    return window.share(range(offset + index[0], offset + index[-1] + 1))


def _size(weight: Number, rows: int) -> float:
    """A positive number near the weight of a micro-batch; its rows where a device would have to stop."""
    is_far = isinstance(weight, Tensor) and weight.device.type != "cpu"
    return rows if is_far else float(weight) or rows


def _cotangent(coefficient: float, divisor: Number, dtype: torch.dtype, device: torch.device) -> Tensor:
    """coefficient / divisor as a scalar like the sum it flows into; 0 where nothing is to be divided."""
    if isinstance(divisor, Tensor) and divisor.device.type == "cpu":
        divisor = divisor.item()  # no device has to stop for it
    if not isinstance(divisor, Tensor):
        return torch.full((), coefficient / divisor if divisor else 0.0, dtype=dtype, device=device)
    divisor = divisor.to(device, dtype)
    return torch.where(divisor == 0, 0, coefficient / divisor)


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
        return [*map(float, values)]
    return torch.stack([torch.as_tensor(value).to(device) for value in values]).tolist()


def _to_host(weights: Mapping[str, Number]) -> dict[str, float]:
    return dict(zip(weights, map(float, weights.values()), strict=True))
