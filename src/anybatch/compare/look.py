"""The look before the first cut: a few rows in several splits must give the same loss and gradient"""

import math
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, islice, product
from textwrap import shorten
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch import core
from anybatch.compare.choose_rows import ROWS, choose_rows, numbered_anew
from anybatch.compare.covers import Covers, Doubt
from anybatch.compare.outcome import Difference, Looked, Split, differ, distance, outcome_of
from anybatch.core import torch_private as private, tree
from anybatch.engine import Plan, Restart, Task, Window, context
from anybatch.losses import Additive, ModelTerms, Terms, WholeBatch, function_of
from anybatch.state import ObjectState, Replayed, rng

LEAST = 3  # the fewest rows with an uneven split
_READ = 6  # rows in which micro-batches of one to four rows are read
_SHARE = 8  # rows that are read before the first cut: at most one of so many
_LONGEST = 160  # characters of an error that are shown within another
_FARTHER = 2.0**4  # between two provisional divisors
_NEAR = 8  # times the effect of one rounding of all weights
_MUCH = 2**30  # bytes of rows on the host, if all results of their forward were kept
_AGAIN = 4  # repetitions before a refusal: hidden random numbers may be equal by chance

_DRAWS = Doubt("the model or its loss draws random numbers, which are others in every cut", lasts=True)


