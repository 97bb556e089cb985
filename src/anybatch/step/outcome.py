"""A few rows carried out in one split: their loss, gradient and buffers, compared with another split"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch.core import Batch, Event, OutOfMemoryError
from anybatch.core import torch_private as private
from anybatch.engine import Observer, Plan, Task, carry_out
from anybatch.losses import ModelLoss, ModelTerms, SummedLoss
from anybatch.precision import LossScale, Precision
from anybatch.state import Effects, SeenDraws, plain_kernels
from anybatch.step.tolerance import limit_of

_LIMIT = 1e-2  # a smaller relative error of a float32 gradient may be rounding in a deep network
_SIGNS = 8  # rows of a sketch


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of each micro-batch; every second row comes first where they are interleaved."""

    sizes: tuple[int, ...]
    is_interleaved: bool = False

    def __str__(self) -> str:
        return "+".join(map(str, self.sizes)) + " in another order" * self.is_interleaved


def only_rows(task: Task, batch: Batch, rows: Sequence[int]) -> tuple[Task, Batch]:
    """Return a batch of these rows, and the task with the settings that its loss has for them."""
    if isinstance(task.loss, SummedLoss) and task.loss.has_entries_per_row(batch):
        task = replace(task, loss=task.loss.of_rows(batch, rows))
    return task, batch.only(rows)


class Outcome(Observer):
    """Loss and gradient of some rows in one cut; the model, its gradients and all else are as before."""

    def __init__(self, task: Task, few: Batch, plan: Plan, cut: Split, *, is_watched: bool) -> None:
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
        chosen = few
        if cut.is_interleaved:
            own, chosen = only_rows(own, few, [*order[::2], *order[1::2]])
        like = replace(plan, rows=few.rows, micro_batch=max(cut.sizes), cut=cut.sizes, non_finite="raise")
        self._model, self._versions, self.moved = task.model, _versions(task.model), ""
        self.buffers: dict[str, float] = {}
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
        self.is_random = bool(draws)
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


class Difference(NamedTuple):
    """A difference by more than rounding; a small one may still be that of a deep network."""

    words: str
    dtype: str
    is_small: bool


def differ(one: Outcome, other: Outcome, *alone: Outcome) -> Difference | None:
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
            found = Difference(f"{first:.6g} and {second:.6g} for {name!r}", named, is_small)
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
    return Difference(f"gradients that differ by {error / size:.2g}, most in {worst}", named, is_small)


def _short_of_devices(task: Task, plan: Plan) -> set[torch.dtype]:
    """Return float16 where float32 is multiplied with as short a mantissa (TF32)."""
    is_short = plan.precision.compute == "tf32"
    if task.kinds - {"cpu"} and not is_short:
        try:
            is_short = torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
        except RuntimeError:  # of switches by operator, which torch does not read as one
            is_short = True
    return {torch.float16} if is_short else set()


def _allowed(task: Task, batch: Batch, plan: Plan, rows: int) -> None:
    """Rows may be cut: where memory runs out the report says so."""


def outcome_of(
    task: Task, few: Batch, plan: Plan, cut: Split, *, is_watched: bool = True
) -> "Outcome | Exception":
    """What comes of a cut, or its error: a step meets that again, or would not meet it.

    A model may refuse a single row, which a step need not send.
    """
    try:
        return Outcome(task, few, plan, cut, is_watched=is_watched)
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
