"""Terms of a loss that do not add up although the outputs of the model are fixed, and why"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybatch.check.finding import Finding, finding
from anybatch.check.passes import Calls, observe
from anybatch.check.rows import Rows
from anybatch.check.splits import Comparison
from anybatch.core import tree
from anybatch.losses import TARGET_KEYS, Additive, SummedLoss, Terms, function_of, resolve
from anybatch.state import Reachable
from anybatch.trial import RowPart

_FILLS = (-100, 0, -1)  # common fill values of targets: torch's and Hugging Face's, zero, scikit-learn's
_CLOSER = 1e-6  # relative error of sums in float32 that add up
_SMALL = 1e-6  # the most that an epsilon in a denominator moves a mean
_EXACT = 1e-13  # error of float64 on few terms
_EPSILON = 1e-4  # the share of an error that an epsilon in a denominator may leave


class Addend(NamedTuple):
    """A term of one micro-batch."""

    sum: float
    weight: float
    part: RowPart  # its rows
    micro: Any
    unreplayed: int  # random draws that were not replayed

    @property
    def mean(self) -> float:
        """Sum over weight; NaN without weight."""
        return self.sum / (self.weight or math.nan)


Addends = list[dict[str, Addend]]  # of all micro-batches, by name


def evaluate(compared: Comparison, *splits: Rows) -> Addends:
    """Return the terms of each micro-batch of splits, with the model's outputs for the whole batch."""
    bench, found = compared.bench, Addends()
    batches = [bench.own(rows.batch) for rows in splits]  # outside of draws, which note dtypes
    with bench.fresh():
        calls, loss = Calls(bench.model, bench.draws, compared.calls), resolve(observe(bench.loss))
        for rows, batch in zip(splits, batches, strict=True):
            for part, micro in zip(rows.parts, batch.cut(rows.micro_batch), strict=True):
                calls.begin(part)
                sums, weigh = loss.evaluate(bench.model, micro)
                weights, rest = weigh(), (part, micro, bench.draws.unreplayed)
                found.append(
                    {name: Addend(value.item(), float(weights[name]), *rest) for name, value in sums.items()}
                )
    return found


def _tried(compared: Comparison, rows: Rows) -> Addends:
    try:
        return evaluate(compared, rows)
    except Exception:  # rows that a loss refuses to take alone, or outputs that do not fit
        return []


def find_terms(compared: Comparison) -> list[Finding]:
    """Return a finding for each term that does not add up in one of the splits."""
    if not isinstance(resolve(compared.bench.loss), Terms | SummedLoss | Additive):
        return []
    whole = _tried(compared, compared.whole)  # nothing, or one micro-batch
    splits = [found for one in compared.splits if whole and (found := _tried(compared, one))]
    limits = [compared.limit]
    if compared.limit > _CLOSER and not compared.rows_differ:
        limits.append(_CLOSER)  # in float32, terms of about the same size seem to add up
    for limit in limits:
        terms = [Term(compared, name, one, splits, limit) for shares in whole for name, one in shares.items()]
        if found := [term.finding() for term in terms if not term.is_sound]:
            return found
    return []


