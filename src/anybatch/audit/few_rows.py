"""A few rows, in several cuts: they must give the same loss and gradient"""

import math
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from anybatch import core
from anybatch.audit import say
from anybatch.audit.known import Doubt, KnownKind
from anybatch.audit.outputs import Axes, Heard, axes_of, joined, returning
from anybatch.core import torch_private as private
from anybatch.engine import Plan, Restart, Task, Window, context
from anybatch.losses import ModelTerms, Terms, WholeBatch
from anybatch.state import rng
from anybatch.trial import (
    ROWS,
    Bench,
    Difference,
    Looked,
    Place,
    Replayed,
    Split,
    bench,
    differ,
    distance,
    losses_differ,
    outcome_of,
)

LEAST = 3  # the fewest rows with an uneven split
_READ = 6  # rows in which micro-batches of one to four rows are read
_SHARE = 8  # rows that are read before the first cut: at most one of so many
_FARTHER = 2.0**4  # between two provisional divisors
_NEAR = 8  # times the effect of one rounding of all weights
_MUCH = 2**30  # bytes of rows on the host, if all results of their forward were kept
_AGAIN = 4  # repetitions before a refusal: hidden random numbers may be equal by chance

DRAWS = Doubt("the model or its loss draws random numbers, which are others in every cut", lasts=True)


