"""The look before the first cut: a few rows in several cuts must give the same loss and gradient."""

import math
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from textwrap import shorten
from typing import NamedTuple

from torch.nn.parameter import is_lazy

from anybatch.core import Batch, LossError, OutOfMemoryError, SampleBatch, TrimmedBatch, cut_sizes, tree
from anybatch.core import torch_private as private
from anybatch.engine import Plan, Task
from anybatch.losses import ModelTerms, Terms, WholeBatch, read_afresh
from anybatch.state import rng
from anybatch.step.choose_rows import choose_rows
from anybatch.step.dry_run import reached_by
from anybatch.step.outcome import Difference, Outcome, Split, differ, only_rows, outcome_of

ROWS = 8
LEAST = 3  # rows of which two parts of several can be made
_LONGEST = 160  # characters of an error that are shown within another
_AGAIN = 4  # times that rows are tried again before they are refused: a hidden coin may fall alike


def error_of(task: Task, batch: Batch, plan: Plan) -> Exception | None:
    """Return the error that two rows raise in forward and backward; None if there is none."""
    rows = min(2, batch.rows)
    with _few_rows(task, batch, rows) as (task, few), suppress(OutOfMemoryError):
        found = outcome_of(task, few, plan, Split((few.rows,)))
        return found if isinstance(found, Exception) else None
    return None


class Doubt(NamedTuple):
    """The reason why a look could not judge; `lasts` where other rows do not help."""

    reason: str
    lasts: bool = False
    is_quiet: bool = False  # nobody is warned


def refuse_what_depends_on_the_cut(task: Task, batch: Batch, plan: Plan, most: int) -> Doubt | None:
    """Compare loss and gradient of a few rows between several cuts, before a batch is cut for the first time.

    At most eight rows, as different as `choose_rows` finds them, are carried out in a few large parts, in
    another number of parts, and in another order. No part has one row where the plan has none. The model is
    in the mode it is in. Dropout gives its expected value. Nothing is updated, and all is put back.
    `anybatch.check` is the whole test, and says where a fault lies.

    Args:
        task: whose loss and model are looked at.
        batch: the rows to choose from.
        plan: how the batch is to be carried out.
        most: rows that are known to fit.

    Returns:
        Why these rows could not tell; None if loss and gradient are the same in all cuts.

    Raises:
        LossError: loss, gradient or weights depend on the cut.
    """
    if task.batch_norms and plan.batch_norm != "frozen":  # else it is refused
        return Doubt('batch_norm="micro" takes the statistics of each micro-batch', lasts=True, is_quiet=True)
    rows = min(batch.rows, ROWS)
    if rows < 2 or any(map(is_lazy, task.everyone)):  # the first forward makes lazy parameters what they are
        return Doubt("the first rows were too few, or parameters lazy")
    least = min(2, *(plan.sizes if plan.is_cut else cut_sizes(batch.rows, most))) if rows > LEAST else 1
    most = min(rows, max(2, most))
    # A loss over all rows may pair them by their places.
    is_mixed = not isinstance(task.loss, WholeBatch)
    doubt = Doubt("memory ran out in a few rows")
    with _few_rows(task, batch, rows) as (task, few):
        for size, small in dict.fromkeys([(most, least), (most, 2), (2, least), (2, 1)]):
            with suppress(OutOfMemoryError):
                doubt = _look(task, few, plan, size, _cuts(few.rows, size, small, is_mixed=is_mixed))
            if doubt is None or doubt.lasts:
                break
    return doubt


