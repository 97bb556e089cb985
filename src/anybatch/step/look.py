"""The look before the first cut: a few rows in several cuts must give the same loss and gradient."""

import math
import pickle
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch.batchnorm import names_of_batch_norms
from anybatch.core import Batch, Event, LossError, OutOfMemoryError, SampleBatch, cut_sizes
from anybatch.core import torch_private as private
from anybatch.engine import Observer, Plan, Task, carry_out
from anybatch.losses import ANY_ROWS, ModelLoss, ModelTerms, SummedLoss, Terms, WholeBatch, read_afresh
from anybatch.precision import LossScale, Precision
from anybatch.state import Effects, SeenDraws, plain_kernels, rng
from anybatch.step.choose_rows import choose_rows
from anybatch.step.dry_run import reached_by
from anybatch.step.tolerance import limit_of

ROWS = 8
LEAST = 3  # rows of which two parts of several can be made
_LIMIT = 1e-2  # a smaller relative error of a float32 gradient may be rounding in a deep network
_SIGNS = 8  # rows of a sketch
_AGAIN = 4  # times that rows are tried again before they are refused: a hidden coin may fall alike


@dataclass(frozen=True, slots=True)
class _Cut:
    """Rows of each micro-batch; every second row comes first where they are interleaved."""

    sizes: tuple[int, ...]
    is_interleaved: bool = False

    def __str__(self) -> str:
        return "+".join(map(str, self.sizes)) + " in another order" * self.is_interleaved


class Doubt(NamedTuple):
    """The reason why a look could not judge; `lasts` where other rows do not help."""

    reason: str
    lasts: bool = False
    is_quiet: bool = False  # nobody is warned


_ENTRIES = "its settings have an entry for every row, so that no part can be taken alone"


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
    if isinstance(task.loss, SummedLoss) and task.loss.has_entries_per_row(batch):
        return Doubt(_ENTRIES, lasts=True, is_quiet=True)
    rows = min(batch.rows, ROWS)
    if rows < 2 or any(map(is_lazy, task.everyone)):  # the first forward makes lazy parameters what they are
        return Doubt("the first rows were too few, or parameters lazy")
    least = min(2, *(plan.sizes if plan.is_cut else cut_sizes(batch.rows, most))) if rows > LEAST else 1
    most = min(rows, max(2, most))
    # A loss over all rows may pair them by their places.
    is_mixed = not isinstance(task.loss, WholeBatch)
    doubt = Doubt("memory ran out in a few rows")
    with _few_rows(task, batch, rows) as few:
        for size, small in dict.fromkeys([(most, least), (most, 2), (2, least), (2, 1)]):
            with suppress(OutOfMemoryError):
                doubt = _look(task, few, plan, size, _cuts(few.rows, size, small, is_mixed=is_mixed))
            if doubt is None or doubt.lasts:
                break
    return doubt


def refuse_padding(task: Task, batch: Batch, plan: Plan, *, check: bool) -> bool:
    """Compare loss and gradient of a few rows with and without repeated ones, before any are filled up.

    Args:
        task: with a compiled model.
        batch: the rows to choose from.
        plan: says how many rows are to go through.
        check: whether they are compared.

    Returns:
        Whether these rows could tell.

    Raises:
        LossError: the repeated rows change what the others give.
    """
    if task.batch_norms and plan.batch_norm != "frozen":
        names = names_of_batch_norms(task.model, task.batch_norms)
        raise LossError(_unpadded(plan, f"BatchNorm in training mode, in which rows meet ({names})"))
    if isinstance(task.loss, ModelTerms):
        raise LossError(_unpadded(plan, "one that computes its own loss, in which repeated rows would count"))
    has_entries = isinstance(task.loss, SummedLoss) and task.loss.has_entries_per_row(batch)
    if not check or has_entries or any(map(is_lazy, task.everyone)):
        return not check
    rows = min(batch.rows, ROWS, plan.pad_to - 1)
    alone, filled = replace(plan, pad_to=0), replace(plan, pad_to=min(plan.pad_to, 2 * rows))
    cut = _Cut((rows,))
    with _few_rows(task, batch, rows) as few, suppress(OutOfMemoryError):
        whole, again, parts = [_outcome(task, few, one, cut) for one in (alone, alone, filled)]
        if isinstance(whole, Exception) or isinstance(again, Exception) or _differ(whole, again):
            return False
        if isinstance(parts, LossError):
            raise parts
        if isinstance(parts, Exception):
            said = (str(parts).splitlines() or [""])[0]
            raise LossError(_unpadded(plan, f"{type(parts).__name__}: {said}")) from parts
        if found := _differ(whole, parts):
            if whole.is_random or parts.is_random:
                return False
            raise LossError(_unpadded(plan, f"{found.words} for {rows} rows alone and filled up"))
        return rows > 1  # a mean over one row and itself is that row
    return False


