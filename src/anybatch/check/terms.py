"""Terms of a loss that do not add up although the outputs of the model are fixed, and why"""

import math
from collections.abc import Sequence

from anybatch.check.denominators import Candidate, Cuts, candidates, fit, held_weights, misfit
from anybatch.check.finding import WAYS_OUT, Finding
from anybatch.check.outputs import Evaluation, evaluate
from anybatch.check.rows import RowCut
from anybatch.check.splits import Comparison
from anybatch.losses import Additive, SummedLoss, Terms, function_of, resolve

_SMALL = 1e-6  # the most that an epsilon in a denominator moves a mean


class TermTest:
    """A test of a loss by itself: in every split the model's outputs are those of the whole batch."""

    def __init__(self, comparison: Comparison, tolerance: float, name: str) -> None:
        self.bench, self.whole, self.outermost = comparison.bench, comparison.whole, comparison.outermost
        self.tolerance = tolerance  # relative error that counts as rounding
        self.name = name  # of the caller's loss
        self.bare = comparison.reference.bare  # the terms that are means without their denominators

    def find(self, cuts: Sequence[RowCut]) -> list[Finding]:
        """Return a finding for each term that does not add up in one of the splits."""
        with self.bench.fresh() as (_, loss):
            if not isinstance(resolve(loss), Terms | SummedLoss | Additive):
                return []
        reference = self._try(self.whole)
        if not reference:
            return []
        parted = [evaluations for cut in cuts if (evaluations := self._try(cut))]
        found = [self._check_term(name, reference[0], parted) for name in reference[0].sums]
        return [finding for finding in found if finding is not None]

    def _try(self, cut: RowCut) -> list[Evaluation]:
        try:
            return self._evaluate([cut])
        except Exception:  # rows that a loss refuses to take alone, or outputs that do not fit
            return []

    def _evaluate(self, cuts: Sequence[RowCut]) -> list[Evaluation]:
        return evaluate(self.bench, self.outermost, cuts)

    def _check_term(self, name: str, whole: Evaluation, parted: Cuts) -> Finding | None:
        ours = [[part for part in parts if name in part.sums] for parts in parted]
        sums = all(self._adds_up([p.sums[name] for p in parts], whole.sums[name]) for parts in ours)
        weights = all(self._adds_up([p.weights[name] for p in parts], whole.weights[name]) for parts in ours)
        if sums and weights and name not in self.bare:
            return None
        kind, what, *ways_out = self._classify(name, whole, ours, sums, weights)
        culprit = f"term {name!r} of {self.name}"
        return Finding(kind=kind, culprit=culprit, what=what, ways_out=tuple(ways_out) or WAYS_OUT[kind])

    def _classify(
        self, name: str, whole: Evaluation, parted: Cuts, sums: bool, weights: bool
    ) -> tuple[str, ...]:
        if any(part.unreplayed for part in (whole, *[p for parts in parted for p in parts])):
            return "position", (
                "It draws random numbers by position: from a generator of its own, or after setting a seed."
            )
        if not self._is_same(name, whole, self._evaluate([self.whole, self.whole])[1]):
            return "state", "It returns another value when it is called again with the same rows."
        if dropped := self._dropped(name, whole, parted):
            rows = len(self.whole.part.rows)
            what = f"{dropped} of {rows} rows count in the whole batch, but not in a small micro-batch."
            return "dropped rows", what
        errors = [
            misfit([p.weights[name] for p in parts], [p.mean(name) for p in parts], whole.mean(name))
            for parts in parted
        ]
        error = max(errors, default=math.inf)
        if right := self._right(name, whole, parted, error):
            return "denominator", *self._in_words(name, *right, sums, weights)
        if weights and error <= _SMALL:
            return (
                "denominator",
                f"Its mean and that of its parts differ by {error:.1g}: an epsilon is in the denominator.",
                "Return the sum as it is before it is divided, instead of mean * n.",
                "Where the denominator may be 0, n.clamp(min=1) is exact; n + 1e-8 is not.",
            )
        if sums and not weights:
            what = (
                f"Its sums add up, but its weights do not: {whole.weights[name]:g} for the whole batch, "
                f"{[round(p.weights[name], 6) for p in parted[0]]} for its parts. "
            )
            return "denominator", what, "Return ab.Total(sum, what the sum of the whole batch is divided by)."
        # All rows but the last, in order and reversed: the shape of all would look like the whole's.
        rows = range(max(1, len(self.whole.part.rows) - 1))
        one, other = [self._evaluate([self.whole.only(order)])[0] for order in (rows, rows[::-1])]
        if not self._is_same(name, one, other):
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
        self, name: str, right: Candidate, is_near: bool, sums: bool, weights: bool
    ) -> tuple[str, ...]:
        if name in self.bare:
            wrong = "It returns a bare mean, which has lost its denominator"
        elif weights:
            wrong = "Its weights add up, but its sums do not: they are means already"
        else:
            wrong = "Its sums add up, but its weights do not" if sums else "Its denominator does not add up"
        key = f'{{"{name}": ab.Total(%s, n)}}' if name != "loss" else "ab.Total(%s, n)"
        lines = f"Return the sum and what it is divided by:\n    n = {right.code}\n    return "
        if is_near:
            what = f"{wrong}; the right denominator is {right.words}, apart from an epsilon."
            return what, lines + key % "sum", "Where it may be 0, n.clamp(min=1) is exact; n + 1e-8 is not."
        with self.bench.fresh() as (model, _):
            computes_its_own = name in self.bare and hasattr(model, "config")
        more = ("For a transformers model that computes its own loss, use ab.ModelLoss().",)
        what = f"{wrong}; the right denominator is {right.words}."
        return what, lines + key % "mean * n", *(more if computes_its_own else ())

    def _right(
        self, name: str, whole: Evaluation, parted: Cuts, error: float
    ) -> tuple[Candidate, bool] | None:
        batch = self.whole.data if self.whole.collate is None else self.whole.collate(self.whole.data)
        with self.bench.fresh() as (model, loss):
            options = candidates(batch, held_weights(function_of(loss), model))
        return fit(options, name, whole, parted, tolerance=self.tolerance, error=error)

    def _dropped(self, name: str, whole: Evaluation, parted: Cuts) -> int:
        """Return how many rows count in the whole, while some micro-batch with them counts nothing."""
        dropped: set[int] = set()
        for part in [p.part for parts in parted for p in parts if not (p.sums[name] or p.weights[name])]:
            rest = self._try(self.whole.only([row for row in range(part.total) if row not in part.rows]))
            if not rest or rest[0].weights[name] != whole.weights[name]:
                dropped |= set(part.rows)
        return len(dropped)

    def _adds_up(self, parts: Sequence[float], whole: float) -> bool:
        size = math.fsum(abs(part) for part in parts) + abs(whole)
        return math.isfinite(size) and abs(math.fsum(parts) - whole) <= self.tolerance * size

    def _is_same(self, name: str, one: Evaluation, other: Evaluation) -> bool:
        is_same_sum = self._adds_up([other.sums[name]], one.sums[name])
        return is_same_sum and self._adds_up([other.weights[name]], one.weights[name])
