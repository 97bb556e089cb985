"""Outcome: the loss and finished gradient of some rows in one split, and its distance from another"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch import core
from anybatch.core import accelerator, torch_private as private
from anybatch.engine import Plan, Reader, Task, carry_out
from anybatch.losses import ModelTerms
from anybatch.precision import LossScale, Precision
from anybatch.state import Effects, SeenDraws, eager, plain_kernels, rng
from anybatch.trial.bench import Bench, Place
from anybatch.trial.replay import Replayed, RowPart
from anybatch.trial.tolerance import limit_of, shortest_of

_LIMIT = 1e-2  # a smaller relative error of a float32 gradient may be rounding in a deep network
_SIGNS = 8  # rows of a sketch
_SHOWN = 8  # parts of a split that are written out


class Outcome:
    """The loss and the finished gradient of some rows in one split.

    The plan's rows and sizes are replaced by `sizes`. `draws` sees all operations, and no longer watches once
    the gradient is finished. Optimizers are stepped unless `is_dry`; then everything is put back. Without
    `has_graph` only the loss is computed.

    Raises:
        OutOfMemoryError: a micro-batch did not fit.
        Exception: an error of the model or the loss.
    """

    def __init__(
        self,
        task: Task,
        batch: core.Batch,
        plan: Plan,
        sizes: tuple[int, ...],
        draws: SeenDraws,
        *,
        is_dry: bool,
        has_graph: bool = True,
    ) -> None:
        self.gradient: dict[str, Tensor] = {}
        self.rows, self.draws = batch.rows, draws
        task, effects = task.alone(), Effects()  # first, so that its loss gathers no rows of other ranks
        # A step that looks takes more, which a reading of memory has to see.
        looks = not isinstance(task.reader, None | _AfterForward)
        effects.begin(task.network.modules, looks=looks)
        task = replace(
            task,
            loss=ModelTerms(task.loss.call) if isinstance(task.loss, ModelTerms) else task.loss,
            effects=effects,
            scale=LossScale(Precision()),  # a dry run neither looks for overflow nor divides by a scale
            callbacks=core.Callbacks.of([self]),
            optimizers=task.optimizers if has_graph else (),
            schedulers=(),
            before_cut=_allowed,
        )
        plan = replace(plan, rows=batch.rows, micro_batch=max(sizes), cut=sizes, non_finite="raise")
        with torch.set_grad_enabled(has_graph):
            self.report = carry_out(plan, task, batch, is_dry=is_dry)
        if self.report.too_large:  # and so it was cut otherwise
            raise core.OutOfMemoryError(f"Expected {max(sizes)} rows to fit, got none left. Take fewer.")
        self.dtypes: set[torch.dtype] = draws.dtypes | {p.dtype for p in task.network.parameters}
        coefficients = task.loss.coefficients
        terms = {name: value for name, value in self.report.terms.items() if self.report.weights.get(name)}
        #: The loss with all terms positive; rounding of the loss is relative to it.
        self.scale = math.fsum(abs(coefficients.get(name, 1.0) * value) for name, value in terms.items())

    def gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Keep the gradient."""
        self.draws.is_watching = False
        self.gradient = {name: self.kept(value.detach()) for name, value in gradients.items()}

    def kept(self, gradient: Tensor) -> Tensor:
        """Return a dense copy of a gradient."""
        return gradient.to_dense() if gradient.is_sparse else gradient.clone()

    @property
    def is_weighed(self) -> bool:
        """True if any row has weight."""
        return any(self.report.weights.values())

    @cached_property
    def size(self) -> float:
        """The norm of the gradient."""
        return math.hypot(*_norms([*self.gradient.values()]))


class Distance(NamedTuple):
    """The relative errors of gradient and loss, and of the parameter whose gradient differs most."""

    gradient: float
    loss: float
    worst: str
    own: float


def distance(one: Outcome, other: Outcome, *alone: Outcome) -> Distance:
    """Return how far `other` is from `one`, relative to the largest of `one` and `alone`.

    Args:
        one: the reference.
        other: the same rows in another split.
        alone: parts of the rows. In a trained model the gradients of rows cancel in the sum, and the size of
            a part tells how large rounding is.
    """
    names = sorted(one.gradient.keys() | other.gradient.keys())
    pairs = [(one.gradient.get(name), other.gradient.get(name)) for name in names]
    differences = [b if a is None else a if b is None else a - b for a, b in pairs]
    apart = dict(zip(names, _norms([d for d in differences if d is not None]), strict=True))
    worst, known = max(apart, key=lambda name: apart[name], default=""), (one, *alone)
    pair = [each.gradient[worst].norm().item() for each in (one, other) if worst in each.gradient]
    both_nan = math.isnan(one.report.loss) and math.isnan(other.report.loss)
    return Distance(
        _ratio(math.hypot(*apart.values()), max(each.size for each in known)),
        0.0
        if both_nan
        else _ratio(
            abs(one.report.loss - other.report.loss),
            max(abs(one.report.loss), *[each.scale for each in known]),
        ),
        worst,
        _ratio(apart.get(worst, 0.0), max(pair, default=0.0)),
    )


