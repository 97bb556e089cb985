"""Terms of a loss that do not add up although the outputs of the model are fixed, and why"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anybatch.check.calls import Calls
from anybatch.check.denominators import Candidate, candidates, held_weights, misfit
from anybatch.check.finding import WAYS_OUT, Finding
from anybatch.check.passes import observe
from anybatch.check.rows import Rows
from anybatch.check.splits import Comparison, cut_sizes_to_try
from anybatch.losses import Additive, SummedLoss, Terms, function_of, resolve
from anybatch.state import RowPart

_CLOSER = 1e-6  # relative error of sums in float32 that add up
_SMALL = 1e-6  # the most that an epsilon in a denominator moves a mean
_EXACT = 1e-13  # error of float64 on few terms
_EPSILON = 1e-4  # the share of an error that an epsilon in a denominator may leave


class Evaluation(NamedTuple):
    """The terms of one micro-batch."""

    part: RowPart  # its rows
    micro: Any
    sums: Mapping[str, float]  # by the term's name
    weights: Mapping[str, float]  # by the term's name
    unreplayed: int  # random draws that were not replayed


def evaluate(compared: Comparison, *splits: Rows) -> list[Evaluation]:
    """Return the terms of each micro-batch of splits, with the model's outputs for the whole batch."""
    bench, found = compared.bench, list[Evaluation]()
    batches = [bench.own(rows.batch) for rows in splits]  # outside of draws, which note dtypes
    with bench.fresh():
        calls, loss = Calls(bench.model, compared.calls), resolve(observe(bench.loss))
        for rows, batch in zip(splits, batches, strict=True):
            for part, micro in zip(rows.parts, batch.cut(rows.micro_batch), strict=True):
                bench.draws.begin(part)
                calls.begin(part)
                terms = loss.evaluate(bench.model, micro)
                sums = {name: value.item() for name, value in terms.sums.items()}
                weights = {name: float(weight) for name, weight in terms.weigh().items()}
                found.append(Evaluation(part, micro, sums, weights, bench.draws.unreplayed))
    return found


def find_terms(compared: Comparison) -> list[Finding]:
    """Return a finding for each term that does not add up in one of the splits."""
    if not isinstance(resolve(compared.bench.loss), Terms | SummedLoss | Additive):
        return []
    splits = [one.cut for one in compared.passes]
    tried = {one.micro_batch for one in splits}
    sizes = cut_sizes_to_try(compared.whole.batch.rows)
    splits += [compared.whole.cut(size) for size in sizes if size not in tried]
    whole = _tried(compared, compared.whole)
    parted = [found for one in splits if whole and (found := _tried(compared, one))]
    limits = [compared.limit]
    if compared.limit > _CLOSER and not compared.rows_differ:
        limits.append(_CLOSER)  # in float32, terms of about the same size seem to add up
    for limit in limits:
        terms = [Term(compared, name, whole[0], parted, limit) for name in (whole[0].sums if whole else ())]
        if found := [finding for term in terms if (finding := term.finding())]:
            return found
    return []


def _tried(compared: Comparison, rows: Rows) -> list[Evaluation]:
    try:
        return evaluate(compared, rows)
    except Exception:  # rows that a loss refuses to take alone, or outputs that do not fit
        return []


