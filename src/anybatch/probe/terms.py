"""Which term of a loss does not add up while outputs are given: denominators, dropped rows, meetings."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anybatch.losses.resolve import resolve
from anybatch.losses.summed import SummedLoss
from anybatch.losses.terms import Terms
from anybatch.probe.calls import Call
from anybatch.probe.cut import Cut
from anybatch.probe.finding import WAYS_OUT, Finding
from anybatch.probe.given import Evaluation, evaluate
from anybatch.probe.passes import Bench
from anybatch.probe.rows import find_axis, take
from anybatch.probe.weights import Candidate, candidates, held_weights

_EXACT = 1e-13  # float64 on few terms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Audit:
    """Looks at a loss by itself: the model's outputs are those of the whole batch, in every cut.

    Args:
        bench: where the loss is run.
        whole: all rows in one micro-batch.
        outermost: the calls of the model in a pass over the whole batch.
        tolerance: relative error that counts as rounding.
        name: what the caller's loss is called.
        bare: whether it returns means that have lost their denominators.
        pooled: whether the model's outputs that belong to no row are given too.
    """

    bench: Bench
    whole: Cut
    outermost: Sequence[Call]
    tolerance: float
    name: str
    bare: bool
    pooled: bool

    def find(self, cuts: Sequence[Cut]) -> list[Finding]:
        """A finding for each term that does not add up in one of the cuts."""
        with self.bench.fresh() as (_, loss):
            if not isinstance(resolve(loss), Terms | SummedLoss):
                return []
        try:
            reference = self.evaluate([self.whole])[0]
        except Exception:  # the pass over all rows came to its end, so this one has outputs that do not fit
            return []
        parted = [evaluations for cut in cuts if (evaluations := self._try(cut))]
        found = [self._judge(name, reference, parted) for name in reference.sums]
        return [finding for finding in found if finding is not None]

    def _try(self, cut: Cut) -> list[Evaluation]:
        try:
            return self.evaluate([cut])
        except Exception:  # rows that a loss refuses to take alone
            return []

    def evaluate(self, cuts: Sequence[Cut]) -> list[Evaluation]:
        """The terms of each micro-batch of these cuts."""
        return evaluate(self.bench, self.outermost, cuts, pooled=self.pooled)

    # ---- one term

    def _judge(self, name: str, whole: Evaluation, parted: Sequence[Sequence[Evaluation]]) -> Finding | None:
        ours = [[part for part in parts if name in part.sums] for parts in parted]
        sums = all(self._adds_up([p.sums[name] for p in parts], whole.sums[name]) for parts in ours)
        weights = all(self._adds_up([p.weights[name] for p in parts], whole.weights[name]) for parts in ours)
        culprit = f"term {name!r} of {self.name}"
        if sums and weights and not self.bare:
            if all(self._pulls_add_up(name, whole, parts) for parts in ours):
                return None
            what = "The sums of micro-batches add up, but the gradients that flow into the model do not."
            return Finding(kind="detached", culprit=culprit, what=what, ways_out=WAYS_OUT["detached"])
        kind, what, ways_out = self._classify(name, whole, ours, sums, weights)
        return Finding(kind=kind, culprit=culprit, what=what, ways_out=ways_out)

    def _classify(
        self, name: str, whole: Evaluation, parted: Sequence[Sequence[Evaluation]], sums: bool, weights: bool
    ) -> tuple[str, str, tuple[str, ...]]:
        if any(part.strangers for part in (whole, *[p for parts in parted for p in parts])):
            what = "It draws random numbers by position: by its own generator, or after setting a seed."
            return "position", what, WAYS_OUT["position"]
        if not self._is_same(name, whole, self.evaluate([self.whole, self.whole])[1]):
            what = "Called again with the same rows it returns something else."
            return "state", what, WAYS_OUT["state"]
        dropped = self._dropped(name)
        if dropped:
            rows = len(self.whole.part.rows)
            what = f"{dropped} of {rows} rows count in the whole batch, but not in a micro-batch of few."
            return "dropped rows", what, WAYS_OUT["dropped rows"]
        right = self._right(name, whole, parted)
        if right is not None:
            return "denominator", *self._in_words(name, whole, right, sums, weights)
        if sums and not weights:
            what = (
                f"Its sums add up, but its weights do not: {whole.weights[name]:g} for the whole batch, "
                f"{[round(p.weights[name], 6) for p in parted[0]]} for its parts. "
            )
            return (
                "denominator",
                what,
                ("Return ab.Total(sum, what the sum of the whole batch is divided by).",),
            )
        if not self._is_same(name, *self._either_way()):
            left_out = _left_out(name, whole, parted)
            if left_out:
                what = f"Rows {left_out} are left out in some cuts and not in others, by their place."
                return "dropped rows", what, WAYS_OUT["dropped rows"]
            what = "The same rows in another order give another value."
            return "position", what, WAYS_OUT["position"]
        what = (
            f"Rows meet in it: {whole.mean(name):.6g} on the whole batch is no weighted mean of "
            f"{[float(f'{p.mean(name):.6g}') for p in parted[0]]} on its parts, by rows, elements, valid "
            "entries, masks or class weights."
        )
        ways_out = (
            "Write it as ab.WholeBatch(fn), a function of the outputs of all rows.",
            "If it is several means, return each as a term of its own: {'name': ab.Total(sum, weight), ...}.",
            "Leave the batch uncut (micro_batch=None).",
        )
        return "meeting", what, ways_out

    def _in_words(
        self, name: str, whole: Evaluation, right: Candidate, sums: bool, weights: bool
    ) -> tuple[str, tuple[str, ...]]:
        if self.bare:
            wrong = "It returns a bare mean, which has lost its denominator"
        elif sums:
            wrong = f"Its sums add up, but its weights ({whole.weights[name]:g} for the whole batch) do not"
        elif weights:
            wrong = "Its weights add up, but its sums do not: they are means already"
        else:
            wrong = "It is divided by something that does not add up"
        what = f"{wrong}; the right denominator is {right.words}."
        key = f'{{"{name}": ab.Total(mean * n, n)}}' if name != "loss" else "ab.Total(mean * n, n)"
        with self.bench.fresh() as (model, _):
            computes_its_own = self.bare and hasattr(model, "config")
        more = ("A transformers model that computes its own loss goes in with ab.ModelLoss().",)
        lines = f"Return the sum and what it is divided by:\n    n = {right.code}\n    return {key}"
        return what, (lines, *(more if computes_its_own else ()))

    def _right(
        self, name: str, whole: Evaluation, parted: Sequence[Sequence[Evaluation]]
    ) -> Candidate | None:
        """What makes the whole's value the weighted mean of its parts' in every cut."""
        batch = self.whole.given if self.whole.collate is None else self.whole.collate(self.whole.given)
        with self.bench.fresh() as (model, loss):
            held = held_weights(loss.function if isinstance(loss, Terms) else loss, model)
        readings: list[Callable[[Evaluation], float]] = [
            lambda one: one.mean(name),
            lambda one: one.sums[name],
        ]
        found = [
            (min(max(self._misfit(one, read, whole, p) for p in parted) for read in readings), one)
            for one in candidates(batch, held)
        ]
        best = min(misfit for misfit, _ in found)
        if not parted or best > self.tolerance / 10:  # means of single terms lose less than gradients
            return None
        # The first of those that fit as well as the best: in float32, and early in training when all tokens
        # cost about the same, wrong ones come close too.
        return next(one for misfit, one in found if misfit <= max(10 * best, _EXACT))

    def _misfit(
        self,
        candidate: Candidate,
        read: Callable[[Evaluation], float],
        whole: Evaluation,
        parts: Sequence[Evaluation],
    ) -> float:
        """How far the mean of the parts' values, weighted by a candidate, is from the whole's value."""
        try:
            pairs = [(candidate.count(part.leaves), read(part)) for part in parts]
        except (RuntimeError, IndexError):
            return math.inf
        used = [(count, value) for count, value in pairs if count]
        total = math.fsum(count for count, _ in used)
        size = math.fsum(abs(count * value) for count, value in used)
        if not total or not size or not math.isfinite(size):
            return math.inf
        return abs(math.fsum(count * value for count, value in used) - total * read(whole)) / size

    def _dropped(self, name: str) -> int:
        """Rows that count in the whole, while micro-batches of one, two or three of them count nothing."""
        total = len(self.whole.part.rows)
        everything = self._of(name, range(total))[1]
        for size in (1, 2, 3):
            silent: set[int] = set()
            for start in range(0, total, size):
                rows = range(start, min(start + size, total))
                rest = [row for row in range(total) if row not in rows]
                if rest and not any(self._of(name, rows)) and self._of(name, rest)[1] != everything:
                    silent |= set(rows)
            if silent:
                return len(silent)
        return 0

    def _of(self, name: str, rows: Sequence[int]) -> tuple[float, float]:
        """Sum and weight of some rows."""
        found = self._try(self.whole.only(rows))
        return (found[0].sums[name], found[0].weights[name]) if found else (math.nan, math.nan)

    def _either_way(self) -> list[Evaluation]:
        """All rows but the last, in their order and from the last to the first.

        Not all of them: outputs of the whole batch are told from those of a part by their shape.
        """
        rows = range(max(1, len(self.whole.part.rows) - 1))
        return [self.evaluate([self.whole.only(order)])[0] for order in (rows, rows[::-1])]

    def _adds_up(self, parts: Sequence[float], whole: float) -> bool:
        size = math.fsum(abs(part) for part in parts) + abs(whole)
        return math.isfinite(size) and abs(math.fsum(parts) - whole) <= self.tolerance * size

    def _is_same(self, name: str, one: Evaluation, other: Evaluation) -> bool:
        return self._adds_up([other.sums[name]], one.sums[name]) and self._adds_up(
            [other.weights[name]], one.weights[name]
        )

    def _pulls_add_up(self, name: str, whole: Evaluation, parts: Sequence[Evaluation]) -> bool:
        """The gradient of a sum is, row by row, that of the parts' sums."""
        difference = size = 0.0
        for index, wanted in enumerate(whole.pulled[name]):
            if any(len(part.pulled[name]) != len(whole.pulled[name]) for part in parts):
                return True  # outputs that cannot be told apart
            pieces = [part.pulled[name][index] for part in parts]
            shares = [take(wanted, p.shape, part.part) for p, part in zip(pieces, parts, strict=True)]
            if any(share is None for share in shares):
                continue
            if all(piece.shape == wanted.shape for piece in pieces):  # one value for all rows
                pairs = [(sum(pieces[1:], start=pieces[0]), wanted)]
            else:
                pairs = [(p, s) for p, s in zip(pieces, shares, strict=True) if s is not None]
            difference += sum((a - b).square().sum().item() for a, b in pairs)
            size += sum(a.square().sum().item() + b.square().sum().item() for a, b in pairs)
        return difference**0.5 <= self.tolerance * size**0.5


def _left_out(name: str, whole: Evaluation, parted: Sequence[Sequence[Evaluation]]) -> list[int]:
    """Rows into whose outputs no gradient flows in one cut, while it does in another."""
    silent: set[int] = set()
    heard: set[int] = set()
    first = parted[0][0] if parted and parted[0] else whole
    for one in (whole, *[part for parts in parted for part in parts]):
        for index, pulled in enumerate(one.pulled[name]):
            peers = first.pulled[name], whole.pulled[name]
            if any(index >= len(peer) for peer in peers):
                continue
            axis = find_axis(peers[1][index].shape, peers[0][index].shape, first.part)
            if axis is None:
                continue
            there = pulled.unflatten(axis.place, (len(one.part.rows), axis.per_row))
            flows = there.movedim(axis.place, 0).flatten(1).any(1).tolist()
            heard |= {row for row, flow in zip(one.part.rows, flows, strict=True) if flow}
            silent |= {row for row, flow in zip(one.part.rows, flows, strict=True) if not flow}
    return sorted(silent & heard)