def compare_few(
    task: Task, batch: core.Batch, plan: Plan, most: int, kind: KnownKind, *, is_late: bool = False
) -> Doubt | None:
    """Compare loss and gradient of a few rows between two cuts.

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
        return excuse or Doubt("a single row has no cut to compare", is_quiet=True)
    sizes = plan.sizes if plan.is_cut else core.cut_sizes(batch.rows, most)
    least = 2 if min(rows // 2, *sizes) > 1 and rows > LEAST else 1
    most = min(rows, max(2, most))
    # A loss over all rows may pair rows by their places.
    is_mixed = not isinstance(task.loss, WholeBatch)
    doubt = Doubt("memory ran out in a few rows")
    with suppress(core.OutOfMemoryError), bench(task, batch, rows) as made:
        kind.notes(made.noted.found)
        tries = dict.fromkeys([(rows, least), (most, least), (most, 2), (2, least), (2, 1)])
        bare = dict.fromkeys([replace(plan, blocks=()), plan])  # memory may need the blocks
        for kept, (size, small) in product(bare, tries):
            if size > most and not _fits(made, plan, most, kind):
                continue
            with suppress(core.OutOfMemoryError):
                guess, draws = _guess(task, plan, is_late=is_late), Replayed(without_dropout=True)
                cuts = _cuts(rows, size, small, sizes, is_first=not kind.at, is_mixed=is_mixed)
                doubt = _FewRows(made, plan, kept, guess, draws, kind, 1).compare(size, cuts)
            if doubt is None or doubt.lasts:
                return doubt
    return doubt


def excuse_of(task: Task, plan: Plan) -> Doubt | None:
    """Return the reason why no cuts are compared, whatever the rows; None if there is none."""
    if task.network.batch_norms and plan.batch_norm != "frozen":
        return Doubt('batch_norm="micro" takes the statistics of each micro-batch', lasts=True, is_quiet=True)
    is_new = any(map(is_lazy, task.network.everyone))  # the first forward makes the parameters
    return Doubt("parameters are lazy", is_quiet=True) if is_new else None


def _fits(made: Bench, plan: Plan, most: int, kind: KnownKind) -> bool:
    """Return False if all rows as one part may take much more than the plan's parts, on the host.

    There lack of memory ends the process.
    """
    if made.task.network.kinds - {"cpu"}:
        return True
    if not kind.forward.nbytes:
        part = outcome_of(made.only(range(most)), plan, Split((most,)))
        kind.forward.nbytes = part.seen.nbytes / most if isinstance(part, Looked) else 0.0
    return kind.forward.nbytes * made.rows.rows < _MUCH


def _guess(task: Task, plan: Plan, *, is_late: bool = False) -> float:
    """Return the factor of the provisional divisor, a power of two; 0 if the step divides early."""
    is_unknown = isinstance(task.loss, Terms) and task.loss.weight is None
    if not (is_late or is_unknown or task.strategy.is_many or plan.non_finite == "drop"):
        return 0.0
    is_short = any(p.dtype == torch.float16 for p in task.network.parameters)
    # Smaller gradients have fewer digits in float16.
    return 1 / _FARTHER if is_short or plan.precision.loss_scale is not None else _FARTHER


def read_rows(
    task: Task, batch: core.Batch, plan: Plan, fits: Callable[[int], bool], kind: KnownKind | None
) -> Doubt | None:
    """Show micro-batches of a few rows to the reader of a task; compare loss and gradient of two splits.

    The first split has two rows in each part. The parts of the second are the largest that then `fits`, by
    the readings so far. Then 32, 128, 512 rows run, as long as they fit and are few beside the batch. Without
    a `kind` nothing is compared. Return the reason why these rows could not tell; None if they could.

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
    with suppress(core.OutOfMemoryError), bench(task, batch, rows) as made:
        cuts = _pairs_first(rows, fits, is_mixed=is_mixed)
        if kind is not None:
            kind.notes(made.noted.found)
            draws = Replayed(without_dropout=True)
            looked = _FewRows(made, plan, plan, _guess(task, plan), draws, kind)
            doubt = looked.compare(2, cuts)
            if doubt is DRAWS and fits(rows):  # all rows at once tell which numbers are whose
                more = iter([Split((rows,)), Split(_parts(rows, rows // 2), is_mixed)])
                doubt = looked.compare(rows, more)
        else:
            for cut in cuts:
                outcome_of(made, plan, cut, is_watched=False)
    size = 4 * ROWS
    while is_mixed and size <= batch.rows // _SHARE and fits(size):
        run_parts(task, batch, plan, (2, size))
        size *= 4
    return doubt


def run_parts(task: Task, batch: core.Batch, plan: Plan, sizes: tuple[int, ...]) -> None:
    """Run micro-batches of these sizes, of a few rows of the batch, and put all back; errors are left out."""
    with suppress(core.OutOfMemoryError), bench(task, batch, sum(sizes)) as made:
        outcome_of(made, plan, Split(sizes), is_watched=False)


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


class _FewRows(NamedTuple):
    bench: Bench
    plan: Plan
    kept: Plan  # of the first cut
    guess: float  # the factor of the provisional divisor of the other cuts; 0 if they divide early
    draws: Replayed  # the random numbers of the first cut
    kind: KnownKind  # what is known of such rows
    others: int | None = None  # other cuts that are compared with the first; None for all
    disturbed: Sequence[Tensor] = ()  # those with other values meanwhile
    is_thorough: bool = False  # backward is watched, too

    def run(self, cut: Split, *, is_first: bool = True, **options: Any) -> Looked | Exception:
        rows, task = self.bench.rows, self.bench.task
        made = self.bench._replace(
            rows=rows.padded() if is_first else rows,
            task=task if is_first else replace(task, guess=self.guess),
        )
        plan = self.kept if is_first else self.plan
        options = {
            "places": self.kind.places,
            "like": self.draws,
            "disturbed": self.disturbed,
            "is_thorough": self.is_thorough,
            **options,
        }
        return outcome_of(made, plan, cut, **options)

    def compare(self, most: int, cuts: Iterator[Split]) -> Doubt | None:
        first, is_own = next(cuts), isinstance(self.bench.task.loss, ModelTerms)
        with Heard().listen(self.bench.task.model) as calls:
            whole = self.run(first)
        if isinstance(whole, core.LossError) and is_own:  # parts of other sizes may be sound
            whole = self.run(first := next(cuts))
            if isinstance(whole, core.LossError):
                raise whole
        if isinstance(whole, Exception):
            return self._failed(first, whole)
        if not whole.is_weighed:
            return Doubt("no row that was looked at has weight")
        rows = max(first.sizes)
        self.kind.forward.is_quiet &= whole.is_quiet and not whole.is_random
        self.kind.forward.draws |= whole.draws
        self.kind.forward.draws_process |= whole.draws_process
        self.kind.forward.dtypes |= whole.dtypes
        self.kind.forward.kept, self.kind.forward.largest = whole.seen.kept / rows, whole.seen.largest / rows
        others = islice(cuts, self.others)
        # Vectors of spectral_norm converge.
        buffers = {one for one in self.bench.task.model.buffers() if one.dim() == 1}
        moved = [one for one in whole.written if one.is_floating_point() and one not in buffers]
        if moved and isinstance(again := self.run(first, disturbed=moved), Looked):
            # A teacher may still be its student.
            return self._replace(disturbed=moved)._compare(again, most, others, calls)
        return self._compare(whole, most, others, calls)

    def _refuse_numbers(self, whole: Looked, parts: Looked) -> None:
        """Refuse a forward that computes with a number that each micro-batch moves.

        The number is set as far ahead as it will be until the next comparison.
        """
        forwards = self.plan.micro_batches * max(1, self.bench.task.progress.begun)
        ahead = dict[Place, Any]()
        for place, first, others in zip(self.kind.places, whole.values, parts.values, strict=False):
            if {*map(type, (*first, *others))} <= {int, float}:
                moved, more = first[1] - first[0], others[1] - others[0]
                ahead |= {place: place.read(place.key) + (moved or more) * forwards} if moved != more else {}
        found = self._with(ahead, whole) if ahead else None
        if found and not found.is_small:
            alone = [one for one in ahead if self._with({one: ahead[one]}, whole)] or [*ahead]
            raise say.state_moves(self.bench, repr(alone[0].key), found.words)

    def _with(self, values: Mapping[Place, Any], whole: Looked) -> Difference | None:
        """Return the difference from an outcome if places have other values."""
        with _instead(values):
            again = self.run(whole.cut)
        return differ(whole, again) if isinstance(again, Looked) else None

    def _compare(self, whole: Looked, most: int, others: Iterator[Split], calls: Heard) -> Doubt | None:
        told, is_small, doubt = False, False, Doubt("there was no other cut to compare with")
        for cut in others:
            with Heard().listen(self.bench.task.model) as more:
                parts = self.run(cut, is_first=False, is_watched=not whole.is_quiet)
            if isinstance(parts, Exception):
                self._refuse_failed_trim(parts, cut, whole)
                is_own = isinstance(self.bench.task.loss, ModelTerms)
                if isinstance(parts, core.LossError) and is_own:  # the loss has another form in parts
                    raise parts
                doubt = doubt if is_small else self._failed(cut, parts)
                continue
            found = differ(whole, parts)
            is_random = whole.is_random or parts.is_random
            if found or is_random or not self.kind.at:
                self.kind.forward.axes = None if found or is_random else self._axes(calls, more, whole, cut)
            if found and not (whole.is_quiet or self.is_thorough):  # a backward may run forwards again
                again = self._replace(is_thorough=True)
                first = again.run(whole.cut)
                is_run = isinstance(first, Looked)
                return again._compare(first, most, iter([cut]), calls) if is_run else DRAWS
            if isinstance(self.bench.task.loss, Terms) and (is_random or not found):
                self._refuse_weights(whole, parts)
            if found and is_random:
                return DRAWS
            if found:
                found = self._confirmed(most, whole, parts)
            if isinstance(found, Doubt):
                return found
            if not told and found is None:
                self._warn_of_buffers(whole, parts)
            told = True
            if found and found.is_small:
                said = f"got {found.words} for {self.bench.rows.rows} rows as {whole.cut} and as {cut}"
                said += say.moved(self._moved(whole))
                doubt, is_small = Doubt(f"{said}: more than rounding in {found.dtype}", lasts=True), True
            elif found:  # else another split may show more
                self._refuse(found, whole, parts)
            else:
                far = distance(whole, parts).gradient
                self.kind.error = max(self.kind.error, far) if math.isfinite(far) else self.kind.error
                if not is_random:
                    self._refuse_numbers(whole, parts)
        return None if told and not is_small else doubt

    def _axes(self, calls: Heard, more: Heard, whole: Looked, cut: Split) -> Axes | None:
        """Return the axes of rows of the outputs; None if the loss over outputs of parts, joined, is another.

        It may be told by what a forward leaves beside its outputs, or these may hold rows in another order.
        """
        axes = axes_of(calls, whole.cut.sizes, more, cut.sizes)
        if axes is None:
            return None
        given, rows = joined(more.parts(len(axes)), axes), self.bench.rows.rows
        if given is None:
            return None
        with returning(self.bench.task.model, given):
            again = outcome_of(self.bench, self.plan, Split((rows,), cut.is_interleaved), has_graph=False)
        dtypes = whole.dtypes if isinstance(again, Looked) else set[torch.dtype]()
        is_same = isinstance(again, Looked) and not losses_differ([whole.report, again.report], dtypes, rows)
        return axes if is_same else None

    def _failed(self, cut: Split, error: Exception) -> Doubt:
        return Doubt(f"{self.bench.rows.rows} rows as {cut} gave {say.first_sentence(error)}")

    def _confirmed(self, most: int, whole: Looked, parts: Looked) -> Difference | Doubt | None:
        """Return a difference that appears again and is not rounding of rows that cancel in the sum."""
        again = [self.run(whole.cut) for _ in range(_AGAIN)]
        if not all(isinstance(each, Looked) and not differ(whole, each) for each in again):
            return Doubt("the same rows give another loss or gradient the second time", lasts=True)
        rows = self.bench.rows.rows
        alone = list[Looked]()
        for half in (range(rows // 2), range(rows // 2, rows)):
            found = outcome_of(
                self.bench.only(half), self.plan, Split(tuple(core.cut_sizes(len(half), most)))
            )
            alone += [found] if isinstance(found, Looked) else []
        found = differ(whole, parts, *alone)
        if found and found.is_small and self._is_of_rounding(whole, parts):
            return None
        return found

    def _is_of_rounding(self, whole: Looked, parts: Looked) -> bool:
        """Return True if weights one rounding away differ as much: activations lie at a kink."""
        parameters = self.bench.task.network.parameters
        weights = [p for p in parameters if p.dtype == torch.float32 and p.numel()]
        near = self.run(whole.cut, disturbed=weights)
        if not isinstance(near, Looked):
            return False
        rounding, found = distance(whole, near), distance(whole, parts)
        loss = _NEAR * (rounding.loss + torch.finfo(torch.float32).eps)
        return found.gradient <= _NEAR * rounding.gradient and found.loss <= loss

    def _refuse(self, found: Difference, whole: Looked, parts: Looked) -> None:
        made, rows = self.bench, self.bench.rows
        if isinstance(rows, core.TrimmedBatch):
            kept = self.run(parts.cut)
            if isinstance(kept, Looked) and not differ(whole, kept):
                raise say.padding_counts(made, found.words, self._cured(parts.cut, whole))
        same = self.run(whole.cut, is_first=False)
        hooked = [name for p, name in made.task.names().items() if private.hooks_of_tensor(p)[0]]
        raise say.cuts_differ(
            made,
            found.words,
            (whole.cut, parts.cut),
            is_nonlinear=isinstance(same, Looked) and differ(whole, same) is not None,
            hooked=hooked[0] if hooked else "",
            mixes=parts.mixes or whole.mixes,
            moved=self._moved(whole),
            is_disturbed=bool(self.disturbed),
        )

    def _refuse_failed_trim(self, error: Exception, cut: Split, whole: Looked) -> None:
        """Raise LossError if a model fails on shorter rows, and not on the padded ones."""
        if isinstance(self.bench.rows, core.TrimmedBatch) and isinstance(self.run(cut), Looked):
            raise say.padding_counts(self.bench, "", self._cured(cut, whole), error) from error

    def _cured(self, cut: Split, whole: Looked) -> list[str]:
        """Return the trimmed columns that cure the difference if they are left whole."""
        rows, cured = self.bench.rows, list[str]()
        assert isinstance(rows, core.TrimmedBatch)  # noqa: S101 - others are not trimmed
        for column in dict.fromkeys(map(core.tree.column, rows.trimmed)):
            with suppress(core.OutOfMemoryError):
                found = outcome_of(self.bench._replace(rows=rows.keeping(column)), self.plan, cut)
                cured += [column] if isinstance(found, Looked) and not differ(whole, found) else []
        return cured

    def _refuse_weights(self, whole: Looked, parts: Looked) -> None:
        """Refuse terms whose weights do not add up, unless their sums are the same for all rows."""
        weights, found = whole.report.weights, parts.report.weights
        names = [name for name in weights.keys() & found.keys() if not _is_equal(weights[name], found[name])]
        if not names:
            return
        again = [self.run(whole.cut) for _ in range(_AGAIN)]
        middle = self.bench.rows.rows // 2
        half = outcome_of(self.bench.only(range(middle)), self.plan, Split((middle,)))
        for name in sorted(names):
            reports = [each.report for each in (*again, half) if isinstance(each, Looked)]
            if not all(_is_equal(weights[name], each.weights.get(name, 0.0)) for each in reports[:_AGAIN]):
                continue  # the weights are random
            values = [each.terms.get(name, 0.0) for each in (*reports, parts.report)]
            if all(_is_equal(whole.report.terms.get(name, 0.0), value) for value in values):
                continue  # a penalty, the same for all rows
            raise say.weights_differ(self.bench, name, (weights[name], found[name]), (whole.cut, parts.cut))

    def _warn_of_buffers(self, whole: Looked, parts: Looked) -> None:
        saved = self.bench.task.model.state_dict() if whole.buffers else ()
        wrong = [
            name
            for name, value in whole.buffers.items()
            if name in saved and not math.isclose(value, parts.buffers.get(name, math.nan), rel_tol=1e-3)
        ]
        if wrong and not (whole.is_random or parts.is_random):
            warnings.warn(say.buffers_differ(self.bench, wrong[0], (whole.cut, parts.cut)), stacklevel=2)

    def _moved(self, whole: Looked) -> str:
        """Return what the forward writes to: its name, or the key and shape of a tensor; "" for nothing."""
        buffers = {id(one): repr(name) for name, one in self.bench.task.model.named_buffers()}
        tables = [one for one in self.bench.noted.found.containers if isinstance(one, dict)]
        for tensor in (*self.disturbed, *whole.written):
            keys = [repr(key) for table in tables for key, one in table.items() if one is tensor]
            told = f"a tensor of shape {tuple(tensor.shape)} that model or loss hold"
            return buffers.get(id(tensor), ", ".join([*keys[:1], told]))
        return ""


@contextmanager
def _instead(values: Mapping[Place, Any]) -> Generator[None]:
    """Give places other values meanwhile."""
    before = {place: place.read(place.key) for place in values}
    try:
        for place, value in values.items():
            place.put(value)
        yield
    finally:
        for place, value in before.items():
            place.put(value)


def _is_equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5)


def _cuts(
    rows: int, most: int, least: int, sizes: Sequence[int], *, is_first: bool, is_mixed: bool
) -> Iterator[Split]:
    """Yield the reference, then unequal parts in another order, then another number of parts.

    The first time parts are as small as those of a plan of these `sizes`: more of them show a small fault.
    """
    plain, count = core.cut_sizes(rows, most), -(-rows // most)
    if plain[-1] < least:  # no single row unless the plan has one
        plain[-2:] = [plain[-2] - 1, plain[-1] + 1]
    yield Split(tuple(plain))
    more = count + 1 if (count + 1) * least <= rows else max(1, count - 1)
    unequal = Split(_parts(rows, more, most if more > count else rows, least), is_mixed)
    if count == 1:
        small = max(least, min(*sizes, (rows - 1) // 2, 2 if is_first else 3))
        rest = rows - small
        parts = (rest - rest // 2, rest // 2, small) if is_first and rest > small + 2 else (rest, small)
        if is_first and max(sizes) <= 2:
            pairs = rows // 2 if max(sizes) == 2 else max(int(rows > 2), (rows - 2) // 2)
            parts = *[2] * pairs, *[1] * (rows - 2 * pairs)
        yield Split(parts, is_mixed)
    yield unequal


def _pairs_first(rows: int, fits: Callable[[int], bool], *, is_mixed: bool) -> Iterator[Split]:
    """Yield pairs of rows, then the largest parts that fit, in another number."""
    pairs = rows // 2
    yield Split(_parts(rows, pairs), is_mixed)
    most = next((size for size in range(-(-5 * rows // 8), 2, -1) if fits(size)), 2)
    count = -(-rows // most)
    yield Split(_parts(rows, count if count != pairs else pairs + 1, most))
    if count == pairs and fits(rows):
        yield Split((rows,))


def _parts(rows: int, count: int, most: int = ROWS, least: int = 1) -> tuple[int, ...]:
    """Divide rows into so many parts, unequal ones if sizes from `least` to `most` allow that."""
    small, more = divmod(rows, count)
    sizes = [small + 1] * more + [small] * (count - more)
    if count > 1 and not more and least < small < most:
        sizes[0], sizes[-1] = small + 1, small - 1
    return tuple(sizes)
