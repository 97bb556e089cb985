"""Sums over micro-batches, merged in any order and divided once, and the divisor of each term."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from anybatch.core import Batch, LossError, NonFiniteLossError, Number, OpenBatch, accelerator
from anybatch.engine.gradients import Apart, Gradient, InPlace, finish
from anybatch.engine.plan import Plan
from anybatch.engine.strategy import Agreed
from anybatch.engine.task import Task
from anybatch.losses import Evaluated, Loss

_SHOWN = 8  # micro-batches that a message names


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Division:
    """The divisor of each loss term, fixed after the first forward of a step or window.

    If the weight of the whole batch is known from the batch, it divides the cotangent (early): with one
    micro-batch that is torch's own arithmetic, bit for bit. If it is known at the end only (late), the
    cotangent is divided by a provisional divisor, a power of two near the weight of the first micro-batch,
    and `factors` multiplies the sums by provisional / weight. Powers of two change no digit, and float16 does
    not overflow. If backward adds over ranks (SyncBatchNorm, shards), the provisional divisor is 1 on all.
    """

    coefficients: Mapping[str, float]  # the factor of each term in the loss
    divisors: Mapping[str, Number] | None  # of each term; None if they are known at the end only
    provisional: Mapping[str, float]  # the powers of two used until then
    is_counted: bool  # the divisors are exact without weighing the micro-batches
    is_divided: bool  # the sums are divided already
    # dtype and device of each sum
    like: dict[str, tuple[torch.dtype, torch.device]] = field(default_factory=dict[str, Any])
    # the cotangent of each sum, by loss scale
    cotangents: dict[float, dict[str, Tensor]] = field(default_factory=dict[float, dict[str, Tensor]])

    @staticmethod
    def decide(loss: Loss, batch: Batch, terms: Evaluated, rows: int, *, guess: float = 1.0) -> "Division":
        """Ask a loss for the divisors of this batch, after the forward of its first rows.

        `guess` is the factor of the provisional divisor, which is 1 if it is 0.
        """
        divisors = loss.divisors(batch, terms, rows)
        weights = terms.weigh() if divisors is None else {}
        return Division(
            coefficients=dict.fromkeys(terms.sums, 1.0) | {**loss.coefficients},
            divisors=divisors,
            provisional={
                name: guess * _stand_in(weight, rows) if guess else 1.0 for name, weight in weights.items()
            },
            is_counted=loss.counted and divisors is not None,
            is_divided=loss.divided,
        )

    def made_cotangents(self, scale: float) -> dict[str, Tensor]:
        """Make the cotangent of each sum at this loss scale."""
        made: dict[str, Tensor] = {}
        for name, (dtype, device) in self.like.items():
            if self.divisors is None:
                coefficient, divisor = 1.0, self.provisional[name]
            else:
                coefficient, divisor = self.coefficients[name], 1 if self.is_divided else self.divisors[name]
            if isinstance(divisor, Tensor) and not divisor.is_cpu:
                divisor = divisor.to(device, dtype)
            value = _quotient(coefficient, divisor)
            if not isinstance(value, Tensor):
                value = torch.full((), value, dtype=dtype, device=device)
            made[name] = value if scale == 1.0 else value * scale
        self.cotangents[scale] = made
        return made

    def factors(self, weights: Mapping[str, Number]) -> dict[str, Number]:
        """Return the factor by which late sums of each term are still to be multiplied."""
        return {
            name: _quotient(self.coefficients[name] * provisional, weights.get(name, 0.0))
            for name, provisional in self.provisional.items()
        }


UNDECIDED = Division(coefficients={}, divisors=None, provisional={}, is_counted=False, is_divided=False)


class Sums:
    """The sums of one `add`, and of all `add`s of a window.

    Attributes:
        division: the divisor of each term, shared by all `add`s of a window.
        gradients: the gradient sums; None before the first forward.
        values: the summed loss of each term, one entry per micro-batch, without graph.
        weights: the weight of each term, one entry per micro-batch.
        rows: rows of each micro-batch that was added or left out.
        total: rows of all of them.
        dropped: rows of micro-batches that were left out.
        redone: rows of each micro-batch that was undone because memory ran out in it, 0 if smaller ones would
            not fit or change the result, or if its gradient overflowed.
        has_flowed: a loss had a gradient.
        scale_before: the loss scale before the first micro-batch; None where none is in use.
        agreed: totals of all ranks; None in one process.
        totals: the summed loss of each term, after `read`.
    """

    def __init__(self, plan: Plan, task: Task, batch: Batch | None = None) -> None:
        self.plan, self.task, self.batch = plan, task, batch or OpenBatch()
        self.division: Division = UNDECIDED
        self.gradients: InPlace | Apart | None = None
        self.values: list[Mapping[str, Number]] = []
        self.weights: list[Mapping[str, Number]] = []
        self.rows: list[int] = []
        self.total = self.dropped = 0
        self.redone: list[int] = []
        self.has_flowed = False
        self.scale_before = task.scale.state() if task.scale.is_on else None
        self.agreed: Agreed | None = None
        self.totals: dict[str, float] = {}

    def count(self, sums: Mapping[str, Tensor], weights: Mapping[str, Number] | None, rows: int) -> None:
        """Add the losses and weights of one micro-batch."""
        kept = {name: _kept(value) for name, value in sums.items()}  # all, as memory may run out
        weighed = None if weights is None else {name: _kept(value) for name, value in weights.items()}
        self.values.append(kept)
        if weighed is not None:
            self.weights.append(weighed)
        self.rows.append(rows)
        self.total += rows

    def ahead(self, sums: Mapping[str, Tensor], weights: Mapping[str, Number] | None, rows: int) -> "Sums":
        """Return these with one micro-batch more, whose gradient is still to come."""
        found = copy(self)
        found.values, found.weights, found.rows = [*self.values], [*self.weights], [*self.rows]
        found.totals = {}
        found.count(sums, weights, rows)
        return found

    def take(self, other: "Sums") -> None:
        """Merge the sums of one `add`; the parameters have no gradient afterwards."""
        if other.gradients is not None:
            if self.gradients is None:
                self.division = other.division
                self.gradients = Apart(
                    self.task.network.parameters,
                    dtype=self.plan.accumulation_dtype,
                    names=[*self.division.coefficients],
                )
            assert isinstance(self.gradients, Apart)  # noqa: S101 - a window of several adds has no others
            self.gradients.take(other.gradients)
        self.values += other.values
        self.weights += other.weights
        self.rows += other.rows
        self.total += other.total
        self.redone += other.redone
        self.dropped += other.dropped
        self.has_flowed = self.has_flowed or other.has_flowed

    def weigh(self) -> dict[str, Number]:
        """Return the weight of each term over all micro-batches, on its device; `read` checks it."""
        if not self.values:  # all micro-batches were left out
            return {}
        if self.division.divisors is not None:
            return {**self.division.divisors}
        names = self.weights[0] if self.weights else ()
        return {name: _added([one[name] for one in self.weights]) for name in names}

    def finish(self, weights: Mapping[str, Number]) -> Gradient:
        """Return the gradient of the rows here, divided by these weights."""
        if self.agreed is not None and self.agreed.reduced is not None:
            self.close()
            return self.agreed.reduced
        if self.gradients is None:
            return {}
        self.close()
        factors = {} if self.division.divisors is not None else self.division.factors(weights)
        return finish(self.gradients.parted(), factors)

    def read(
        self, weights: Mapping[str, Number], *others: Tensor, is_dry: bool = False
    ) -> tuple[dict[str, float], list[float]]:
        """Bring weights, losses and other scalars to the host, together: a device stops once.

        In a dry run losses need not be finite.

        Returns:
            The weights, and the other scalars.

        Raises:
            LossError: promised and added-up weights differ, or no term depends on a parameter.
            NonFiniteLossError: a summed loss is not finite; the message names its rows.
        """
        if self.agreed is not None:  # all ranks have checked theirs
            found = all_to_host([*weights.values(), *others])
            self.totals = {name: self.agreed.totals[name] for name in weights}
            return dict(zip(weights, found, strict=False)), found[len(weights) :]
        weighed = self.weights if weights else []
        sums = [one[name] for name in weights for one in self.values]
        added = [one[name] for one in weighed for name in one]
        hosts = iter(all_to_host([*weights.values(), *added, *sums, *others]))
        known = {name: next(hosts) for name in weights}
        hosted = [{name: next(hosts) for name in one} for one in weighed]
        self._check(known, hosted)
        for name, weight in known.items():
            values = [next(hosts) for _ in self.values]
            if not (is_dry or all(map(math.isfinite, values))) and weight:
                self._refuse(values, name)
            self.totals[name] = math.fsum(values)
        return known, [*hosts]

    def _check(self, known: Mapping[str, float], hosted: Sequence[Mapping[str, float]]) -> None:
        """Refuse weights that are negative, not finite, or not those that were promised."""
        promised = self.division.divisors is not None
        if promised:
            _check_weights(known, "the whole batch")
        for index, one in enumerate(hosted):
            _check_weights(one, f"micro-batch {index}")
        for name in known if promised and hosted else ():
            added = math.fsum(one[name] for one in hosted)
            if not math.isclose(known[name], added, rel_tol=1e-6):
                raise LossError(
                    f"Expected the weights of the micro-batches to add up to the batch's {known[name]:g} for "
                    f"{name!r}, got {added:g}. "
                    "Rows that differ in length (padding) do not weigh the same: return ab.Total(sum, number "
                    "of valid elements). If the model makes its own targets, bring a list of samples with a "
                    "`collate`, or the rows in a step.window()."
                )
        is_plain_loss = not (self.task.optimizers or torch.is_grad_enabled())  # nobody updates
        if not (self.has_flowed or is_plain_loss) and any(known.values()):
            raise LossError(
                "Expected a loss that depends on the parameters of the optimizer, "
                f"got terms {sorted(known)} without gradient. "
                "Look for .detach(), torch.no_grad() or frozen parameters."
            )

    def _refuse(self, values: Sequence[float], name: str) -> NoReturn:
        bad = [index for index, value in enumerate(values) if not math.isfinite(value)]
        first = sum(self.rows[: bad[0]])
        named = self.batch.rows_in_words(first, first + self.rows[bad[0]])
        shown = f"{bad[:_SHOWN]}" + f" and {len(bad) - _SHOWN} more" * (len(bad) > _SHOWN)
        raise NonFiniteLossError(
            f"Expected a finite loss, got {values[bad[0]]} for {name!r} in micro-batches {shown} of "
            f"{len(values)} (the first one holds {named}). No update was made. "
            "Look for bad data in these rows of the batch, a mean over no valid target, too high a learning "
            "rate, or a sum that overflows float16."
        )

    def value(self, weights: Mapping[str, float]) -> tuple[float, Mapping[str, float]]:
        """Return the loss of all rows, and that of each term; after `read`."""
        is_divided = self.division.is_divided if self.agreed is None else self.task.loss.divided
        means: dict[str, float] = {}
        for name, total in self.totals.items():
            weight = weights.get(name)
            means[name] = total / (1 if is_divided else weight) if weight else math.nan
        # A rank without rows has decided no division.
        coefficients = self.division.coefficients or self.task.loss.coefficients
        used = [coefficients.get(name, 1.0) * mean for name, mean in means.items() if weights.get(name)]
        return (math.fsum(used) if used else math.nan), means

    def too_large(self) -> int:
        """Return the rows of the smallest micro-batch that is to be smaller from now on; 0 for none."""
        return min(filter(None, self.redone), default=0)

    def close(self) -> None:
        """Remove hooks from the parameters."""
        if isinstance(self.gradients, Apart):
            self.gradients.close()


def _kept(value: Number) -> Number:
    """Return a number without its graph, and without the rows some kernels (`mse_loss`) leave in its storage.

    On the host a tensor kept from each micro-batch would lie between those that come and go, so that the
    allocator finds no room where it found some before: 4 % of a step of LeNet-5.
    """
    if not isinstance(value, Tensor):
        return value
    if value.is_cpu:
        return value.item()
    value = value.detach()
    return value.clone() if value.untyped_storage().nbytes() > value.element_size() else value


def _added(values: Sequence[Number]) -> Number:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return math.fsum(map(float, values))
    device = tensors[0].device
    return torch.stack(
        [torch.as_tensor(value).to(device, accelerator.widest(device)) for value in values]
    ).sum()


def _check_weights(weights: Mapping[str, float], where: str) -> None:
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise LossError(
                f"Expected a finite weight of at least 0 for {name!r}, got {weight} in {where}. "
                "Count rows or tokens."
            )


def all_to_host(values: Sequence[Number]) -> list[float]:
    """Return scalars as numbers; those of devices are copied together, so that a device stops once."""
    far = [value for value in values if isinstance(value, Tensor) and not value.is_cpu]
    if not far:
        return [*map(float, values)]
    device = far[0].device
    found = iter(torch.stack([value.to(device, accelerator.widest(device)) for value in far]).tolist())
    return [next(found) if isinstance(one, Tensor) and not one.is_cpu else float(one) for one in values]


def _stand_in(weight: Number, rows: int) -> float:
    """Return the power of two nearest a weight on the host, or nearest the rows: a device need not stop."""
    is_far = isinstance(weight, Tensor) and not weight.is_cpu
    size = rows if is_far else float(weight) or rows
    return 2.0 ** round(math.log2(size)) if 0 < size < math.inf else 1.0


def _quotient(coefficient: float, divisor: Number) -> Number:
    """Return coefficient / divisor, or 0 if the divisor is 0; on its device, which need not stop for it."""
    if isinstance(divisor, Tensor) and not divisor.is_cpu:
        return torch.where(divisor == 0, 0, coefficient / divisor)
    return coefficient / float(divisor) if divisor else 0.0
