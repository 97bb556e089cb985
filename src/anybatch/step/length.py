"""Rows in the order of their lengths, cut by tokens, so that each micro-batch is as short as its rows."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from anybatch import core
from anybatch.core import tree
from anybatch.engine import Plan, Task
from anybatch.losses import WholeBatch, find_paddings
from anybatch.planner import PlanReport


@dataclass(frozen=True, slots=True)
class ByLength:
    """The order "length", with columns that do not run along the length.

    Args:
        keep: columns of the batch that are not trimmed, and not read for lengths: keys of a mapping,
            positions in a tuple, fields of a dataclass.

    Example:
        >>> ByLength(keep=("features",))
        ByLength(keep=('features',))
    """

    keep: tuple[str | int, ...] = ()


Order = Literal["length"] | ByLength

_WHERE = (
    "an `attention_mask`, the padding token of the model (its `config.pad_token_id`, or `padding_idx` of an "
    "embedding), or samples with a `collate`"
)


class Ordered(NamedTuple):
    """A batch whose rows may be in another order, and what each row needs."""

    batch: core.Batch
    # at each place, tokens of the longest row from there on; empty where rows are cut as they come
    needs: Sequence[int] = ()

    def cut(self, plan: Plan, *, is_asked: bool) -> Plan:
        """Return the plan with parts of at most as many tokens as its own have in rows of the longest.

        Where these have one size, tokens are spread evenly over as few parts as there can be. Unless
        `is_asked` for its size, a batch that fits whole is cut all the same: in one part all is padded.
        """
        if not self.needs:
            return plan
        if not (plan.is_cut or is_asked):
            plan = replace(plan, micro_batch=-(-plan.rows // _PARTS))
        longest = self.needs[0]
        most = [size * longest for size in plan.cut or (plan.micro_batch,)]
        sizes = _sizes(self.needs, most) if plan.cut else _even(self.needs, most[0])
        return replace(plan, micro_batch=max(sizes), cut=sizes)

    def failed(self, plan: Plan, report: core.StepReport) -> int:
        """Return the rows of the batch's longest in which memory ran out; 0 for none.

        Args:
            plan: before it was cut by tokens.
            report: what came of it.
        """
        if not (self.needs and report.too_large):
            return report.too_large
        starts = accumulate(report.cut[:-1], initial=0)
        done = max(size * self.needs[start] for size, start in zip(report.cut, starts, strict=True))
        return max(1, min(plan.micro_batch, -(-2 * done // self.needs[0])))  # parts were halved


_PARTS = 8  # of a batch of uneven rows, if nothing else cuts it


def check_order(order: object, batch_norm: str | None) -> None:
    """Refuse an order that there is not, or under which the result depends on the lengths (PlanError)."""
    if not (isinstance(order, ByLength) or order in (None, "length")):
        raise core.PlanError(
            f'Expected order to be "length", ByLength(...) or None, got {order!r}. Leave it out for none.'
        )
    if order and batch_norm == "micro":
        raise core.PlanError(
            f'Expected no batch_norm="micro" with order={order!r}, got both: the statistics of a micro-batch '
            'would depend on the lengths of its rows. Use batch_norm="frozen", or leave order out.'
        )


def in_order(order: Order, task: Task, batch: core.Batch) -> Ordered:
    """Return the batch in this order, the longest rows first, which need most memory.

    Raises:
        BatchError: the lengths of rows cannot be told.
        LossError: the loss belongs to rows in their own order.
    """
    if batch.rows == 1:
        return Ordered(batch)
    if isinstance(task.loss, WholeBatch):
        what = f"{task.loss.name}, which sees rows by their places in the batch"
        raise core.LossError(
            f'Expected a loss of single rows with order="length", got {what}. Leave order out, or put what '
            "belongs to a row into the batch."
        )
    are_samples = isinstance(batch, core.SampleBatch)
    keep = order.keep if isinstance(order, ByLength) else ()
    known = [*map(tree.column, tree.flatten(batch.whole).paths)] if keep else []
    if unknown := [name for name in keep if repr(name) not in known]:
        raise core.BatchError(
            f"Expected ByLength(keep=...) to name columns of the batch ({', '.join(known)}), got "
            f"{unknown[0]!r}. Name keys, positions or fields; with a collate leave keep out."
        )
    paddings = [] if are_samples else [*find_paddings(batch.whole, task.model, keep)]
    kinds = [_lengths_of_samples(batch)] if are_samples else [one.valid for one in paddings]
    if not kinds:
        raise core.BatchError(
            f'Expected rows whose lengths can be told with order="length", by {_WHERE}, got tensors without. '
            "Add a mask, or leave order out."
        )
    rows = sorted(range(batch.rows), key=lambda row: -sum(lengths[row] for lengths in kinds))
    # From the end: the longest of the rows that are still to come, of encoder and decoder each.
    longest = [accumulate([lengths[row] for row in reversed(rows)], max, initial=1) for lengths in kinds]
    needs = [sum(one) for one in zip(*longest, strict=True)][:0:-1]
    if are_samples:
        return Ordered(core.SampleBatch(batch.given, batch.collate, rows), needs)
    return Ordered(core.TrimmedBatch(batch.whole, paddings, rows), needs)


def noted(order: Order | None, report: PlanReport) -> PlanReport:
    """Return a plan that says that it is not for rows in this order."""
    note = f"order={order!r} cuts by tokens; this is for rows as they come"
    return replace(report, notes=(*report.notes, note)) if order else report


def _sizes(needs: Sequence[int], most: Sequence[int]) -> tuple[int, ...]:
    """Rows of each part, of at most so many tokens, at least one row; the last limit holds for the rest."""
    sizes: list[int] = []
    start = 0
    while start < len(needs):
        limit = most[min(len(sizes), len(most) - 1)]
        sizes.append(min(len(needs) - start, max(1, limit // needs[start])))
        start += sizes[-1]
    return tuple(sizes)


def _even(needs: Sequence[int], most: int) -> tuple[int, ...]:
    """Return as few parts as there can be, and of these the smallest."""
    fewest = len(_sizes(needs, [most]))
    least = bisect_left(range(most), True, lo=1, key=lambda limit: len(_sizes(needs, [limit])) <= fewest)
    return _sizes(needs, [least])


def _lengths_of_samples(batch: core.SampleBatch) -> list[int]:
    """Return the longest axis of each sample, of those that are not the same in all of them."""
    found = [dict(_axes_of(batch.given[row])) for row in range(batch.rows)]
    places = dict.fromkeys(place for one in found for place in one)
    if not places:
        raise core.BatchError(
            f'Expected samples whose lengths can be told with order="length" (tensors, lists, strings, or '
            f"tuples and mappings of them), got {type(batch.given[0]).__name__}. Leave order out."
        )
    varying = [place for place in places if len({one.get(place, 0) for one in found}) > 1]
    return [max(1, *[one.get(place, 0) for place in varying or places]) for one in found]


def _axes_of(sample: Any) -> list[tuple[tuple[Any, int], int]]:
    """Return the sizes of a sample by entry and axis."""
    entries: Mapping[Any, Any] = sample if isinstance(sample, Mapping) else {"": sample}
    if tree.is_sequence(sample):
        is_row = isinstance(sample, list) and all(isinstance(one, int | float) for one in sample[:1])
        entries = entries if is_row else dict(enumerate(sample))
    found: list[tuple[tuple[Any, int], int]] = []
    for name, entry in entries.items():
        has_length = isinstance(entry, tuple | list | str | bytes)
        shape = (len(entry),) if has_length else getattr(entry, "shape", ())
        found += [((name, axis), int(size)) for axis, size in enumerate(shape)]
    return found