def _norms(values: list[Tensor]) -> list[float]:
    return [one.item() for one in private.foreach_norm(values)] if values else []


def _ratio(difference: float, size: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else (math.inf if difference else 0.0)


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of each micro-batch; every second row comes first where they are interleaved."""

    sizes: tuple[int, ...]
    is_interleaved: bool = False

    def __str__(self) -> str:
        sizes = self.sizes if len(self.sizes) <= _SHOWN else (*self.sizes[:2], "...", self.sizes[-1])
        return "+".join(map(str, sizes)) + " in another order" * self.is_interleaved


class WatchedBatch:
    """Rows of a batch, which tell when a micro-batch begins and which rows of `part` it has."""

    def __init__(
        self,
        inner: core.Batch,
        part: RowPart,
        draws: SeenDraws,
        begin: Callable[[RowPart], None],
        *,
        copies: bool = False,
    ) -> None:
        self._inner, self._part, self._draws, self._begin, self._copies = inner, part, draws, begin, copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def micro_batches(self, parts: Sequence[Sequence[int]]) -> Iterator[core.Micro]:
        """Yield the rows of each part."""
        micros = self._inner.micro_batches(parts)
        for index in parts:
            dtypes = set(self._draws.dtypes)
            micro = next(micros)
            if self._copies:
                micro = micro._replace(rows=core.copied(micro.rows))
            self._draws.dtypes = dtypes  # leave out those of `collate`
            nbytes = sum(one.nbytes for one in core.tensors_in(micro.rows))
            self._draws.largest = max(self._draws.largest, nbytes)
            self._begin(self._part.only(index))
            yield micro
            del micro  # before the next one is made


class Looked(Outcome):
    """An outcome of the caller's own model, which is restored; its gradients are kept as sketches.

    Attributes:
        written: tensors that are not trained, and were written to or given other memory.
        draws_process: True if a forward draws from Python's or NumPy's stream.
        is_random: True if it draws numbers that cannot be replayed by rows.
        draws: True if it draws random numbers of torch.
        is_quiet: True if it draws nothing and writes to nothing.
        is_thorough: True if backward was watched, too, which may run forwards again.
        mixes: True if it chooses rows at random.
        values: at `places`, before the first micro-batch and after the last.
    """

    def __init__(
        self,
        bench: Bench,
        plan: Plan,
        cut: Split,
        *,
        like: Replayed | None = None,
        disturbed: Sequence[Tensor] = (),
        places: Sequence[Place] = (),
        is_watched: bool = True,
        is_thorough: bool = False,
        has_graph: bool = True,
        has_copies: bool = True,
    ) -> None:
        task, few = bench.task, bench.rows
        if task.reader is None and not is_thorough:
            task = replace(task, reader=_AfterForward(self._rest))
        self.cut, self._places, self.values = cut, places, list[tuple[Any, Any]]()
        self._before = [place.read(place.key) for place in places]
        self.is_thorough = is_thorough
        self.buffers: dict[str, float] = {}
        order: Sequence[int] = range(few.rows)
        if cut.is_interleaved:
            order = [*order[::2], *order[1::2]]
            few = few.only(order)
        # Rows that are not copied are put back if something writes to them.
        reached = (*bench.tensors, *task.network.everyone, *(() if has_copies else few.leaves))
        self.seen = _Watched(reached, like)
        self.seen.is_watching, self._watch = is_watched, ExitStack()  # left after each forward
        part = RowPart(tuple(order), few.rows)
        # Without a graph each micro-batch is copied by itself: a forward may write to its rows.
        few = few.copied() if has_graph and has_copies else few
        copies = has_copies and not has_graph
        watched: Any = WatchedBatch(few, part, self.seen, self._begin, copies=copies)
        self._named, self._has_drawn, self.draws_process = task.model, False, False
        try:
            self.seen.disturb(disturbed)
            is_recurrent = any(isinstance(one, nn.RNNBase) for one in task.network.modules)
            kernels = plain_kernels(is_recurrent=is_recurrent) if is_watched else eager()
            with kernels, self._watch:
                super().__init__(task, watched, plan, cut.sizes, self.seen, is_dry=True, has_graph=has_graph)
        finally:
            self.written = self.seen.put_back()
        self.is_quiet, self.draws = self.seen.is_quiet, self.seen.has_drawn or self._has_drawn
        self.dtypes |= _short_of_devices(task, plan)
        self.mixes = self.seen.others > 0
        self.is_random = self.seen.has_missed() or self.draws_process
        self.is_random |= self._has_drawn and not self.seen.total

    def micro_batch(self, event: core.MicroBatchDone) -> None:
        """Note what it drew; a forward that draws or writes does so in the first one."""
        start, now = self.seen.recorded.start, rng.capture(rng.of_process())
        self._has_drawn |= not rng.is_same(start._replace(others=()), now)
        self.draws_process |= not rng.is_same(start, now, of=rng.of_process())
        self._rest()
        if self.seen.is_quiet:
            self.seen.is_watching = False

    def _begin(self, part: RowPart) -> None:
        if self.seen.is_watching:
            self.seen.begin_part(part)
            self._rest()
            self._watch.enter_context(self.seen)

    def _rest(self) -> None:
        self._watch.close()

    def gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Keep the gradient, the norms of buffers that were written to, and the values at the places."""
        super().gradients(gradients)
        now = [place.read(place.key) for place in self._places]
        self.values = [*zip(self._before, now, strict=True)]
        if not self.seen.is_quiet:
            self.buffers = {
                name: accelerator.widened(one.detach()).norm().item()
                for name, one in self._named.named_buffers()
                if self.seen.has_written(one)
            }

    def kept(self, gradient: Tensor) -> Tensor:
        """Return a few sums of the rows of a gradient with random signs, of the same norm on average.

        The difference of two sketches is that of the two gradients, in little memory: Alon, Matias and
        Szegedy 1999, "The Space Complexity of Approximating the Frequency Moments", section 2.2.
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


class _AfterForward(Reader):
    """Stops watching after each forward: backward draws only where it runs one again."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self.forward_done = stop


class _Watched(Replayed):
    """Copies of tensors from before a forward or a loss writes to them, as a momentum encoder does."""

    def __init__(self, tensors: Iterable[Tensor], like: Replayed | None) -> None:
        super().__init__(without_dropout=True, like=like)
        self._missed, self.total = False, 0
        kept = [one for one in tensors if _is_strided(one) and not is_lazy(one) and one.numel()]
        self._places = {_place_of(one): (one, one.detach()) for one in kept}  # which keeps the memory
        self._copies: dict[int, Tensor] = {}
        self.has_drawn = False

    def write(self, values: Sequence[Any]) -> None:
        for value in filter(_is_strided, core.tensors_in(values)):
            self._keep(_place_of(value))

    def _keep(self, place: int) -> None:
        if place in self._places and place not in self._copies:
            with private.disable_current_modes():
                self._copies[place] = _memory_of(self._places[place][1]).clone()

    def disturb(self, tensors: Sequence[Tensor]) -> None:
        """Give tensors other values until `put_back`: trained ones the nearest."""
        for one in tensors:
            self._keep(_place_of(one))
            with torch.no_grad():
                one.copy_(one.nextafter(one.roll(1)) if one.requires_grad else 1.5 * one.roll(1))

    def draw(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.has_drawn = True
        return super().draw(func, args, kwargs)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make it of this class: a trial runs nothing compiled."""
        return private.TorchDispatchMode.__new__(cls)

    def begin_part(self, part: RowPart) -> None:
        self.has_missed()
        self.begin(part)

    def has_missed(self) -> bool:
        """Return True if draws so far were not replayed, or others than the whole's were made."""
        self._missed |= self.unreplayed > 0 or self.count not in (0, self.recorded.count)
        self.total += self.count
        self.count = 0
        return self._missed

    def has_written(self, tensor: Tensor) -> bool:
        """Return True if memory of a tensor was written to, or it has other memory now."""
        place = _place_of(tensor)
        return place in self._copies or place not in self._places

    @property
    def is_quiet(self) -> bool:
        """True if nothing was drawn and nothing written to."""
        return not self.has_drawn and not self._copies

    def put_back(self) -> list[Tensor]:
        """Put memory and values back; return tensors that had others, but for trained ones."""
        written: list[Tensor] = []
        with torch.no_grad():
            for place, (tensor, found) in self._places.items():
                is_replaced = _place_of(tensor) != place
                if is_replaced:  # by `tensor.data = ...`
                    tensor.data = found
                if place in self._copies:
                    _memory_of(found).copy_(self._copies[place])
                if (is_replaced or place in self._copies) and not tensor.requires_grad:
                    written.append(tensor)
        return written


def _is_strided(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _place_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memory_of(tensor: Tensor) -> Tensor:
    """Return all of the memory behind a tensor, of which others may be views."""
    numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((numbers,), (1,), 0)


class Difference(NamedTuple):
    """A difference by more than rounding; a small one may still be that of a deep network."""

    words: str
    dtype: str
    is_small: bool


def differ(one: Outcome, other: Outcome, *alone: Outcome) -> Difference | None:
    """Return the difference of two outcomes; None if it is rounding.

    Rounding is at least that of numbers of size 1, which may cancel.
    """
    dtypes = one.dtypes | other.dtypes
    small = losses_differ([each.report for each in (one, other, *alone)], dtypes, one.rows)
    if small and not small.is_small:
        return small
    eps, rounding, is_double, named = _scale_of(dtypes, one.rows)
    size, far = max(each.size for each in (one, other, *alone)), distance(one, other, *alone, other)
    if not math.isfinite(far.gradient) or far.gradient * size <= max(rounding * size, 100 * eps):
        return small
    is_small = not is_double and far.gradient <= max(_LIMIT, 3 * eps**0.5)
    words = f"gradients that differ by {far.gradient:.2g}, most in {far.worst} (by {far.own:.2g} of its own)"
    return Difference(words, named, is_small)


def losses_differ(
    reports: Sequence[core.StepReport], dtypes: set[torch.dtype], rows: int
) -> Difference | None:
    """Return the first large difference of the terms of the first two losses; None if it is rounding.

    Where the terms have other names, as in a model's own loss without a graph, their sums are compared.
    """
    eps, rounding, is_double, named = _scale_of(dtypes, rows)
    terms: list[Mapping[str, float]] = [each.terms for each in reports]
    if terms[0].keys() != terms[1].keys():
        terms = [{"loss": each.loss} for each in reports]
    one, other, small = terms[0], terms[1], None
    for name in sorted(one):
        first, second = one[name], other[name]
        size = max(abs(each.get(name, 0.0)) for each in terms)
        if not math.isfinite(first):  # the step itself will refuse it
            continue
        # NaN from a part of which the whole is finite is a fault, too: a mean over no valid element.
        if not abs(first - second) <= max(rounding * size, 100 * eps):
            is_small = not is_double and abs(first - second) <= max(eps**0.5 * size, 100 * eps)
            digits = next((n for n in (6, 9) if f"{first:.{n}g}" != f"{second:.{n}g}"), 17)
            said = f"{first:.{digits}g} and {second:.{digits}g} for {name!r}"
            found = Difference(said, named, is_small)
            if not is_small:
                return found
            small = small or found
    return small


def _scale_of(dtypes: set[torch.dtype], rows: int) -> tuple[float, float, bool, str]:
    """Return the step between numbers, the rounding of a sum, and the name of the shortest dtype."""
    shortest = shortest_of(dtypes)
    rounding, named = limit_of([shortest], rows), str(shortest).removeprefix("torch.")
    return torch.finfo(shortest).eps, rounding, shortest == torch.float64, named


def _short_of_devices(task: Task, plan: Plan) -> set[torch.dtype]:
    """Return float16 if float32 is multiplied with as short a mantissa (TF32)."""
    is_short = plan.precision.compute == "tf32"
    if task.network.kinds - {"cpu"} and not is_short:
        try:
            is_short = torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
        except RuntimeError:  # of switches by operator, which torch does not read as one
            is_short = True
    return {torch.float16} if is_short else set()


def _allowed(task: Task, batch: core.Batch, plan: Plan, rows: int) -> None:
    """Allow any cut of a trial run."""


def outcome_of(bench: Bench, plan: Plan, cut: Split, **options: Any) -> "Looked | Exception":
    """Return the outcome of a split, or its error: a model may refuse a part that no step sends.

    Raises:
        OutOfMemoryError: a micro-batch did not fit.
    """
    try:
        return Looked(bench, plan, cut, **options)
    except core.OutOfMemoryError:
        raise
    except Exception as error:
        return error


@cache
def _signs(rows: int) -> Tensor:
    drawn = torch.randint(2, (_SIGNS, rows), generator=torch.Generator().manual_seed(rows))
    return (2.0 * drawn - 1) / _SIGNS**0.5
