"""One pass of a step over some rows, in one cut, and what it comes to: loss, gradient, terms."""

import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch import tree
from anybatch.batch import Batch, Collate, SampleBatch, TensorBatch, cut_sizes
from anybatch.errors import AnybatchError
from anybatch.events import StepReport
from anybatch.execute import execute
from anybatch.losses.resolve import resolve
from anybatch.losses.terms import Terms
from anybatch.probe.choose import subset
from anybatch.probe.copies import Subject, widen
from anybatch.probe.draws import Draws
from anybatch.probe.rows import Part
from anybatch.step import Step
from anybatch.total import Total

Watch = Callable[[nn.Module], "Callable[[Part], None]"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """Rows, and how they are parted.

    Args:
        given: nested tensors, or samples.
        micro_batch: rows of each micro-batch.
        part: which rows of the whole batch these are.
        collate: for samples.
    """

    given: Any
    micro_batch: int
    part: Part
    collate: Collate | None = None

    @property
    def parts(self) -> list[Part]:
        """The rows of each micro-batch."""
        ends = [0]
        for size in cut_sizes(len(self.part.rows), self.micro_batch):
            ends.append(ends[-1] + size)
        return [Part(self.part.rows[start:stop], self.part.total) for start, stop in itertools.pairwise(ends)]

    @property
    def words(self) -> str:
        """The sizes, as in 3+3+2."""
        sizes = [len(part.rows) for part in self.parts]
        return "1 by 1" if sizes[:1] == [1] else "+".join(map(str, sizes))

    def only(self, rows: Sequence[int]) -> "Cut":
        """Some of the rows, uncut.

        Args:
            rows: their places in this cut.
        """
        part = Part(tuple([self.part.rows[row] for row in rows]), self.part.total)
        given = subset(self.given, self.collate, rows)
        return replace(self, given=given, micro_batch=len(rows), part=part)

    def batch(self, dtype: torch.dtype | None) -> Batch:
        """The batch, of tensors of its own, in which floating numbers have this dtype."""

        def own(leaf: Tensor) -> Tensor:
            return widen(leaf.detach().clone(), dtype)

        if self.collate is None:
            return TensorBatch(tree.map_leaves(own, self.given))
        collate = self.collate
        return SampleBatch(self.given, lambda samples: tree.map_leaves(own, collate(samples)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passed:
    """What a pass came to.

    Attributes:
        loss: of all its rows.
        gradients: by the parameter's name.
        weighed: False where no row had weight.
        scale: what its terms come to without their signs: an error of the loss is held against it.
        strangers: random draws of its last micro-batch that are not replayed.
        bare: whether the loss returned means that have lost their denominators.
        error: why the pass did not come to its end, if it did not.
    """

    loss: float = math.nan
    gradients: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    weighed: bool = True
    scale: float = 0.0
    strangers: int = 0
    bare: bool = False
    error: Exception | None = None


class Observed(nn.Module):
    """A user's function, whose totals are noted; a bare mean counts as a total of weight 1.

    That is what a loop that adds up means makes of it.

    Args:
        function: `(model, micro)` to totals or bare scalars.
    """

    def __init__(self, function: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.bare = False

    def forward(self, model: nn.Module, micro: Any) -> Any:
        """The function's totals."""
        value = self.function(model, micro)
        if _is_scalar(value):
            self.bare = True
            return Total(value, 1)
        if isinstance(value, Mapping):
            named = cast("Mapping[str, Any]", value)
            bare = [name for name, one in named.items() if _is_scalar(one)]
            self.bare = self.bare or bool(bare)
            return {name: Total(one, 1) if name in bare else one for name, one in named.items()}
        return value


class Recorder(Optimizer):
    """An optimizer that changes nothing and keeps the gradients it is given."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self._named = dict(named)
        self.gradients: dict[str, Tensor] = {}
        super().__init__(list(self._named.values()), {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore
        """Keep the gradients."""
        found = {name: p.grad for name, p in self._named.items()}
        self.gradients = {
            name: (g.to_dense() if g.is_sparse else g).clone() for name, g in found.items() if g is not None
        }


class _Step(Step):
    """A step over a batch that says which micro-batch it is at."""

    def over(self, batch: Batch) -> StepReport:
        """One logical step."""
        return execute(self.plan(batch.rows), self._task(), batch)


class _Told:
    """A batch that tells when each micro-batch is taken."""

    def __init__(
        self, inner: Batch, parts: Sequence[Part], draws: Draws, tell: Callable[[Part], None]
    ) -> None:
        self._inner, self._parts, self._draws, self._tell = inner, parts, draws, tell
        self.rows = inner.rows
        self.given, self.whole = inner.given, inner.whole

    def head(self, rows: int) -> Batch:
        """The first rows of the batch inside."""
        return self._inner.head(rows)

    def cut(self, micro_batch: int) -> Iterator[Any]:
        """The micro-batches of the batch inside."""
        micros = self._inner.cut(micro_batch)
        for part in self._parts:
            seen = set(self._draws.dtypes)
            micro = next(micros)
            self._draws.dtypes = seen  # what a `collate` computes in is not the model's
            self._draws.begin(part)
            self._tell(part)
            yield micro


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bench:
    """Where passes are made: all on the same model, from the same random state.

    Args:
        subject: the model and the loss.
        draws: what is drawn.
        batch_norm: as for `anybatch.Step`.
    """

    subject: Subject
    draws: Draws
    batch_norm: str | None = "micro"

    @contextmanager
    def fresh(self) -> Generator[tuple[nn.Module, Any]]:
        """Model and loss for one pass, observed, while draws are replayed."""
        default = torch.get_default_dtype()
        if self.subject.dtype is not None:
            torch.set_default_dtype(self.subject.dtype)  # for what the model makes itself: states, masks
        try:
            with self.subject.fresh() as (model, loss), torch.enable_grad(), self.draws:
                yield model, _observe(loss)
        finally:
            torch.set_default_dtype(default)

    def run(self, cut: Cut, watch: Watch = lambda model: lambda part: None) -> Passed:
        """Make a pass.

        Args:
            cut: over which rows, in which parts.
            watch: takes the model before it runs, and returns what is told each part as it begins.

        Returns:
            What came of it, which may be an error.
        """
        try:
            batch = cut.batch(self.subject.dtype)
        except AnybatchError as error:
            return Passed(error=error)
        with self.fresh() as (model, loss):
            recorder = Recorder(self.subject.named)
            told = watch(model)
            try:
                step = _Step(model, loss, recorder, micro_batch=cut.micro_batch, batch_norm=self.batch_norm)
                report = step.over(_Told(batch, cut.parts, self.draws, told))
            except Exception as error:  # the user's code may raise anything
                return Passed(error=error)
        used = [name for name, weight in report.weights.items() if weight]
        scale = math.fsum(abs(step.coefficients.get(name, 1.0) * report.terms[name]) for name in used)
        return Passed(
            loss=report.loss,
            gradients=recorder.gradients,
            weighed=report.updated,
            scale=scale,
            strangers=self.draws.strangers,
            bare=isinstance(loss, Terms) and isinstance(loss.function, Observed) and loss.function.bare,
        )


def _observe(loss: Any) -> Any:
    resolved = resolve(loss)
    return replace(resolved, function=Observed(resolved.function)) if isinstance(resolved, Terms) else loss


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0