def read_rows(
    task: Task, batch: Batch, plan: Plan, fits: Callable[[int], bool], *, check: bool
) -> Doubt | None:
    """Let the reader of a task read micro-batches of a few rows; compare loss and gradient of two cuts.

    The first cut is into two rows each. The micro-batches of the second are the largest that then `fits`.

    Args:
        task: with a reader.
        batch: the rows to choose from, at least four.
        plan: how the batch is to be carried out.
        fits: whether so many rows fit, by what was read so far.
        check: whether the two are compared.

    Returns:
        Why these rows could not tell; None if they could.

    Raises:
        LossError: loss, gradient or weights depend on the cut.
    """
    rows = min(ROWS, batch.rows, max(6, batch.rows // 4))
    is_mixed = not isinstance(task.loss, WholeBatch)
    doubt = Doubt("memory ran out in a few rows")
    with _few_rows(task, batch, rows) as (task, few), suppress(OutOfMemoryError):
        cuts = _pairs_first(rows, fits, is_mixed=is_mixed)
        if check:
            return _look(task, few, plan, 2, cuts)
        for cut in cuts:
            outcome_of(task, few, plan, cut)
    return doubt


def _pairs_first(rows: int, fits: Callable[[int], bool], *, is_mixed: bool) -> Iterator[Split]:
    """Yield pairs of rows, then the largest parts that fit, in another number."""
    pairs = rows // 2
    yield Split(_parts(rows, pairs), is_mixed)
    most = next((size for size in range(-(-5 * rows // 8), 2, -1) if fits(size)), 2)
    count = -(-rows // most)
    yield Split(_parts(rows, count if count != pairs else pairs + 1, most))
    if count == pairs and fits(rows):
        yield Split((rows,))


@contextmanager
def _few_rows(task: Task, batch: Batch, rows: int) -> Generator[tuple[Task, Batch]]:
    """Choose so many rows; afterwards all that a forward reaches is put back."""
    streams = rng.capture_process()  # `collate` may draw
    task, few = only_rows(task, batch, choose_rows(batch)(rows) if rows < batch.rows else range(rows))
    noted = reached_by(task, few)
    try:
        with read_afresh(task.model):
            yield task, few
    finally:
        noted.put_back()
        rng.restore_process(streams)


def _look(task: Task, few: Batch, plan: Plan, most: int, cuts: Iterable[Split]) -> Doubt | None:
    others = iter(cuts)
    first = next(others)
    is_own = isinstance(task.loss, ModelTerms)
    padded = few.padded()
    whole = outcome_of(task, padded, plan, first)
    if isinstance(whole, LossError) and is_own:  # parts of other sizes may show that it is sound
        whole = outcome_of(task, padded, plan, first := next(others))
        if isinstance(whole, LossError):
            raise whole
    if isinstance(whole, Exception):
        return _failed(few, first, whole)
    if not any(whole.report.weights.values()):
        return Doubt("no row that was looked at has weight")
    told, is_small, doubt = False, False, Doubt("there was no other cut to compare with")
    for cut in others:
        parts = outcome_of(task, few, plan, cut, is_watched=not whole.is_quiet)
        if isinstance(parts, Exception) and isinstance(few, TrimmedBatch):
            kept = outcome_of(task, padded, plan, cut)
            if isinstance(kept, Outcome):
                raise LossError(
                    f"Expected {_name(task)} to take rows without their padding, got "
                    f"{_said(parts)}. {_trimmed(task, few, plan, cut, whole)}"
                ) from parts
        if isinstance(parts, LossError) and is_own:  # it is not made in parts as it is as a whole
            raise parts
        if isinstance(parts, Exception):
            doubt = doubt if is_small else _failed(few, cut, parts)
            continue
        found = differ(whole, parts)
        is_random = whole.is_random or parts.is_random
        if isinstance(task.loss, Terms) and (is_random or not found):
            _refuse_weights(task, few, plan, (first, whole), (cut, parts))
        if found and is_random:
            return Doubt("the model or its loss draws random numbers, which are others in every cut", True)
        if found:
            found = _confirmed(task, few, plan, most, (first, whole), (cut, parts))
        if isinstance(found, Doubt):
            return found
        if not told:
            _warn_of_buffers(task, (first, whole), (cut, parts))
        told = True
        if not found:
            continue
        compared = f"got {found.words} for {few.rows} rows as {first} and as {cut}"
        if found.is_small:
            doubt, is_small = Doubt(f"{compared}: more than rounding in {found.dtype}", lasts=True), True
            continue  # another split may show more
        if isinstance(few, TrimmedBatch):
            kept = outcome_of(task, padded, plan, cut)
            if isinstance(kept, Outcome) and not differ(whole, kept):
                raise LossError(
                    f"Expected the same loss and gradient from {_name(task)} with less padding, got "
                    f"{found.words} for {few.rows} rows padded and trimmed. "
                    f"{_trimmed(task, few, plan, cut, whole)}"
                )
        raise LossError(
            f"Expected the same loss and gradient from {_name(task)} for every split, {compared}. "
            f"{_cause(task, few, whole.moved)} "
            "ab.check(model, loss, batch) names the place; Step(check=False) skips this."
        )
    return None if told and not is_small else doubt


def _failed(few: Batch, cut: "Split", error: Exception) -> Doubt:
    return Doubt(f"{few.rows} rows as {cut} gave {_said(error)}")


def _said(error: Exception) -> str:
    """Return the first sentence of an error, shortened at a word, without its end."""
    first = next(iter(str(error).splitlines()), "").partition(". ")[0].rstrip(" .:")
    return f"{type(error).__name__}: {shorten(first, _LONGEST, placeholder=' (...)')}"


Compared = tuple["Split", "Outcome"]


def _confirmed(
    task: Task, few: Batch, plan: Plan, most: int, one: Compared, other: Compared
) -> "Difference | Doubt | None":
    """Return a difference that is there again, and is no rounding of rows that cancel in the sum."""
    padded, (first, whole) = few.padded(), one
    again = [outcome_of(task, padded, plan, first) for _ in range(_AGAIN)]
    places = range(few.rows // 2), range(few.rows // 2, few.rows)
    halves = [only_rows(task, few, half) for half in places]
    alone = [outcome_of(own, half, plan, Split(_sizes(half.rows, [most]))) for own, half in halves]
    if not all(isinstance(each, Outcome) and not differ(whole, each) for each in again):
        return Doubt("the same rows give another loss or gradient the second time", lasts=True)
    return differ(whole, other[1], *[each for each in alone if isinstance(each, Outcome)])


def _refuse_weights(task: Task, few: Batch, plan: Plan, one: Compared, other: Compared) -> None:
    """Refuse terms whose weights do not add up, unless their sums are the same for all rows."""
    (first, whole), (cut, parts) = one, other
    weights, found = whole.report.weights, parts.report.weights
    names = [name for name in weights.keys() & found.keys() if not _is_equal(weights[name], found[name])]
    if not names:
        return
    again = [outcome_of(task, few.padded(), plan, first) for _ in range(_AGAIN)]
    half = outcome_of(task, few.only(range(few.rows // 2)), plan, Split((few.rows // 2,)))
    for name in sorted(names):
        reports = [each.report for each in (*again, half) if isinstance(each, Outcome)]
        if not all(_is_equal(weights[name], each.weights.get(name, 0.0)) for each in reports[:_AGAIN]):
            continue  # they are drawn
        values = [each.terms.get(name, 0.0) for each in (*reports, parts.report)]
        if all(_is_equal(whole.report.terms.get(name, 0.0), value) for value in values):
            continue  # a penalty: the mean of equal numbers
        raise LossError(
            f"Expected weights of {name!r} from {_name(task)} that add up, got {weights[name]:g} for "
            f"{few.rows} rows as {first} and {found[name]:g} as {cut}. Let Total's weight be that of its "
            "rows: their number, or that of valid tokens; for a plain sum, rows / rows of the batch."
        )


def _is_equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5)


def _warn_of_buffers(task: Task, one: Compared, other: Compared) -> None:
    """Warn of buffers whose new value depends on the cut."""
    (first, whole), (cut, parts) = one, other
    pairs = {name: (value, parts.buffers.get(name)) for name, value in whole.buffers.items()}
    wrong = [name for name, (a, b) in pairs.items() if b is None or not math.isclose(a, b, rel_tol=1e-3)]
    wrong = [name for name in wrong if name in task.model.state_dict()]  # others are caches
    if wrong and not (whole.is_random or parts.is_random):
        warnings.warn(
            f"Expected buffers whose values do not depend on the split, got others in {wrong[0]} of "
            f"{_name(task)} as {first} and as {cut}. Loss and gradient are exact; what reads it later "
            "differs from the whole batch. Leave out running statistics, or do not split the batch.",
            stacklevel=2,
        )


def _trimmed(task: Task, few: TrimmedBatch, plan: Plan, cut: Split, whole: Outcome) -> str:
    """Name the trimmed columns, and those that cure the difference if left whole; say what to do."""
    cured: list[str] = []
    for column in dict.fromkeys(map(tree.column, few.trimmed)):
        with suppress(OutOfMemoryError):
            found = outcome_of(task, few.keeping(column), plan, cut)
            cured += [column] if isinstance(found, Outcome) and not differ(whole, found) else []
    trimmed = 'order="length" trimmed ' + ", ".join([f"batch{path}" for path in few.trimmed])
    keep = f"order=anybatch.step.ByLength(keep=({', '.join(cured) or '...'},))"
    if cured:
        return (
            f"{trimmed}; with column {' or '.join(cured)} left whole the result is right. If it does not run "
            f"along the length, pass {keep}; else mask its padding, or leave order out."
        )
    return (
        f"{trimmed}, where padded places must not count: no mean over them, no position that counts them, no "
        f"attention to them, no labels there. Mask them, keep columns without places whole by {keep}, or "
        "leave order out; ab.check(model, loss, batch) names the place, Step(check=False) skips this."
    )


def _cuts(rows: int, most: int, least: int, *, is_mixed: bool) -> Iterator[Split]:
    """Yield the reference, then another number of unequal parts, then parts in another order."""
    count = -(-rows // most)
    more = count + 1 if (count + 1) * least <= rows else max(1, count - 1)
    plain = [*_sizes(rows, [most])]
    if plain[-1] < least:  # no part of one row where the plan has none
        plain[-2:] = [plain[-2] - 1, plain[-1] + 1]
    yield Split(tuple(plain))
    yield Split(_in_turn(_parts(rows, more, most if more > count else rows, least)))
    yield Split(_parts(rows, rows // 2 if count == 1 else count, most, least), is_mixed)


def _parts(rows: int, count: int, most: int = ROWS, least: int = 1) -> tuple[int, ...]:
    """Divide rows into so many parts, unequal ones where sizes from `least` to `most` allow that."""
    small, more = divmod(rows, count)
    sizes = [small + 1] * more + [small] * (count - more)
    if count > 1 and not more and least < small < most:
        sizes[0], sizes[-1] = small + 1, small - 1
    return tuple(sizes)


def _in_turn(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return large and small parts in turn, so that other rows come together."""
    places = range(len(sizes))
    return tuple([sizes[-1 - place // 2] if place % 2 else sizes[place // 2] for place in places])


def _sizes(rows: int, pattern: Sequence[int]) -> tuple[int, ...]:
    """Sizes that repeat a pattern, until all rows are taken."""
    sizes: list[int] = []
    while left := rows - sum(sizes):
        sizes.append(min(left, pattern[len(sizes) % len(pattern)]))
    return tuple(sizes)


def _cause(task: Task, few: Batch, moved: str) -> str:
    """What most probably makes the difference, and what to do."""
    if moved:
        return f"The forward changes {moved!r}, and later forwards may compute with it."
    likely = "Rows affect each other (batch_first, broadcasting, pairs: see ab.WholeBatch), "
    if isinstance(few, SampleBatch):
        likely += "padded places of `collate` count, "
    if hooked := [name for p, name in task.names().items() if private.hooks_of_tensor(p)[0]]:
        likely += f"a hook on {hooked[0]!r} changes the gradient of each micro-batch, "
    return f"{likely}or a Total's weight is not its divisor."


def _name(task: Task) -> str:
    called = task.loss.function if isinstance(task.loss, Terms) else task.model
    return getattr(called, "__name__", type(called).__name__)