def _unpadded(plan: Plan, found: str) -> str:
    return (
        f"Expected a compiled model in which rows do not meet, to fill {min(plan.sizes)} rows up to the "
        f"{plan.pad_to} that it was compiled for, got {found}. {ANY_ROWS}"
    )


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
    if isinstance(task.loss, SummedLoss) and task.loss.has_entries_per_row(batch):
        return Doubt(_ENTRIES, lasts=True, is_quiet=True)
    rows = min(ROWS, batch.rows, max(6, batch.rows // 4))
    is_mixed = not isinstance(task.loss, WholeBatch)
    doubt = Doubt("memory ran out in a few rows")
    with _few_rows(task, batch, rows) as few, suppress(OutOfMemoryError):
        cuts = _pairs_first(rows, fits, is_mixed=is_mixed)
        if check:
            return _look(task, few, plan, 2, cuts)
        for cut in cuts:
            _outcome(task, few, plan, cut)
    return doubt


def _pairs_first(rows: int, fits: Callable[[int], bool], *, is_mixed: bool) -> Iterator[_Cut]:
    """Yield pairs of rows, then the largest parts that fit, in another number."""
    pairs = rows // 2
    yield _Cut(_parts(rows, pairs), is_mixed)
    most = next((size for size in range(-(-5 * rows // 8), 2, -1) if fits(size)), 2)
    count = -(-rows // most)
    yield _Cut(_parts(rows, count if count != pairs else pairs + 1, most))
    if count == pairs and fits(rows):
        yield _Cut((rows,))


@contextmanager
def _few_rows(task: Task, batch: Batch, rows: int) -> Generator[Batch]:
    """Choose so many rows; afterwards all that a forward reaches is put back."""
    streams = rng.capture_process()  # `collate` may draw
    few = batch.only(choose_rows(batch)(rows) if rows < batch.rows else range(rows))
    noted = reached_by(task, few)
    try:
        with read_afresh(task.model):
            yield few
    finally:
        noted.put_back()
        rng.restore_process(streams)


def _look(task: Task, few: Batch, plan: Plan, most: int, cuts: Iterable[_Cut]) -> Doubt | None:
    others = iter(cuts)
    first = next(others)
    is_own = isinstance(task.loss, ModelTerms)
    padded = few.padded()
    whole = _outcome(task, padded, plan, first)
    if isinstance(whole, LossError) and is_own:  # parts of other sizes may show that it is sound
        whole = _outcome(task, padded, plan, first := next(others))
        if isinstance(whole, LossError):
            raise whole
    if isinstance(whole, Exception):
        return _failed(few, first, whole)
    if not any(whole.report.weights.values()):
        return Doubt("no row that was looked at has weight")
    told, doubt = False, Doubt("there was no other cut to compare with")
    for cut in others:
        parts = _outcome(task, few, plan, cut, is_watched=not whole.is_quiet)
        if isinstance(parts, Exception) and few is not padded:
            _refuse_failed_trim(task, parts, _outcome(task, padded, plan, cut))
        if isinstance(parts, LossError) and is_own:  # it is not made in parts as it is as a whole
            raise parts
        if isinstance(parts, Exception):
            doubt = _failed(few, cut, parts)
            continue
        found = _differ(whole, parts)
        is_random = whole.is_random or parts.is_random
        if isinstance(task.loss, Terms) and (is_random or not found):
            _refuse_weights(task, few, plan, (first, whole), (cut, parts))
        if found and is_random:
            return Doubt("the model or its loss draws random numbers, which are others in every cut", True)
        if found:
            found = _confirmed(task, few, plan, most, (first, whole), (cut, parts))
        if isinstance(found, Doubt):
            return found
        told = True
        _warn_of_buffers(task, (first, whole), (cut, parts))
        if not found:
            continue
        compared = f"got {found.words} for {few.rows} rows as {first} and as {cut}"
        if found.is_small:
            return Doubt(f"{compared}: more than rounding in {found.dtype}", lasts=True)
        kept = _outcome(task, padded, plan, cut) if few is not padded else None
        if isinstance(kept, _Outcome) and not _differ(whole, kept):
            raise LossError(
                f"Expected the same loss and gradient from {_name(task)} with less padding, got "
                f"{found.words} for {few.rows} rows padded and trimmed. {_PADDING}"
            )
        raise LossError(
            f"Expected the same loss and gradient from {_name(task)} for every split, {compared}. "
            f"{_cause(few, whole.moved)} "
            "ab.check(model, loss, batch) names the place; Step(check=False) skips this."
        )
    return None if told else doubt


def _failed(few: Batch, cut: "_Cut", error: Exception) -> Doubt:
    said = (str(error).splitlines() or [""])[0][:160]
    return Doubt(f"{few.rows} rows as {cut} gave {type(error).__name__}: {said}")


Compared = tuple["_Cut", "_Outcome"]


def _confirmed(
    task: Task, few: Batch, plan: Plan, most: int, one: Compared, other: Compared
) -> "_Difference | Doubt | None":
    """Return a difference that is there again, and is no rounding of rows that cancel in the sum."""
    padded, (first, whole) = few.padded(), one
    again = [_outcome(task, padded, plan, first) for _ in range(_AGAIN)]
    halves = [few.only(half) for half in (range(few.rows // 2), range(few.rows // 2, few.rows))]
    alone = [_outcome(task, half, plan, _Cut(_sizes(half.rows, [most]))) for half in halves]
    if not all(isinstance(each, _Outcome) and not _differ(whole, each) for each in again):
        return Doubt("the same rows give another loss or gradient the second time", lasts=True)
    return _differ(whole, other[1], *[each for each in alone if isinstance(each, _Outcome)])


def _refuse_weights(task: Task, few: Batch, plan: Plan, one: Compared, other: Compared) -> None:
    """Refuse terms whose weights do not add up, unless their sums are the same for all rows."""
    (first, whole), (cut, parts) = one, other
    weights, found = whole.report.weights, parts.report.weights
    names = [name for name in weights.keys() & found.keys() if not _is_equal(weights[name], found[name])]
    if not names:
        return
    again = [_outcome(task, few.padded(), plan, first) for _ in range(_AGAIN)]
    half = _outcome(task, few.only(range(few.rows // 2)), plan, _Cut((few.rows // 2,)))
    for name in sorted(names):
        reports = [each.report for each in (*again, half) if isinstance(each, _Outcome)]
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
    if wrong and not (whole.is_random or parts.is_random):
        warnings.warn(
            f"Expected buffers whose values do not depend on the split, got others in {wrong[0]} of "
            f"{_name(task)} as {first} and as {cut}. Loss and gradient are exact; what reads it later "
            "differs from the whole batch. Leave out running statistics, or do not split the batch.",
            stacklevel=2,
        )


_PADDING = (
    'With order="length" padding is cut off, so padded places must not count: no mean over them, no position '
    "that counts them, no attention to them, no labels there. Mask them, or leave order out. "
    "ab.check(model, loss, batch) names the place; Step(check=False) skips this."
)


def _refuse_failed_trim(task: Task, error: Exception, kept: "_Outcome | Exception") -> None:
    """Refuse a model that fails on shorter rows, and not on the same ones as they came."""
    if isinstance(kept, _Outcome):
        said = (str(error).splitlines() or [""])[0]
        raise LossError(
            f"Expected {_name(task)} to take rows without their padding, got {type(error).__name__}: {said} "
            f"{_PADDING}"
        ) from error


def _cuts(rows: int, most: int, least: int, *, is_mixed: bool) -> Iterator[_Cut]:
    """Yield the reference, then another number of unequal parts, then parts in another order."""
    count = -(-rows // most)
    more = count + 1 if (count + 1) * least <= rows else max(1, count - 1)
    yield _Cut(_parts(rows, count, most, least))
    yield _Cut(_parts(rows, more, most if more > count else rows, least))
    yield _Cut(_parts(rows, rows // 2 if count == 1 else count, most, least), is_mixed)


def _parts(rows: int, count: int, most: int = ROWS, least: int = 1) -> tuple[int, ...]:
    """Divide rows into so many parts, unequal ones where sizes from `least` to `most` allow that."""
    small, more = divmod(rows, count)
    sizes = [small + 1] * more + [small] * (count - more)
    if count > 1 and not more and least < small < most:
        sizes[0], sizes[-1] = small + 1, small - 1
    return tuple(sizes)


def _sizes(rows: int, pattern: Sequence[int]) -> tuple[int, ...]:
    """Sizes that repeat a pattern, until all rows are taken."""
    sizes: list[int] = []
    while left := rows - sum(sizes):
        sizes.append(min(left, pattern[len(sizes) % len(pattern)]))
    return tuple(sizes)


class _Outcome(Observer):
    """Loss and gradient of some rows in one cut; the model, its gradients and all else are as before."""

    def __init__(self, task: Task, few: Batch, plan: Plan, cut: _Cut, *, is_watched: bool) -> None:
        self.gradients: dict[str, Tensor] = {}
        self._draws, self._watch = _Watched(task.everyone), ExitStack()
        effects = Effects()
        task = task.alone()
        own = replace(
            task,
            loss=ModelLoss().begin() if isinstance(task.loss, ModelTerms) else task.loss,
            effects=effects,
            scale=LossScale(Precision()),  # a dry run neither looks for overflow nor divides by a scale
            observers=(self,),
            listeners=(self._done,),
            schedulers=(),
            before_cut=_allowed,
        )
        effects.begin(own.modules)
        order = range(few.rows)
        chosen = few.only([*order[::2], *order[1::2]]) if cut.is_interleaved else few
        like = replace(plan, rows=few.rows, micro_batch=max(cut.sizes), cut=cut.sizes, non_finite="raise")
        self._model, self._versions, self.moved = task.model, _versions(task.model), ""
        self.buffers: dict[str, float] = {}
        self._streams = [(read, pickle.dumps(read())) for read, _ in own.state.streams]
        self._has_drawn = False
        try:
            with torch.enable_grad(), plain_kernels(), self._watch:
                if is_watched:
                    self._watch.enter_context(self._draws)
                self.report = carry_out(like, own, chosen.copied(), is_dry=True)
        finally:
            self._draws.put_back()
        if self.report.too_large:  # and so it was cut otherwise
            raise OutOfMemoryError(f"Expected {max(cut.sizes)} rows to fit, got none left. Take fewer.")
        draws = self._draws.unreplayed or effects.draws or effects.draws_process
        self.is_random = bool(draws or self._has_drawn)
        self.is_quiet = self._draws.is_quiet
        self.dtypes = self._draws.dtypes | {p.dtype for p in task.parameters} | _short_of_devices(task, plan)
        self.rows = few.rows

    def _done(self, event: Event) -> None:
        """A forward that draws or writes does so in the first micro-batch. To watch takes long."""
        if self._draws.is_quiet:
            self._watch.close()

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Keep what shows a difference, in little memory."""
        self._draws.is_watching = False
        self._has_drawn = any(pickle.dumps(read()) != found for read, found in self._streams)
        now = _versions(self._model)
        self.moved = next((name for name, one in now.items() if self._versions.get(name) != one), "")
        held = dict(self._model.named_buffers())
        written = [name for name, one in now.items() if name in held and self._versions.get(name) != one]
        self.buffers = {name: held[name].detach().double().norm().item() for name in written}
        self.gradients = {name: _sketch(value.detach()) for name, value in gradients.items()}

    @property
    def size(self) -> float:
        """The norm of the gradient."""
        return math.hypot(*[value.norm().item() for value in self.gradients.values()])


class _Watched(SeenDraws):
    """Keeps a copy of each parameter that a forward writes to, as a momentum encoder does, from before it."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._places = {one.untyped_storage().data_ptr(): one for one in parameters if not is_lazy(one)}
        self._copies: dict[Tensor, Tensor] = {}
        self._has_drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What writes says so in its schema."""
        if private.is_mutable(func):
            for value in private.pytree.tree_leaves((args, kwargs)):
                known = self._places.get(value.untyped_storage().data_ptr()) if _is_strided(value) else None
                if known is not None and known not in self._copies:
                    with private.disable_current_modes():
                        self._copies[known] = known.detach().clone()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def draw(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a draw."""
        self._has_drawn = True
        return super().draw(func, args, kwargs)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing was drawn or written, so that other cuts need not be watched."""
        return not self._has_drawn and not self._copies

    def put_back(self) -> None:
        """Put the copies back."""
        with torch.no_grad():
            for parameter, value in self._copies.items():
                parameter.copy_(value)


def _is_strided(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


class _Difference(NamedTuple):
    """A difference by more than rounding; a small one may still be that of a deep network."""

    words: str
    dtype: str
    is_small: bool


def _differ(one: _Outcome, other: _Outcome, *alone: _Outcome) -> _Difference | None:
    """Return the difference of two outcomes; None if it is rounding.

    Nothing less counts than what numbers of size 1 leave behind where they cancel.
    """
    dtypes = [dtype for dtype in one.dtypes | other.dtypes if dtype.is_floating_point]
    shortest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
    eps, rounding = torch.finfo(shortest).eps, limit_of([shortest], one.rows)
    is_double, named = shortest == torch.float64, str(shortest).removeprefix("torch.")
    outcomes = one, other, *alone
    small = None
    for name in sorted(one.report.terms.keys() & other.report.terms.keys()):
        first, second = one.report.terms[name], other.report.terms[name]
        size = max(abs(each.report.terms.get(name, 0.0)) for each in outcomes)
        if not math.isfinite(first):  # nothing to say, or the step will
            continue
        # NaN from a part of which the whole is finite is a fault, too: a mean over no valid element.
        if not abs(first - second) <= max(rounding * size, 100 * eps):
            is_small = not is_double and abs(first - second) <= max(eps**0.5 * size, 100 * eps)
            found = _Difference(f"{first:.6g} and {second:.6g} for {name!r}", named, is_small)
            if not is_small:
                return found
            small = small or found
    apart: dict[str, float] = {}
    for name in one.gradients.keys() | other.gradients.keys():
        pair = one.gradients.get(name), other.gradients.get(name)
        first, second = [torch.zeros(()) if value is None else value for value in pair]
        apart[name] = (first - second).norm().item()
    error, size = math.hypot(*apart.values()), max(each.size for each in outcomes)
    if not math.isfinite(error) or error <= max(rounding * size, 100 * eps):
        return small
    worst = max(apart, key=lambda name: apart[name])
    is_small = not is_double and error <= max(_LIMIT, 3 * eps**0.5) * size
    return _Difference(f"gradients that differ by {error / size:.2g}, most in {worst}", named, is_small)


def _short_of_devices(task: Task, plan: Plan) -> set[torch.dtype]:
    """Return float16 where float32 is multiplied with as short a mantissa (TF32)."""
    is_short = torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
    return (
        {torch.float16} if plan.precision.compute == "tf32" or (task.kinds - {"cpu"} and is_short) else set()
    )


def _allowed(task: Task, batch: Batch, plan: Plan, rows: int) -> None:
    """Rows may be cut: where memory runs out the report says so."""


def _outcome(
    task: Task, few: Batch, plan: Plan, cut: _Cut, *, is_watched: bool = True
) -> "_Outcome | Exception":
    """What comes of a cut, or its error: a step meets that again, or would not meet it.

    A model may refuse a single row, which a step need not send.
    """
    try:
        return _Outcome(task, few, plan, cut, is_watched=is_watched)
    except OutOfMemoryError:
        raise
    except Exception as error:
        return error


def _sketch(gradient: Tensor) -> Tensor:
    """A few sums of the rows of a gradient with random signs, of the same norm on average.

    The difference of two sketches is that of the two gradients, in little memory: Alon, Matias and Szegedy
    1999, "The Space Complexity of Approximating the Frequency Moments", section 2.2.
    """
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        signs = _signs(gradient.shape[0])[:, gradient.indices()[0].cpu()]
        gradient = gradient.values()
    elif gradient.dim() < 2 or gradient.shape[0] <= _SIGNS:
        return gradient.clone()
    else:
        signs = _signs(gradient.shape[0])
    return signs.to(gradient) @ gradient.flatten(1)


@cache
def _signs(rows: int) -> Tensor:
    drawn = torch.randint(2, (_SIGNS, rows), generator=torch.Generator().manual_seed(rows))
    return (2.0 * drawn - 1) / _SIGNS**0.5


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Names of parameters and buffers; which tensor each is, and how often it was written to."""
    named = chain(model.named_parameters(), model.named_buffers())
    return {name: (id(one), private.version(one)) for name, one in named}


def _cause(few: Batch, moved: str) -> str:
    """What most probably makes the difference, and what to do."""
    if moved:
        return f"The forward changes {moved!r}, and later forwards may compute with it."
    likely = "Rows affect each other (batch_first, broadcasting, pairs: see ab.WholeBatch), "
    if isinstance(few, SampleBatch):
        likely += "padded places of `collate` count, "
    return f"{likely}or a Total's weight is not its divisor."


def _name(task: Task) -> str:
    called = task.loss.function if isinstance(task.loss, Terms) else task.model
    return getattr(called, "__name__", type(called).__name__)