class Term:
    """A term of a loss in several splits, where the model's outputs are those of the whole batch."""

    def __init__(
        self,
        compared: Comparison,
        name: str,
        whole: Evaluation,
        parted: Sequence[Sequence[Evaluation]],
        tolerance: float,
    ) -> None:
        self.compared, self.name, self.whole = compared, name, whole
        self.parted = [[part for part in parts if name in part.sums] for parts in parted]
        self.tolerance = tolerance  # relative error that counts as rounding
        self.is_bare = name in compared.reference.bare
        self.sums, self.weights = [  # True if they add up
            all(self._add_up(of, parts, whole) for parts in self.parted) for of in ("sums", "weights")
        ]

    def finding(self) -> Finding | None:
        """Return a finding if the term does not add up, or is a bare mean."""
        if self.sums and self.weights and not self.is_bare:
            return None
        rows = self.compared.whole
        if any(part.unreplayed for parts in ([self.whole], *self.parted) for part in parts):
            what = (
                "It draws random numbers by position: from a generator of its own, or after setting a seed."
            )
            return self._found("position", what)
        if not self._are_same(self.whole, evaluate(self.compared, rows, rows)[1]):
            return self._found(
                "state", "It returns another value when it is called again with the same rows."
            )
        if dropped := self._dropped():
            total = f"{len(dropped)} of {rows.batch.rows} rows"
            what = f"{total} count in the whole batch, but not in a small micro-batch."
            return self._found("dropped rows", what)
        return self._denominator() or self._meeting()

    def _found(self, kind: str, what: str, *ways_out: str) -> Finding:
        culprit = f"term {self.name!r} of {self.compared.name}"
        return Finding(kind=kind, culprit=culprit, what=what, ways_out=ways_out or WAYS_OUT[kind])

    def _dropped(self) -> set[int]:
        """Return the rows that count in the whole, while some micro-batch with them counts nothing."""
        dropped, name = set[int](), self.name
        for part in [p.part for parts in self.parted for p in parts if not (p.sums[name] or p.weights[name])]:
            others = [row for row in range(part.total) if row not in part.rows]
            rest = _tried(self.compared, self.compared.whole.only(others))
            if not rest or rest[0].weights[name] != self.whole.weights[name]:
                dropped |= set(part.rows)
        return dropped

    def _denominator(self) -> Finding | None:
        """Return a finding if the weights are wrong, or their share of an epsilon."""
        bench, rounding = self.compared.bench, self.tolerance / 10  # means of terms lose less than gradients
        held = held_weights(function_of(bench.loss), bench.model)
        errors = [(self._error_with(one, held), one) for one in candidates(self.whole.micro, held)]
        best = min(error for error, _ in errors)
        error = self._error(lambda part: part.weights[self.name], self._mean)
        if best <= max(rounding, _EPSILON * min(error, 1.0)):
            # Take the first that fits as well as the best: in float32, and early in training when all tokens
            # have about the same loss, wrong ones come close.
            right = next(one for error, one in errors if error <= max(10 * best, _EXACT))
            return self._with_right(right, is_near=best > rounding)
        if self.weights and error <= _SMALL:
            return self._found(
                "denominator",
                f"Its mean and that of its parts differ by {error:.1g}: an epsilon is in the denominator.",
                "Return the sum as it is before it is divided, instead of mean * n.",
                "Where the denominator may be 0, n.clamp(min=1) is exact; n + 1e-8 is not.",
            )
        if self.sums and not self.weights:
            parts = [round(part.weights[self.name], 6) for part in self.parted[0]]
            return self._found(
                "denominator",
                f"Its sums add up, but its weights do not: {self.whole.weights[self.name]:g} for the whole "
                f"batch, {parts} for its parts.",
                "Return ab.Total(sum, what the sum of the whole batch is divided by).",
            )
        return None

    def _with_right(self, right: Candidate, *, is_near: bool) -> Finding:
        if self.is_bare:
            wrong = "It returns a bare mean, which has lost its denominator"
        elif self.weights:
            wrong = "Its weights add up, but its sums do not: they are means already"
        elif self.sums:
            wrong = "Its sums add up, but its weights do not"
        else:
            wrong = "Its denominator does not add up"
        total = f"ab.Total({'sum' if is_near else 'mean * n'}, n)"
        total = total if self.name == "loss" else f'{{"{self.name}": {total}}}'
        ways_out = [f"Return the sum and what it is divided by:\n    n = {right.code}\n    return {total}"]
        if is_near:
            ways_out.append("Where it may be 0, n.clamp(min=1) is exact; n + 1e-8 is not.")
        elif self.is_bare and hasattr(self.compared.bench.model, "config"):
            ways_out.append("For a transformers model that computes its own loss, use ab.ModelLoss().")
        more = ", apart from an epsilon" * is_near
        what = f"{wrong}; the right denominator is {right.words}{more}."
        return self._found("denominator", what, *ways_out)

    def _meeting(self) -> Finding:
        # All rows but the last, in order and reversed: the shape of all would look like the whole's.
        rows = range(max(1, self.compared.whole.batch.rows - 1))
        one, other = [
            evaluate(self.compared, self.compared.whole.only(order))[0] for order in (rows, rows[::-1])
        ]
        if not self._are_same(one, other):
            return self._found("position", "The same rows in another order give another value.")
        parts = [float(f"{self._mean(part):.6g}") for part in self.parted[0]]
        return self._found(
            "meeting",
            f"Rows meet in it, or its denominator is unknown: {self._mean(self.whole):.6g} on the whole "
            f"is not a mean of {parts} on its parts, weighted by rows, elements, valid entries, masks or "
            "class weights.",
            "Write it as ab.WholeBatch(fn), a function of the outputs of all rows.",
            "If it is a mean, return the sum and what it is divided by: ab.Total(sum, n).",
            "If it is several means, return each as a term of its own: {'name': ab.Total(sum, weight), ...}.",
            "Leave the batch uncut (micro_batch=None).",
        )

    def _mean(self, part: Evaluation) -> float:
        """Return sum over weight; NaN without weight."""
        return part.sums[self.name] / (part.weights[self.name] or math.nan)

    def _sum(self, part: Evaluation) -> float:
        return part.sums[self.name]

    def _error_with(self, candidate: Candidate, held: Mapping[str, Any]) -> float:
        """Return the smaller error of two readings: sum over weight, or a sum that is a mean already."""

        def count(part: Evaluation) -> float:
            return float(eval(candidate.code, {**held, "micro": part.micro}))  # the code is made by us

        try:
            return min(self._error(count, mean) for mean in (self._mean, self._sum))
        except (RuntimeError, IndexError):  # classes without a weight
            return math.inf

    def _error(self, weigh: Callable[[Evaluation], float], mean: Callable[[Evaluation], float]) -> float:
        """Return the largest error in a split of the mean of its parts by these weights."""
        errors = [
            misfit([weigh(part) for part in parts], [mean(part) for part in parts], mean(self.whole))
            for parts in self.parted
        ]
        return max(errors, default=math.inf)

    def _add_up(self, of: str, parts: Sequence[Evaluation], whole: Evaluation) -> bool:
        *addends, wanted = [getattr(one, of)[self.name] for one in (*parts, whole)]
        size = math.fsum(map(abs, (*addends, wanted)))
        return math.isfinite(size) and abs(math.fsum(addends) - wanted) <= self.tolerance * size

    def _are_same(self, one: Evaluation, other: Evaluation) -> bool:
        return all(self._add_up(of, [other], one) for of in ("sums", "weights"))