def refuse_what_depends_on_the_cut(
    task: Task,
    batch: core.Batch,
    plan: Plan,
    most: int,
    covers: Covers,
    *,
    is_late: bool = False,
) -> Doubt | None:
    """Compare loss and gradient of a few rows between several cuts.

    At most eight rows, as different as `choose_rows` finds them, run as one part, without the plan's
    recomputation, if memory allows; and in parts as small as the plan's, in another order. If the gradient is
    divided last, as in a window (`is_late`), the parts start from another provisional divisor. Dropout gives
    its expected value, other random numbers are replayed, and everything is put back. Return the reason why
    these rows could not tell, or None.

    Raises:
        LossError: loss, gradient or weights depend on the split.
    """
    rows = min(batch.rows, ROWS)
    if (excuse := excuse_of(task, plan)) or rows < 2:
        return excuse or Doubt("the first rows were too few")
    smallest = min(rows // 2, *(plan.sizes if plan.is_cut else core.cut_sizes(batch.rows, most)))
    smallest = smallest if covers.has_held else min(smallest, 2)  # more parts show a small fault better
    least = min(2, smallest) if rows > LEAST else 1
    most = min(rows, max(2, most))
    # A loss over all rows may pair rows by their places.
    is_mixed = not isinstance(task.loss, WholeBatch)
    doubt = Doubt("memory ran out in a few rows")
    with suppress(core.OutOfMemoryError), bench(task, batch, rows, covers) as (few, noted):
        largest = rows if _fits(task, few, plan, most, noted) else most
        tries = dict.fromkeys([(largest, least), (most, least), (most, 2), (2, least), (2, 1)])
        bare = dict.fromkeys([replace(plan, blocks=()), plan])  # memory may need the blocks
        for kept, (size, small) in product(bare, tries):
            with suppress(core.OutOfMemoryError):
                cuts = _cuts(few.rows, size, small, max(small, smallest), is_mixed=is_mixed)
                cuts = islice(cuts, 0, None, 2) if covers.has_held else cuts
                guess = _guess(task, plan) if is_late or _divides_last(task, plan) else 0.0
                draws = Replayed(without_dropout=True)
                doubt = _FewRows(task, few, plan, kept, guess, draws, noted).compare(size, cuts)
            if doubt is None or doubt.lasts:
                return doubt
    return doubt


def excuse_of(task: Task, plan: Plan) -> Doubt | None:
    """Return the reason why no cuts are compared, whatever the rows; None if there is none."""
    if task.network.batch_norms and plan.batch_norm != "frozen":
        return Doubt('batch_norm="micro" takes the statistics of each micro-batch', lasts=True, is_quiet=True)
    is_new = any(map(is_lazy, task.network.everyone))  # the first forward makes the parameters
    return Doubt("parameters are lazy", is_quiet=True) if is_new else None


def _fits(task: Task, few: core.Batch, plan: Plan, most: int, noted: ObjectState) -> bool:
    """Return False if all rows as one part may take much more than the plan's parts, on the host.

    There lack of memory ends the process.
    """
    if few.rows <= most or task.network.kinds - {"cpu"}:
        return True
    part = outcome_of(task, only(task, few, range(most)), plan, Split((most,)), reached=tensors_of(noted))
    return not isinstance(part, Looked) or part.nbytes * few.rows // most < _MUCH


def _divides_last(task: Task, plan: Plan) -> bool:
    is_unknown = isinstance(task.loss, Terms) and task.loss.weight is None
    return is_unknown or task.strategy.is_many or plan.non_finite == "drop"


def _guess(task: Task, plan: Plan) -> float:
    """Return the factor of the provisional divisor: a power of two, which changes no digit."""
    is_short = plan.precision.loss_scale is not None or any(
        p.dtype == torch.float16 for p in task.network.parameters
    )
    return 1 / _FARTHER if is_short else _FARTHER  # smaller gradients have fewer digits in float16


def read_rows(
    task: Task, batch: core.Batch, plan: Plan, fits: Callable[[int], bool], covers: Covers | None
) -> Doubt | None:
    """Show micro-batches of a few rows to the reader of a task; compare loss and gradient of two splits.

    The first split has two rows in each part. The parts of the second are the largest that then `fits`, by
    the readings so far. Then 32, 128, 512 rows run, as long as they fit and are few beside the batch. Without
    `covers` nothing is compared. Return the reason why these rows could not tell; None if they could.

    Raises:
        LossError: loss, gradient or weights depend on the split.
    """
    rows = min(_READ, batch.rows)
    is_mixed = not isinstance(task.loss, WholeBatch)
    if task.strategy.is_lockstep:
        rehearse(task, batch, plan, (2, 2, 2) if batch.rows >= 2 * LEAST else (1,) * min(LEAST, batch.rows))
        size = 4
        while 2 + size <= batch.rows and size <= max(ROWS, batch.rows // _SHARE) and fits(size):
            rehearse(task, batch, plan, (2, size))
            size *= 4
        return None
    doubt: Doubt | None = Doubt("memory ran out in a few rows")
    with suppress(core.OutOfMemoryError), bench(task, batch, rows, covers) as (few, noted):
        cuts = _pairs_first(rows, fits, is_mixed=is_mixed)
        if covers is not None:
            guess = _guess(task, plan) if _divides_last(task, plan) else 0.0
            draws = Replayed(without_dropout=True)
            looked = _FewRows(task, few, plan, plan, guess, draws, noted)
            doubt = looked.compare(2, cuts)
            if doubt is _DRAWS and fits(rows):  # all rows at once tell which numbers are whose
                doubt = looked.compare(rows, [Split((rows,)), Split(_parts(rows, rows // 2), is_mixed)])
        else:
            for cut in cuts:
                outcome_of(task, few, plan, cut, reached=tensors_of(noted), is_watched=False)
    size = 4 * ROWS
    while is_mixed and size <= batch.rows // _SHARE and fits(size):
        run_parts(task, batch, plan, (2, size))
        size *= 4
    return doubt


def run_parts(task: Task, batch: core.Batch, plan: Plan, sizes: tuple[int, ...]) -> None:
    """Run micro-batches of these sizes, of a few rows of the batch, and put all back; errors are left out."""
    with suppress(core.OutOfMemoryError), bench(task, batch, sum(sizes)) as (few, noted):
        outcome_of(task, few, plan, Split(sizes), reached=tensors_of(noted), is_watched=False)


def rehearse(task: Task, batch: core.Batch, plan: Plan, sizes: tuple[int, ...]) -> None:
    """Run micro-batches of these sizes together with all ranks, and put back what they change.

    The next `open` tells ranks that take it for a part of their step to begin again.
    """
    task.strategy.spare(0.0)
    task, few = replace(task.aside(), strategy=task.strategy), batch.only(range(sum(sizes)))
    plan = replace(plan, rows=few.rows, micro_batch=max(sizes), cut=sizes)
    with rng.preserved(), context(plan, task):
        window = Window(task, plan, few)
        try:
            again = Restart(window.add_rows(plan, few, is_dry=True), sizes)
        except BaseException as error:
            window.discard(error)
            raise
        window.discard(again)


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
def bench(
    task: Task, batch: core.Batch, rows: int, covers: Covers | None = None
) -> Generator[tuple[core.Batch, ObjectState]]:
    """Yield some rows of a batch, and what a run on them reaches; put everything back.

    Raises:
        OutOfMemoryError: the rows did not fit.
    """
    with rng.preserved():  # `collate` may draw
        try:
            few = only(task, batch, choose_rows(batch)(rows)) if rows < batch.rows else batch
            noted = reached_by(task, few)
            if covers is not None:
                covers.add(noted.found)
        except Exception as error:
            if not core.ran_out_of_memory(error):
                raise
            raise core.OutOfMemoryError(core.released(error)) from None  # to look at rows takes memory, too
        try:
            yield few, noted
        finally:
            noted.put_back()


def only(task: Task, batch: core.Batch, rows: Sequence[int]) -> core.Batch:
    """Return some rows; with a loss over all rows, columns of row numbers number these."""
    few = batch.only(rows)
    return numbered_anew(few, batch) if isinstance(task.loss, WholeBatch) else few


def reached_by(task: Task, batch: core.Batch) -> ObjectState:
    """Note all that a run reaches, but for the task's parameters and buffers, which a step puts back."""
    loss = task.loss.call if isinstance(task.loss, ModelTerms) else task.loss  # which counts rows of a step
    known = [
        *task.network.everyone,
        *chain.from_iterable(m.buffers(recurse=False) for m in task.network.modules),
    ]
    roots = [task.model, loss, *task.network.modules, getattr(batch, "collate", None)]
    return ObjectState(roots, but_for=known)


def tensors_of(noted: ObjectState) -> list[Tensor]:
    """Return the tensors that a run reaches; subclasses may have no memory of their own."""
    return [one for one in noted.found.values if type(one) in (Tensor, nn.Parameter)]


class _FewRows(NamedTuple):
    task: Task
    few: core.Batch
    plan: Plan
    kept: Plan  # of the first cut
    guess: float  # the factor of the provisional divisor of the other cuts; 0 if they divide early
    draws: Replayed  # the random numbers of the first cut
    noted: ObjectState  # reached by model and loss
    disturbed: Sequence[Tensor] = ()  # those with other values meanwhile

    def run(self, cut: Split, *, is_first: bool = True, is_watched: bool = True) -> Looked | Exception:
        few = self.few.padded() if is_first else self.few
        task = self.task if is_first else replace(self.task, guess=self.guess)
        plan = self.kept if is_first else self.plan
        kept = {"reached": tensors_of(self.noted), "disturbed": self.disturbed}
        return outcome_of(task, few, plan, cut, is_watched=is_watched, like=self.draws, **kept)

    def part(self, few: core.Batch, cut: Split) -> Looked | Exception:
        return outcome_of(self.task, few, self.plan, cut, reached=tensors_of(self.noted))

    def compare(self, most: int, cuts: Iterable[Split]) -> Doubt | None:
        others = iter(cuts)
        is_own = isinstance(self.task.loss, ModelTerms)
        whole = self.run(first := next(others))
        if isinstance(whole, core.LossError) and is_own:  # parts of other sizes may show that it is sound
            whole = self.run(first := next(others))
            if isinstance(whole, core.LossError):
                raise whole
        if isinstance(whole, Exception):
            return self._failed(first, whole)
        if not whole.is_weighed:
            return Doubt("no row that was looked at has weight")
        vectors = {one for one in self.task.model.buffers() if one.dim() == 1}  # spectral_norm's converge
        moved = [one for one in whole.written if one.is_floating_point() and one not in vectors]
        other = self._replace(disturbed=moved)
        if moved and isinstance(again := other.run(first), Looked):  # a teacher may still be its student
            return other._compare(again, most, others)
        return self._compare(whole, most, others)

    def _compare(self, whole: Looked, most: int, others: Iterator[Split]) -> Doubt | None:
        is_own = isinstance(self.task.loss, ModelTerms)
        told, is_small, doubt = False, False, Doubt("there was no other cut to compare with")
        for cut in others:
            parts = self.run(cut, is_first=False, is_watched=not whole.is_quiet)
            if isinstance(parts, Exception):
                self._refuse_failed_trim(parts, cut, whole)
                if isinstance(parts, core.LossError) and is_own:  # the loss has another form in parts
                    raise parts
                doubt = doubt if is_small else self._failed(cut, parts)
                continue
            found = differ(whole, parts)
            is_random = whole.is_random or parts.is_random
            if isinstance(self.task.loss, Terms) and (is_random or not found):
                self._refuse_weights(whole, parts)
            if found and is_random:
                return _DRAWS
            if found:
                found = self._confirmed(most, whole, parts)
            if isinstance(found, Doubt):
                return found
            if not told and found is None:
                self._warn_of_buffers(whole, parts)
            told = True
            if found and found.is_small:
                said = f"got {found.words} for {self.few.rows} rows as {whole.cut} and as {cut}"
                said += (
                    f" (the forward changes {whole.moved!r}{_of_norm(whole.moved)})" if whole.moved else ""
                )
                doubt, is_small = Doubt(f"{said}: more than rounding in {found.dtype}", lasts=True), True
            elif found:  # else another split may show more
                self._refuse(found, whole, parts)
        return None if told and not is_small else doubt

    def _failed(self, cut: Split, error: Exception) -> Doubt:
        return Doubt(f"{self.few.rows} rows as {cut} gave {_said(error)}")

    def _confirmed(self, most: int, whole: Looked, parts: Looked) -> Difference | Doubt | None:
        """Return a difference that appears again and is not rounding of rows that cancel in the sum."""
        again = [self.run(whole.cut) for _ in range(_AGAIN)]
        if not all(isinstance(each, Looked) and not differ(whole, each) for each in again):
            return Doubt("the same rows give another loss or gradient the second time", lasts=True)
        middle, alone = self.few.rows // 2, list[Looked]()
        for half in (range(middle), range(middle, self.few.rows)):
            few = only(self.task, self.few, half)
            found = self.part(few, Split(tuple(core.cut_sizes(few.rows, most))))
            alone += [found] if isinstance(found, Looked) else []
        found = differ(whole, parts, *alone)
        if found and found.is_small and self._is_of_rounding(whole, parts):
            return None
        return found

    def _is_of_rounding(self, whole: Looked, parts: Looked) -> bool:
        """Return True if weights one rounding away differ as much: activations lie at a kink."""
        weights = [p for p in self.task.network.parameters if p.dtype == torch.float32 and p.numel()]
        near = self._replace(disturbed=weights).run(whole.cut)
        if not isinstance(near, Looked):
            return False
        rounding, found = distance(whole, near), distance(whole, parts)
        loss = _NEAR * (rounding.loss + torch.finfo(torch.float32).eps)
        return found.gradient <= _NEAR * rounding.gradient and found.loss <= loss

    def _refuse(self, found: Difference, whole: Looked, parts: Looked) -> None:
        rows = f"got {found.words} for {self.few.rows} rows"
        kept = self.run(parts.cut) if isinstance(self.few, core.TrimmedBatch) else None
        if isinstance(kept, Looked) and not differ(whole, kept):
            raise core.LossError(
                f"Expected the same loss and gradient from {self._name} with less padding, {rows} padded and "
                f"trimmed. {self._trimmed(parts.cut, whole)}"
            )
        likely = (
            "Rows affect each other (batch_first, broadcasting; a statistic of the batch: compute it before "
            "the step, or see ab.WholeBatch; pairs in two halves: make them two columns), "
        )
        same = self.run(whole.cut, is_first=False)
        if isinstance(same, Looked) and differ(whole, same):
            likely = "A backward is not linear (it clamps, rounds or normalises, as the same cut differs too "
            likely += "with another divisor or recomputation), "
        if isinstance(self.few, core.SampleBatch):
            likely += "padded places of `collate` count, "
        if hooked := [name for p, name in self.task.names().items() if private.hooks_of_tensor(p)[0]]:
            likely += f"a hook on {hooked[0]!r} changes the gradient of each micro-batch, "
        is_sum = isinstance(self.task.loss, Additive)
        likely += "or ab.Additive got a mean." if is_sum else "or a Total's weight is not its divisor."
        if parts.mixes or whole.mixes:
            likely = (
                "It draws random numbers and mixes rows by them (a permutation, negatives of the batch). "
            )
        if whole.moved or self.disturbed:
            named = repr(whole.moved) if whole.moved else self._name_of(self.disturbed[0])
            likely = f"The forward changes {named}, and later forwards may compute with it{_of_norm(named)}."
        advice = "ab.check(model, loss, batch) names the place"
        if self.disturbed:
            advice = "Move it once per update, after the step"
        raise core.LossError(
            f"Expected the same loss and gradient from {self._name} for every split, {rows} as {whole.cut} "
            f"and as {parts.cut}. {likely} {advice}; Options(check=False) skips this."
        )

    def _refuse_failed_trim(self, error: Exception, cut: Split, whole: Looked) -> None:
        """Raise LossError if a model fails on shorter rows, and not on the padded ones."""
        if isinstance(self.few, core.TrimmedBatch) and isinstance(self.run(cut), Looked):
            raise core.LossError(
                f"Expected {self._name} to take rows without their padding, got {_said(error)}. "
                f"{self._trimmed(cut, whole)}"
            ) from error

    def _trimmed(self, cut: Split, whole: Looked) -> str:
        """Name the trimmed columns, and those that cure the difference if left whole; say what to do."""
        assert isinstance(self.few, core.TrimmedBatch)  # noqa: S101 - others are not trimmed
        cured: list[str] = []
        for column in dict.fromkeys(map(tree.column, self.few.trimmed)):
            with suppress(core.OutOfMemoryError):
                found = self.part(self.few.keeping(column), cut)
                cured += [column] if isinstance(found, Looked) and not differ(whole, found) else []
        trimmed = 'order="length" trimmed ' + ", ".join([f"batch{path}" for path in self.few.trimmed])
        keep = f"order=anybatch.step.ByLength(keep=({', '.join(cured) or '...'},))"
        if cured:
            return (
                f"{trimmed}; with column {' or '.join(cured)} left whole the result is right. If it does not "
                f"run along the length, pass {keep}; else mask its padding, or leave order out."
            )
        return (
            f"{trimmed}, where padded places must not count: no mean over them, no position that counts "
            f"them, no attention to them, no labels there. Mask them, keep columns without places whole by "
            f"{keep}, or leave order out; ab.check(model, loss, batch) names the place, Options(check=False) "
            "skips this."
        )

    def _refuse_weights(self, whole: Looked, parts: Looked) -> None:
        """Refuse terms whose weights do not add up, unless their sums are the same for all rows."""
        weights, found = whole.report.weights, parts.report.weights
        names = [name for name in weights.keys() & found.keys() if not _is_equal(weights[name], found[name])]
        if not names:
            return
        again = [self.run(whole.cut) for _ in range(_AGAIN)]
        middle = self.few.rows // 2
        half = self.part(only(self.task, self.few, range(middle)), Split((middle,)))
        for name in sorted(names):
            reports = [each.report for each in (*again, half) if isinstance(each, Looked)]
            if not all(_is_equal(weights[name], each.weights.get(name, 0.0)) for each in reports[:_AGAIN]):
                continue  # the weights are random
            values = [each.terms.get(name, 0.0) for each in (*reports, parts.report)]
            if all(_is_equal(whole.report.terms.get(name, 0.0), value) for value in values):
                continue  # a penalty, the same for all rows
            raise core.LossError(
                f"Expected weights of {name!r} from {self._name} that add up, got {weights[name]:g} for "
                f"{self.few.rows} rows as {whole.cut} and {found[name]:g} as {parts.cut}. Let Total's weight "
                "be that of its rows: their number, or that of valid tokens; for a plain sum, rows / rows of "
                "the batch."
            )

    def _warn_of_buffers(self, whole: Looked, parts: Looked) -> None:
        saved = self.task.model.state_dict()
        wrong = [
            name
            for name, value in whole.buffers.items()
            if name in saved and not math.isclose(value, parts.buffers.get(name, math.nan), rel_tol=1e-3)
        ]
        if wrong and not (whole.is_random or parts.is_random):
            warnings.warn(
                "Expected buffers whose values do not depend on the split, got others in "
                f"{wrong[0]} of {self._name} as {whole.cut} and as {parts.cut}. Loss and gradient are exact; "
                "what reads it later differs from the whole batch. Leave out running statistics, or do not "
                "split the batch.",
                stacklevel=2,
            )

    def _name_of(self, tensor: Tensor) -> str:
        """Return the key under which a dict or an object holds a tensor, and its shape."""
        tables = [one for one in self.noted.found.containers if isinstance(one, dict)]
        names = [repr(key) for table in tables for key, one in table.items() if one is tensor]
        return ", ".join([*names[:1], f"a tensor of shape {tuple(tensor.shape)} that model or loss hold"])

    @property
    def _name(self) -> str:
        loss = self.task.loss
        called = function_of(loss) if isinstance(loss, Terms | Additive) else self.task.model
        return getattr(called, "__name__", type(called).__name__)


def _said(error: Exception) -> str:
    """Return the first sentence of an error, shortened at a word, without its end."""
    first = next(iter(str(error).splitlines()), "").partition(". ")[0].rstrip(" .:")
    return f"{type(error).__name__}: {shorten(first, _LONGEST, placeholder=' (...)')}"


def _is_equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5)


def _cuts(rows: int, most: int, least: int, smallest: int, *, is_mixed: bool) -> Iterator[Split]:
    """Yield the reference, then another number of unequal parts, then smallest parts in another order."""
    count = -(-rows // most)
    more = count + 1 if (count + 1) * least <= rows else max(1, count - 1)
    plain = core.cut_sizes(rows, most)
    if plain[-1] < least:  # no single row unless the plan has one
        plain[-2:] = [plain[-2] - 1, plain[-1] + 1]
    yield Split(tuple(plain))
    yield Split(_in_turn(_parts(rows, more, most if more > count else rows, least)))
    yield Split(_parts(rows, -(-rows // smallest) if count == 1 else count, most, least), is_mixed)


def _parts(rows: int, count: int, most: int = ROWS, least: int = 1) -> tuple[int, ...]:
    """Divide rows into so many parts, unequal ones if sizes from `least` to `most` allow that."""
    small, more = divmod(rows, count)
    sizes = [small + 1] * more + [small] * (count - more)
    if count > 1 and not more and least < small < most:
        sizes[0], sizes[-1] = small + 1, small - 1
    return tuple(sizes)


def _in_turn(sizes: Sequence[int]) -> tuple[int, ...]:
    places = range(len(sizes))
    return tuple([sizes[-1 - place // 2] if place % 2 else sizes[place // 2] for place in places])


def _of_norm(moved: str) -> str:
    is_iterated = moved.endswith(("_u'", "_v'"))  # by spectral_norm
    advice = ": a power iteration. Keep spectral_norm in eval(), iterate once per update (docs/callbacks.md)"
    return advice if is_iterated else ""
