"""The look before the first cut: a few rows in several cuts must give the same loss and gradient."""

import math
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch.batchnorm import names_of_batch_norms
from anybatch.core import Batch, Event, LossError, OutOfMemoryError, SampleBatch
from anybatch.core import torch_private as private
from anybatch.engine import Observer, Plan, Task, carry_out
from anybatch.losses import ANY_ROWS, ModelLoss, ModelTerms, SummedLoss, Terms, WholeBatch, read_afresh
from anybatch.precision import LossScale, Precision
from anybatch.state import Effects, SeenDraws, plain_kernels, rng
from anybatch.step.dry_run import reached_by

ROWS = 8
_LIMIT = 1e-2  # a smaller relative error of a gradient may be rounding in a deep network
_SIGNS = 8  # rows of a sketch
_AGAIN = 4  # times that rows are tried again before they are refused: a hidden coin may fall alike


@dataclass(frozen=True, slots=True)
class _Cut:
    """Rows of each micro-batch; every second row comes first where they are interleaved."""

    sizes: tuple[int, ...]
    is_interleaved: bool = False

    def __str__(self) -> str:
        return "+".join(map(str, self.sizes)) + " in another order" * self.is_interleaved


def refuse_what_depends_on_the_cut(task: Task, batch: Batch, plan: Plan, most: int) -> bool:
    """Compare loss and gradient of a few rows between three cuts, before a batch is cut for the first time.

    A step is carried out on at most eight rows from all over the batch: at once, in two unequal parts, and in
    small parts in another order; where only `most` rows may go through together, in parts of at most that.
    The model is in the mode it is in. Dropout gives its expected value. Nothing is updated, and all is put
    back. A difference within rounding, of other random numbers, or of a model that gives the same rows
    another loss the second time, is no fault; what fails otherwise is left to the step.
    `anybatch.check` is the whole test, and says where a fault lies.

    Args:
        task: whose loss and model are looked at.
        batch: the rows to choose from.
        plan: how the batch is to be carried out.
        most: rows that are known to fit; two at least go through together.

    Returns:
        Whether these rows could tell.

    Raises:
        LossError: loss or gradient depends on the cut.
    """
    if task.batch_norms and plan.batch_norm != "frozen":  # the caller has said so, or it is refused
        return True
    if isinstance(task.loss, SummedLoss) and task.loss.has_entries_per_row(batch):
        return True  # it belongs to these rows in this order
    rows = min(batch.rows, ROWS)
    if rows < 2 or any(map(is_lazy, task.everyone)):  # the first forward makes lazy parameters what they are
        return False
    most = min(rows, max(2, most))
    # A loss over all rows may pair them by their places.
    is_mixed = not isinstance(task.loss, WholeBatch)
    with _few_rows(task, batch, rows) as few:
        for size in dict.fromkeys((most, 2)):
            with suppress(OutOfMemoryError):
                return _look(task, few, plan, size, dict.fromkeys(_cuts(rows, size, is_mixed=is_mixed)))
    return False


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
            raise LossError(_unpadded(plan, f"{found} for {rows} rows alone and filled up"))
        return rows > 1  # a mean over one row and itself is that row
    return False


def _unpadded(plan: Plan, found: str) -> str:
    return (
        f"Expected a compiled model in which rows do not meet, to fill {min(plan.sizes)} rows up to the "
        f"{plan.pad_to} that it was compiled for, got {found}. {ANY_ROWS}"
    )


