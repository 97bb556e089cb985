"""Which term of a loss does not add up while outputs are given: denominators, dropped rows, meetings."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from anybatch.check.denominators import (
    Candidate,
    Cuts,
    Reading,
    candidates,
    fit,
    gradients_add_up,
    held_weights,
    left_out,
    misfit,
)
from anybatch.check.finding import WAYS_OUT, Finding
from anybatch.check.outputs import Evaluation, evaluate
from anybatch.check.passes import Bench, Call
from anybatch.check.rows import Cut
from anybatch.losses import SummedLoss, Terms, resolve

_SMALL = 1e-6  # the most that an epsilon in a denominator moves a mean


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TermTest:
    """Tests a loss by itself: in every cut the model's outputs are those of the whole batch."""

    bench: Bench  # where the loss is run
    whole: Cut  # all rows in one micro-batch
    outermost: Sequence[Call]  # the calls of the model in a pass over the whole batch
    tolerance: float  # relative error that counts as rounding
    name: str  # what the caller's loss is called
    bare: Collection[str]  # the terms that are means which have lost their denominators
    pooled: bool  # whether the model's outputs that belong to no row are given too

    def find(self, cuts: Sequence[Cut]) -> list[Finding]:
        """A finding for each term that does not add up in one of the cuts."""
        with self.bench.fresh() as (_, loss):
            if not isinstance(resolve(loss), Terms | SummedLoss):
                return []
        reference = self._try(self.whole)
        if not reference:
            return []
        parted = [evaluations for cut in cuts if (evaluations := self._try(cut))]
        found = [self._check_term(name, reference[0], parted) for name in reference[0].sums]
        return [finding for finding in found if finding is not None]

    def _try(self, cut: Cut) -> list[Evaluation]:
        try:
            return self.evaluate([cut])
        except Exception:  # rows that a loss refuses to take alone, or outputs that do not fit
            return []

    def evaluate(self, cuts: Sequence[Cut]) -> list[Evaluation]:
        """The terms of each micro-batch of these cuts."""
        return evaluate(self.bench, self.outermost, cuts, pooled=self.pooled)

    # ---- one term

    def _check_term(self, name: str, whole: Evaluation, parted: Cuts) -> Finding | None:
        ours = [[part for part in parts if name in part.sums] for parts in parted]
        sums = all(self._adds_up([p.sums[name] for p in parts], whole.sums[name]) for parts in ours)
        weights = all(self._adds_up([p.weights[name] for p in parts], whole.weights[name]) for parts in ours)
        culprit = f"term {name!r} of {self.name}"
        if sums and weights and name not in self.bare:
            if all(gradients_add_up(name, whole, parts, self.tolerance) for parts in ours):
                return None
            kind = "detached"
            what = "The sums of micro-batches add up, but the gradients that flow into the model do not."
            ways_out: list[str] = []
        else:
            kind, what, *ways_out = self._classify(name, whole, ours, sums, weights)
        return Finding(kind=kind, culprit=culprit, what=what, ways_out=tuple(ways_out) or WAYS_OUT[kind])

    def _classify(
        self, name: str, whole: Evaluation, parted: Cuts, sums: bool, weights: bool
    ) -> tuple[str, ...]:
        """The kind, what is wrong, and ways out other than those of the kind."""
        if any(part.unreplayed for part in (whole, *[p for parts in parted for p in parts])):
            what = (
                "It draws random numbers by position: from a generator of its own, or after setting a seed."
            )
            return "position", what
        if not self._is_same(name, whole, self.evaluate([self.whole, self.whole])[1]):
            return "state", "It returns another value when it is called again with the same rows."
        dropped = self._dropped(name, whole, parted)
        if dropped:
            rows = len(self.whole.part.rows)
            what = f"{dropped} of {rows} rows count in the whole batch, but not in a small micro-batch."
            return "dropped rows", what
        error = max((_own_error(name, whole, parts) for parts in parted), default=math.inf)
        right = self._right(name, whole, parted, error)
        if right is not None:
            return "denominator", *self._in_words(name, whole, *right, sums, weights)
        if weights and error <= _SMALL:
            return "denominator", *_as_epsilon(error)
        if sums and not weights:
            what = (
                f"Its sums add up, but its weights do not: {whole.weights[name]:g} for the whole batch, "
                f"{[round(p.weights[name], 6) for p in parted[0]]} for its parts. "
            )
            return "denominator", what, "Return ab.Total(sum, what the sum of the whole batch is divided by)."
        if not self._is_same(name, *self._either_way()):
            unused = left_out(name, whole, parted)
            if unused:
                what = f"Rows {unused} are left out in some cuts and not in others, by their place."
                return "dropped rows", what
            return "position", "The same rows in another order give another value."
        what = (
            f"Rows meet in it, or its denominator is unknown: {whole.mean(name):.6g} on the whole is not "
            f"a mean of {[float(f'{p.mean(name):.6g}') for p in parted[0]]} on its parts, weighted by rows, "
            "elements, valid entries, masks or class weights."
        )
        return (
            "meeting",
            what,
            "Write it as ab.WholeBatch(fn), a function of the outputs of all rows.",
            "If it is a mean, return the sum and what it is divided by: ab.Total(sum, n).",
            "If it is several means, return each as a term of its own: {'name': ab.Total(sum, weight), ...}.",
            "Leave the batch uncut (micro_batch=None).",
        )

    def _in_words(
        self, name: str, whole: Evaluation, right: Candidate, is_near: bool, sums: bool, weights: bool
    ) -> tuple[str, ...]:
        if name in self.bare:
            wrong = "It returns a bare mean, which has lost its denominator"
        elif sums:
            wrong = f"Its sums add up, but its weights ({whole.weights[name]:g} for the whole batch) do not"
        elif weights:
            wrong = "Its weights add up, but its sums do not: they are means already"
        else:
            wrong = "It is divided by something that does not add up"
        key = f'{{"{name}": ab.Total(%s, n)}}' if name != "loss" else "ab.Total(%s, n)"
        lines = f"Return the sum and what it is divided by:\n    n = {right.code}\n    return "
        if is_near:
            what = f"{wrong}; the right denominator is {right.words}, apart from an epsilon."
            return what, lines + key % "sum", "Where it may be 0, n.clamp(min=1) is exact; n + 1e-8 is not."
        what = f"{wrong}; the right denominator is {right.words}."
        with self.bench.fresh() as (model, _):
            computes_its_own = name in self.bare and hasattr(model, "config")
        more = ("For a transformers model that computes its own loss, use ab.ModelLoss().",)
        return what, lines + key % "mean * n", *(more if computes_its_own else ())

    def _right(
        self, name: str, whole: Evaluation, parted: Cuts, error: float
    ) -> tuple[Candidate, bool] | None:
        """What makes the whole's value the weighted mean of its parts' in every cut."""
        batch = self.whole.data if self.whole.collate is None else self.whole.collate(self.whole.data)
        with self.bench.fresh() as (model, loss):
            held = held_weights(loss.function if isinstance(loss, Terms) else loss, model)
        options = candidates(batch, held)
        return fit(options, _readings(name), whole, parted, tolerance=self.tolerance, error=error)

    def _dropped(self, name: str, whole: Evaluation, parted: Cuts) -> int:
        """How many rows count in the whole, while some micro-batch with them counts nothing."""
        empty = [p.part for parts in parted for p in parts if not (p.sums[name] or p.weights[name])]
        dropped: set[int] = set()
        for part in empty:
            rest = self._try(self.whole.only([row for row in range(part.total) if row not in part.rows]))
            if not rest or rest[0].weights[name] != whole.weights[name]:
                dropped |= set(part.rows)
        return len(dropped)

    def _either_way(self) -> list[Evaluation]:
        """All rows but the last (the shape of all would look like the whole's), in order and reversed."""
        rows = range(max(1, len(self.whole.part.rows) - 1))
        return [self.evaluate([self.whole.only(order)])[0] for order in (rows, rows[::-1])]

    def _adds_up(self, parts: Sequence[float], whole: float) -> bool:
        size = math.fsum(abs(part) for part in parts) + abs(whole)
        return math.isfinite(size) and abs(math.fsum(parts) - whole) <= self.tolerance * size

    def _is_same(self, name: str, one: Evaluation, other: Evaluation) -> bool:
        return self._adds_up([other.sums[name]], one.sums[name]) and self._adds_up(
            [other.weights[name]], one.weights[name]
        )


def _readings(name: str) -> list[Reading]:
    """What may be the mean of a micro-batch: sum over weight, or the sum, if it is a mean already."""
    return [lambda one: one.mean(name), lambda one: one.sums[name]]


def _own_error(name: str, whole: Evaluation, parts: Sequence[Evaluation]) -> float:
    """Of the weights that a term has."""
    weights = [part.weights[name] for part in parts]
    return misfit(weights, [part.mean(name) for part in parts], whole.mean(name))


def _as_epsilon(error: float) -> tuple[str, ...]:
    return (
        f"Its mean and that of its parts differ by {error:.1g}: there is an epsilon in the denominator.",
        "Return the sum as it is before it is divided, instead of mean * n.",
        "Where the denominator may be 0, n.clamp(min=1) is exact; n + 1e-8 is not.",
    )
