"""One pass of a step over some rows, in one cut, and what it comes to: loss, gradient, terms."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.check.copies import Subject
from anybatch.check.cut import Cut
from anybatch.check.draws import Draws, plain_kernels
from anybatch.check.observed import bare_terms, observe
from anybatch.check.rows import Part
from anybatch.core import AnybatchError, Batch, Event, StepReport, cut_sizes
from anybatch.engine import execute
from anybatch.step import Step

Watch = Callable[[nn.Module], "Callable[[Part], None]"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passed:
    """What a pass came to.

    Attributes:
        loss: of all its rows.
        gradients: by the parameter's name.
        weighed: False where no row had weight.
        scale: what its terms come to without their signs: an error of the loss is held against it.
        largest: norm of the gradient where it was largest on the way, 0 where nobody knows: its rounding.
        means: the value of each term.
        calls: what watched it.
        strangers: random draws of its last micro-batch that are not replayed.
        bare: terms of which the loss returned means that have lost their denominators.
        error: why the pass did not come to its end, if it did not.
    """

    loss: float = math.nan
    gradients: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    weighed: bool = True
    scale: float = 0.0
    largest: float = 0.0
    means: Mapping[str, float] = field(default_factory=dict[str, float])
    calls: Any = None
    strangers: int = 0
    bare: frozenset[str] = frozenset()
    error: Exception | None = None


class Recorder(Optimizer):
    """An optimizer that changes nothing and keeps the gradients it is given."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self._named = dict(named)
        self.gradients: dict[str, Tensor] = {}
        super().__init__(list(self._named.values()), {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As it is: torch's own function would load its compiler first, which takes a second."""
        self.param_groups.append(param_group)

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
        return execute(self.plan(batch.rows), self.task(), batch)


class _Told:
    """A batch that tells when each micro-batch is taken."""

    def __init__(
        self, inner: Batch, parts: Sequence[Part], draws: Draws, tell: Callable[[Part], None]
    ) -> None:
        self._inner, self._parts, self._draws, self._tell = inner, parts, draws, tell
        self.rows = inner.rows
        self.given, self.whole = inner.given, inner.whole
        self.like, self.draws = inner.like, inner.draws

    def head(self, rows: int) -> Batch:
        """The first rows of the batch inside."""
        return self._inner.head(rows)

    def cut(self, micro_batch: int) -> Iterator[Any]:
        """The micro-batches of the batch inside."""
        return self.parts(cut_sizes(self.rows, micro_batch))

    def parts(self, sizes: Sequence[int], start: int = 0) -> Iterator[Any]:
        """Parts of the batch inside."""
        micros = self._inner.parts(sizes, start)
        rows = [row for part in self._parts for row in part.rows]
        for size in sizes:
            part = Part(tuple(rows[start : start + size]), self._parts[0].total)
            start += size
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
            with self.subject.fresh() as (model, loss), torch.enable_grad(), plain_kernels(), self.draws:
                yield model, observe(loss)
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
            return Passed(error=error, calls=watch)
        with self.fresh() as (model, loss):
            recorder = Recorder(self.subject.named)
            told = watch(model)
            sizes: list[float] = []

            def measure(event: Event) -> None:
                if not isinstance(event, StepReport):
                    sizes.append(norm(p.grad for p in self.subject.named.values() if p.grad is not None))

            try:
                step = _Step(
                    model,
                    loss,
                    recorder,
                    micro_batch=cut.micro_batch,
                    batch_norm=self.batch_norm,
                    listeners=[measure],
                )
                report = step.over(_Told(batch, cut.parts, self.draws, told))
            except Exception as error:  # the user's code may raise anything
                return Passed(error=error, calls=watch)
        used = [name for name, weight in report.weights.items() if weight]
        scale = math.fsum(abs(step.coefficients.get(name, 1.0) * report.terms[name]) for name in used)
        return Passed(
            loss=report.loss,
            gradients=recorder.gradients,
            weighed=report.updated,
            scale=scale,
            # The sum may have been divided only at the end.
            largest=max(sizes) / sizes[-1] * norm(recorder.gradients.values()) if sizes[-1] else 0.0,
            means=report.terms,
            calls=watch,
            strangers=self.draws.strangers,
            bare=bare_terms(loss),
        )


def norm(tensors: Iterable[Tensor]) -> float:
    """The 2-norm of all entries.

    Example:
        >>> norm([torch.tensor([3.0]), torch.tensor([4.0])])
        5.0
    """
    dense = [value.detach().to_dense() if value.is_sparse else value.detach() for value in tensors]
    return math.hypot(*[torch.linalg.vector_norm(value).item() for value in dense])