def read_rows(task: Task, batch: Batch, plan: Plan, fits: Callable[[int], bool], *, check: bool) -> bool:
    """Let the reader of a task read micro-batches of a few rows; compare loss and gradient of two cuts.

    The first cut is into two rows each. The micro-batches of the second are the largest that then `fits`.

    Args:
        task: with a reader.
        batch: the rows to choose from, at least four.
        plan: how the batch is to be carried out.
        fits: whether so many rows fit, by what was read so far.
        check: whether the two are compared.

    Returns:
        Whether these rows could tell.

    Raises:
        LossError: loss or gradient depends on the cut.
    """
    if isinstance(task.loss, SummedLoss) and task.loss.has_entries_per_row(batch):
        return False
    rows = min(ROWS, max(4, batch.rows // 4))
    with _few_rows(task, batch, rows) as few, suppress(OutOfMemoryError):
        pairs = _Cut(_sizes(rows, [2]), is_interleaved=True)
        if check:
            return _look(task, few, plan, 2, _pairs_first(pairs, fits))
        for cut in _pairs_first(pairs, fits):
            _outcome(task, few, plan, cut)
    return False


def _pairs_first(pairs: _Cut, fits: Callable[[int], bool]) -> Iterator[_Cut]:
    """Pairs of rows, then unequal parts: two of them, or as many as it takes."""
    yield pairs
    rows = sum(pairs.sizes)
    most = next((size for size in range(-(-5 * rows // 8), 2, -1) if fits(size)), 2)
    if rows < 2 * most:
        yield _Cut((rows - most, most))
    else:
        small = 2 if most > 2 else 1
        yield _Cut((small, *_sizes(rows - small, [most])))


@contextmanager
def _few_rows(task: Task, batch: Batch, rows: int) -> Generator[Batch]:
    """So many rows from all over the batch; afterwards all that a forward reaches is put back."""
    few = batch.only([index * batch.rows // rows for index in range(rows)])
    noted, streams = reached_by(task, few), rng.capture_process()
    try:
        with read_afresh(task.model):
            yield few
    finally:
        noted.put_back()
        rng.restore_process(streams)


def _look(task: Task, few: Batch, plan: Plan, most: int, cuts: Iterable[_Cut]) -> bool:
    others = iter(cuts)
    first = next(others)
    is_own = isinstance(task.loss, ModelTerms)
    padded = few.padded()
    whole = _outcome(task, padded, plan, first)
    if isinstance(whole, LossError) and is_own:  # parts of other sizes may show that it is sound
        whole = _outcome(task, padded, plan, first := next(others))
        if isinstance(whole, LossError):
            raise whole
    if isinstance(whole, Exception) or not any(whole.report.weights.values()):
        return False
    told = False
    for cut in others:
        parts = _outcome(task, few, plan, cut, is_watched=not whole.is_quiet)
        if isinstance(parts, Exception) and few is not padded:
            _refuse_failed_trim(task, parts, _outcome(task, padded, plan, cut))
        if isinstance(parts, LossError) and is_own:  # it is not made in parts as it is as a whole
            raise parts
        if isinstance(parts, Exception):
            continue
        told = True
        if not _differ(whole, parts):
            continue
        if whole.is_random or parts.is_random:
            return False  # other numbers in another cut, and rightly
        # The same rows again must be the same; and what cancels in the sum is held against what is added up.
        again = [_outcome(task, padded, plan, first) for _ in range(_AGAIN)]
        halves = [few.only(half) for half in (range(few.rows // 2), range(few.rows // 2, few.rows))]
        alone = [_outcome(task, half, plan, _Cut(_sizes(half.rows, [most]))) for half in halves]
        sound = [one for one in alone if isinstance(one, _Outcome)]
        if not all(isinstance(one, _Outcome) and not _differ(whole, one) for one in again):
            return False
        if not (found := _differ(whole, parts, *sound)):
            return False
        kept = _outcome(task, padded, plan, cut) if few is not padded else None
        if isinstance(kept, _Outcome) and not _differ(whole, kept):
            raise LossError(
                f"Expected the same loss and gradient from {_name(task)} with less padding, got {found} for "
                f"{few.rows} rows padded and trimmed. {_PADDING}"
            )
        raise LossError(
            f"Expected the same loss and gradient from {_name(task)} for every split, got {found} for "
            f"{few.rows} rows as {first} and as {cut}. {_cause(few, whole.moved)} "
            "ab.check(model, loss, batch) names the place; Step(check=False) skips this."
        )
    return told


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


def _cuts(rows: int, most: int, *, is_mixed: bool) -> list[_Cut]:
    """The reference, then unequal parts, which show a mean of means, then others of one size."""
    if most == rows:
        large = min(rows - 1, -(-5 * rows // 8))
        small = max(1, rows // 4) if rows < 4 else 2
        return [_Cut((rows,)), _Cut((large, rows - large)), _Cut(_sizes(rows, [small]), is_mixed)]
    half = -(-most // 2)
    return [
        _Cut(_sizes(rows, [most])),
        _Cut(_sizes(rows, [most, half] if most + half < rows else [half, most])),
        _Cut(_sizes(rows, [most if is_mixed else half]), is_mixed),
    ]


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
        self.eps = max(torch.finfo(dtype).eps for dtype in (torch.float32, *self._draws.dtypes))

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


def _differ(one: _Outcome, other: _Outcome, *alone: _Outcome) -> str:
    """What differs by more than rounding; empty if nothing does.

    Never less than float32's rounding is allowed for, as many a loss is computed in it whatever the
    parameters are; nor less than what numbers of size 1 leave behind where they cancel.
    """
    eps = max(one.eps, other.eps)
    outcomes = one, other, *alone
    for name in sorted(one.report.terms.keys() & other.report.terms.keys()):
        first, second = one.report.terms[name], other.report.terms[name]
        sizes = [abs(each.report.terms.get(name, 0.0)) for each in outcomes]
        if not math.isfinite(first):  # nothing to say, or the step will
            continue
        # NaN from a part of which the whole is finite is a fault, too: a mean over no valid element.
        if not abs(first - second) <= max(eps**0.5 * max(map(abs, sizes)), 100 * eps):
            return f"{first:.6g} and {second:.6g} for {name!r}"
    apart: dict[str, float] = {}
    for name in one.gradients.keys() | other.gradients.keys():
        pair = one.gradients.get(name), other.gradients.get(name)
        first, second = [torch.zeros(()) if value is None else value for value in pair]
        apart[name] = (first - second).norm().item()
    error, size = math.hypot(*apart.values()), max(each.size for each in outcomes)
    if not math.isfinite(error) or error <= max(max(_LIMIT, 3 * eps**0.5) * size, 100 * eps):
        return ""
    worst = max(apart, key=lambda name: apart[name])
    return f"gradients that differ by {error / size:.2g}, most in {worst}"


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