class Term:
    """A term of a loss in several splits, where the model's outputs are those of the whole batch."""

    def __init__(
        self, compared: Comparison, name: str, whole: Addend, splits: Sequence[Addends], tolerance: float
    ) -> None:
        self.compared, self.name, self.whole = compared, name, whole
        self.parted = parted = [[part[name] for part in parts if name in part] for parts in splits]
        self.tolerance = tolerance  # relative error that counts as rounding
        self.is_bare = name in compared.reference.bare
        self.has_sums = all(self._adds_up(whole.sum, [part.sum for part in parts]) for parts in parted)
        self.has_weights = all(
            self._adds_up(whole.weight, [part.weight for part in parts]) for parts in parted
        )

        self.is_sound = self.has_sums and self.has_weights and not self.is_bare

    def finding(self) -> Finding:
        """Return what a term that does not add up, or is a bare mean, does, and the ways out."""
        kind, what, *ways_out = self._classify()
        return finding(kind, f"term {self.name!r} of {self.compared.name}", what, *ways_out)

    def _classify(self) -> tuple[str, ...]:
        rows = self.compared.whole
        if any(part.unreplayed for parts in ([self.whole], *self.parted) for part in parts):
            return (
                "position",
                "It draws random numbers by position: from a generator of its own, or after setting a seed.",
            )
        if not self._are_same(self.whole, evaluate(self.compared, rows, rows)[1][self.name]):
            return "state", "It returns another value when it is called again with the same rows."
        if dropped := self._dropped():
            what = f"{len(dropped)} of {rows.batch.rows} rows count in the whole batch, but not in a small "
            return "dropped rows", what + "micro-batch."
        if ours := self._denominator():
            return "denominator", *ours
        # All rows but the last, in order and reversed: the shape of all would look like the whole's.
        order = range(max(1, rows.batch.rows - 1))
        if not self._are_same(
            *[evaluate(self.compared, rows.only(one))[0][self.name] for one in (order, order[::-1])]
        ):
            return "position", "The same rows in another order give another value."
        means = [float(f"{part.mean:.6g}") for part in self.parted[0]]
        return (
            "meeting",
            f"Rows meet in it, or its denominator is unknown: {self.whole.mean:.6g} on the whole is not "
            f"a mean of {means} on its parts, weighted by rows, elements, valid entries, masks or class "
            "weights.",
            "Write it as ab.WholeBatch(fn), a function of the outputs of all rows.",
            "If it is a mean, return the sum and what it is divided by: ab.Total(sum, n).",
            "If it is several means, return each as a term of its own: {'name': ab.Total(sum, weight), ...}.",
            "Leave the batch uncut (micro_batch=None).",
        )

    def _dropped(self) -> set[int]:
        """Return the rows that count in the whole, while some micro-batch with them counts nothing."""
        dropped = set[int]()
        for part in [one.part for parts in self.parted for one in parts if not (one.sum or one.weight)]:
            others = [row for row in range(part.total) if row not in part.rows]
            rest = _tried(self.compared, self.compared.whole.only(others))
            if not rest or rest[0][self.name].weight != self.whole.weight:
                dropped |= set(part.rows)
        return dropped

    def _denominator(self) -> tuple[str, ...]:
        """Return what is wrong with the weights, and ways out; nothing if they are not at fault."""
        bench, rounding = self.compared.bench, self.tolerance / 10  # means of terms lose less than gradients
        held = held_weights(function_of(bench.loss), bench.model)
        errors = [
            (self._error_of(code, held), words, code) for words, code in candidates(self.whole.micro, held)
        ]
        best, error = min(errors)[0], self._error(lambda part: part.weight, lambda part: part.mean)
        if best <= max(rounding, _EPSILON * min(error, 1.0)):
            # Take the first that fits as well as the best: in float32, and early in training when all tokens
            # have about the same loss, wrong ones come close.
            right = next(one for one in errors if one[0] <= max(10 * best, _EXACT))
            return self._with_right(*right[1:], is_near=best > rounding)
        if self.has_weights and error <= _SMALL:
            return (
                f"Its mean and that of its parts differ by {error:.1g}: an epsilon is in the denominator.",
                "Return the sum as it is before it is divided, instead of mean * n.",
                "Where the denominator may be 0, n.clamp(min=1) is exact; n + 1e-8 is not.",
            )
        if self.has_sums and not self.has_weights:
            return (
                f"Its sums add up, but its weights do not: {self.whole.weight:g} for the whole batch, "
                f"{[round(part.weight, 6) for part in self.parted[0]]} for its parts.",
                "Return ab.Total(sum, what the sum of the whole batch is divided by).",
            )
        return ()

    def _with_right(self, words: str, code: str, *, is_near: bool) -> tuple[str, ...]:
        if self.is_bare:
            wrong = "It returns a bare mean, which has lost its denominator"
        elif self.has_weights:
            wrong = "Its weights add up, but its sums do not: they are means already"
        elif self.has_sums:
            wrong = "Its sums add up, but its weights do not"
        else:
            wrong = "Its denominator does not add up"
        total = f"ab.Total({'sum' if is_near else 'mean * n'}, n)"
        total = total if self.name == "loss" else f'{{"{self.name}": {total}}}'
        what = f"{wrong}; the right denominator is {words}{', apart from an epsilon' * is_near}."
        lines = f"Return the sum and what it is divided by:\n    n = {code}\n    return {total}"
        if is_near:
            return what, lines, "Where it may be 0, n.clamp(min=1) is exact; n + 1e-8 is not."
        if self.is_bare and hasattr(self.compared.bench.model, "config"):
            return what, lines, "For a transformers model that computes its own loss, use ab.ModelLoss()."
        return what, lines

    def _error_of(self, code: str, held: Mapping[str, Tensor]) -> float:
        """Return the smaller error of two readings: sum over weight, or a sum that is a mean already."""

        def count(part: Addend) -> float:
            return float(eval(code, {**held, "micro": part.micro}))  # the code is made below

        try:
            return min(self._error(count, lambda part: part.mean), self._error(count, lambda part: part.sum))
        except (RuntimeError, IndexError):  # classes without a weight
            return math.inf

    def _error(self, weigh: Callable[[Addend], float], read: Callable[[Addend], float]) -> float:
        """Return the largest error in a split of a weighted mean of its parts, relative to its addends."""
        worst, wanted = 0.0, read(self.whole)
        for parts in self.parted:
            used = [(weight, read(part)) for part in parts if (weight := weigh(part))]
            size = math.fsum(abs(weight * value) for weight, value in used)
            if not 0 < size < math.inf:
                return math.inf
            worst = max(worst, abs(math.fsum(weight * (value - wanted) for weight, value in used)) / size)
        return worst

    def _adds_up(self, whole: float, parts: Sequence[float]) -> bool:
        size = math.fsum(map(abs, (whole, *parts)))
        return math.isfinite(size) and abs(math.fsum(parts) - whole) <= self.tolerance * size

    def _are_same(self, one: Addend, other: Addend) -> bool:
        return self._adds_up(one.sum, [other.sum]) and self._adds_up(one.weight, [other.weight])


