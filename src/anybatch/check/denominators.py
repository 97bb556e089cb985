"""By what a term is divided: one of the candidates, or whatever weighs the rows so that all cuts agree."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from anybatch.check.outputs import Evaluation
from anybatch.check.rows import find_axis, take
from anybatch.check.weights import Candidate

Reading = Callable[[Evaluation], float]
Values = Callable[[Sequence[Sequence[int]]], Sequence[float]]  # of some groups of rows

_EXACT = 1e-13  # float64 on few terms
_EPSILON = 1e-4  # what an epsilon in a denominator may leave of an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A denominator that makes whole and parts agree.

    Attributes:
        words: what it counts.
        code: how it is counted, of a micro-batch called `micro`.
        is_near: whether something small is left, as an epsilon leaves it.
    """

    words: str
    code: str
    is_near: bool


def fit(
    options: Iterable[Candidate],
    readings: Sequence[Reading],
    whole: Evaluation,
    parted: Sequence[Sequence[Evaluation]],
    *,
    tolerance: float,
    error: float,
) -> Fit | None:
    """The candidate that makes the whole's value the weighted mean of its parts' in every cut.

    Args:
        options: candidates.
        readings: what may be the mean of a micro-batch.
        whole: all rows.
        parted: the micro-batches of each cut.
        tolerance: relative error that counts as rounding.
        error: that of the weights that the term has now.
    """
    found = [
        (min(max(_misfit_of(one, read, whole, parts) for parts in parted) for read in readings), one)
        for one in options
    ]
    best = min((misfit for misfit, _ in found), default=math.inf)
    # Means of single terms lose less than gradients.
    if not parted or best > max(tolerance / 10, _EPSILON * min(error, 1.0)):
        return None
    # The first of those that fit as well as the best: in float32, and early in training when all tokens
    # cost about the same, wrong ones come close too.
    first = next(one for misfit, one in found if misfit <= max(10 * best, _EXACT))
    return Fit(words=first.words, code=first.code, is_near=best > tolerance / 10)


def misfit(weights: Sequence[float], values: Sequence[float], wanted: float) -> float:
    """How far a weighted mean is from what it should be, relative to what is added up.

    Example:
        >>> misfit([1, 3], [2.0, 4.0], 3.5), misfit([1, 1], [2.0, 4.0], 4.0)
        (0.0, 0.3333333333333333)
    """
    used = [(weight, value) for weight, value in zip(weights, values, strict=True) if weight]
    total = math.fsum(weight for weight, _ in used)
    size = math.fsum(abs(weight * value) for weight, value in used)
    if not total or not size or not math.isfinite(size):
        return math.inf
    return abs(math.fsum(weight * value for weight, value in used) - total * wanted) / size


def _misfit_of(candidate: Candidate, read: Reading, whole: Evaluation, parts: Sequence[Evaluation]) -> float:
    try:
        weights = [candidate.count(part.leaves) for part in parts]
    except (RuntimeError, IndexError):
        return math.inf
    return misfit(weights, [read(part) for part in parts], read(whole))


def row_weights(values: Values, rows: int) -> tuple[list[float], list[float]] | None:
    """What each row weighs in a mean, and its value, if it is a mean.

    A mean of parts that add up gives its weights away: two rows by themselves and together have
    `w_j / w_i = (m_ij - m_i) / (m_j - m_ij)`.

    Args:
        values: gives the mean of each of some groups of rows.
        rows: how many there are.

    Returns:
        Weights, of which the least is 1, and values; None where it is no mean, or all rows are alike.

    Example:
        >>> def mean(rows):
        ...     return sum(row * (row + 1) for row in rows) / sum(row + 1 for row in rows)
        >>> def values(groups):
        ...     return [mean(rows) for rows in groups]
        >>> [round(weight, 9) for weight in row_weights(values, 3)[0]]
        [1.0, 2.0, 3.0]
    """
    alone = list(values([[row] for row in range(rows)]))
    known = [row for row in range(rows) if math.isfinite(alone[row])]
    if not known:
        return None
    base = max(known, key=lambda row: abs(alone[row]))
    weights = {base: 1.0}
    far = base
    for row in sorted(known, key=lambda row: -abs(alone[row] - alone[base])):
        if alone[row] == alone[base]:
            return None
        weights[row] = _ratio(values, alone, base, row)
        if weights[row]:
            far = row
            break
    rest = [row for row in range(rows) if row not in weights]
    # Whoever is the farther of the two tells the weight best.
    peers = [max((base, far), key=lambda peer: _gap(alone, peer, row)) for row in rest]
    pairs = values([sorted(pair) for pair in zip(peers, rest, strict=True)]) if rest else []
    for row, peer, both in zip(rest, peers, pairs, strict=True):
        weights[row] = weights[peer] * _weight(alone[peer], alone[row], both)
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights.values()):
        return None
    least = min(weight for weight in weights.values() if weight)
    return [weights[row] / least for row in range(rows)], alone


def _gap(alone: Sequence[float], one: int, other: int) -> float:
    gap = abs(alone[one] - alone[other])
    return gap if math.isfinite(gap) else 0.0


def _ratio(values: Values, alone: Sequence[float], peer: int, row: int) -> float:
    return _weight(alone[peer], alone[row], values([sorted((peer, row))])[0])


def _weight(peer: float, row: float, both: float) -> float:
    """Of a row, where its peer weighs 1."""
    if not math.isfinite(row) or row == both:
        return 0.0 if abs(both - peer) <= _EXACT * abs(peer) else math.nan
    weight = (both - peer) / (row - both)
    return 0.0 if abs(weight) < _EXACT else weight


def in_words(weights: Sequence[float]) -> str:
    """Weights up to a factor: as integers where that is possible.

    Example:
        >>> in_words([1.0, 2.5, 1.5]), in_words([1.0, 3.14159])
        ('2, 5, 3', '1, 3.142')
    """
    for factor in range(1, 13):
        scaled = [factor * weight for weight in weights]
        if all(abs(value - round(value)) <= 1e-4 for value in scaled):
            return ", ".join(str(round(value)) for value in scaled)
    return ", ".join(f"{weight:.4g}" for weight in weights)


def pulls_add_up(
    name: str,
    whole: Evaluation,
    parts: Sequence[Evaluation],
    scales: Sequence[float],
    tolerance: float,
) -> bool:
    """The gradient of a sum is, row by row, that of the parts' sums, times something for each of them."""
    difference = size = 0.0
    for index, wanted in enumerate(whole.pulled[name]):
        if any(len(part.pulled[name]) != len(whole.pulled[name]) for part in parts):
            return True  # outputs that cannot be told apart
        pieces = [part.pulled[name][index] * scale for part, scale in zip(parts, scales, strict=True)]
        shares = [take(wanted, p.shape, part.part) for p, part in zip(pieces, parts, strict=True)]
        if any(share is None for share in shares):
            continue
        if all(piece.shape == wanted.shape for piece in pieces):  # one value for all rows
            pairs = [(sum(pieces[1:], start=pieces[0]), wanted)]
        else:
            pairs = [(p, s) for p, s in zip(pieces, shares, strict=True) if s is not None]
        difference += sum((a - b).square().sum().item() for a, b in pairs)
        size += sum(a.square().sum().item() + b.square().sum().item() for a, b in pairs)
    return difference**0.5 <= tolerance * size**0.5


def left_out(name: str, whole: Evaluation, parted: Sequence[Sequence[Evaluation]]) -> list[int]:
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