def candidates(batch: Any, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield what a loss of this batch may have to be divided by, the plainest first.

    Each has words, and Python code that counts it in `micro`, with class weights by their names.
    """
    nest = tree.flatten(batch)
    names = ["micro" + path.replace("the batch itself", "") for path in nest.paths]
    yield "the rows", f"len({names[0]})"
    yield from [(f"the elements of {name}", f"{name}.numel()") for name in names]
    # Targets are counted most often: by their name, or because they come last.
    leaves = list(zip(names, nest.leaves, strict=True))[::-1]
    targets = {form % key for key in TARGET_KEYS for form in ("micro[%r]", "micro.%s")}
    for name, leaf in sorted(leaves, key=lambda one: one[0] not in targets):
        is_class = not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
        is_long = leaf.dim() > 1 and leaf.shape[1] > 1
        for words, code in [(name, name), (f"{name} (shifted by one)", f"{name}[:, 1:]")][: 1 + is_long]:
            if is_class:
                for fill in dict.fromkeys((*_FILLS, *leaf.reshape(-1)[-1:].tolist())):
                    yield f"the entries of {words} that are not {fill}", f"({code} != {fill}).sum()"
                for key in weights:
                    valid = code if int(leaf.min()) >= 0 else f"{code}[{code} >= 0]"
                    yield f"the sum of the class weights {key}[{words}]", f"{key}[{valid}].sum()"
            if not leaf.is_complex() and bool((leaf >= 0).all()):
                yield f"the sum of {words}", f"{code}.sum()"
            yield f"the elements of {words}", f"{code}.numel()"


def held_weights(*holders: Any) -> dict[str, Tensor]:
    """Return real tensors of one axis that functions, modules and objects hold, by name: class weights."""
    found = Reachable(holders)
    tables: list[Any] = [*[scope for scope, _ in found.scopes], *found.containers]
    pairs = [pair for table in tables if isinstance(table, dict) for pair in table.items()]
    names = {id(value): key for key, value in pairs if str(key).isidentifier()}
    tensors = [one for one in found.values if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)]
    weights = {id(one): one for one in reversed(tensors) if one.dim() == 1 and one.is_floating_point()}
    return {names.get(at, "weight"): one.detach().double() for at, one in weights.items()}
