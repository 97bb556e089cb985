"""Metrics as folds: sums over all rows, divided once, never a mean of means."""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

from torch import Tensor

from anybatch import core
from anybatch.core import torch_private as private
from anybatch.losses import resolve, split_batch
from anybatch.state import evaluating
from anybatch.step import Step
from anybatch.train.callbacks import TrainerCallback
from anybatch.train.loader import Rows, Stream
from anybatch.train.share import as_batch

Metric = Callable[[Any, Any], core.Total] | core.Fold[Any, Any, Any]
"""A function `(outputs, targets) -> Total` of some rows, or a `Fold` over such pairs."""


def accuracy(outputs: Tensor, targets: Tensor, *, ignore_index: int = -100) -> core.Total:
    """Return the number of correct predictions and of valid targets.

    Args:
        outputs: scores of shape (rows, classes, ...), floating.
        targets: class indices of shape (rows, ...), int64.
        ignore_index: target that does not count.

    Returns:
        A `Total` of two int64 tensors of shape ().

    Example:
        >>> import torch
        >>> scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
        >>> accuracy(scores, torch.tensor([1, 1, -100])).mean().item()
        0.5
    """
    valid = targets != ignore_index
    return core.Total(((outputs.argmax(1) == targets) & valid).sum(), valid.sum())


class Metrics(TrainerCallback):
    """A callback with named metrics of a trainer's validation, as sums over all rows, divided once.

    Args:
        named: functions of (outputs, targets) that return a `Total`, such as `anybatch.accuracy`, or folds.

    Example:
        >>> Metrics(accuracy=accuracy)
        Metrics(accuracy=accuracy)
    """

    def __init__(self, **named: Metric) -> None:
        for name, metric in named.items():
            if not (callable(metric) or hasattr(metric, "merge")):
                raise core.PlanError(
                    f"Expected functions as metrics, got {name}={metric!r}. Pass functions of (outputs, "
                    "targets) that return an ab.Total, as in ab.Metrics(accuracy=ab.accuracy)."
                )
        self.named = named

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metrics by name."""
        return self.named


def metrics_of(callbacks: Sequence[object]) -> dict[str, Metric]:
    """Return the metrics of these callbacks by name; raise PlanError for a name that is taken."""
    found = dict[str, Metric]()
    for each in core.bound(callbacks, "metrics"):
        for name, metric in each().items():
            if name == "loss" or name in found:
                raise core.PlanError(
                    f"Expected metrics with names of their own, got {name!r} "
                    f"{'twice' if name in found else 'beside the loss'}. Give it another name."
                )
            found[name] = metric
    return found


def evaluate(
    step: Step,
    rows: Rows | Stream,
    metrics: Mapping[str, Metric],
    *,
    micro_batch: int | None,
    batch_size: int | None,
) -> dict[str, float]:
    """Return the loss, its terms and metrics of all rows, in evaluation mode, without gradient.

    Modes and random state are restored. The result does not depend on `micro_batch`. A whole-batch loss is
    evaluated on each batch and averaged over rows. A size of None means the size of a loader's items. Ranks
    take turns at the batches, and all return the same values.
    """
    sums: dict[str, core.Total] = {}
    undivided: set[str] = set()
    folds = {name: _as_fold(name, metric) for name, metric in metrics.items()}
    states = {name: fold.init() for name, fold in folds.items()}
    modules = [*step.model.modules(), *step.loss_module.modules()]
    with step.strategy.evaluating(), evaluating(modules), _outputs_of(step) as (model, outputs):
        for totals, is_fixed, micro in _totals(step, model, rows, micro_batch, batch_size):
            undivided.update(totals if is_fixed else ())
            _add(sums, {name: _widened(total) for name, total in totals.items()})
            for name, fold in folds.items():
                states[name] = fold.add(states[name], _pair(outputs, micro))
            outputs.clear()
    gathered = rows.share.gather("a validation", (sums, undivided, states))
    (sums, undivided, states), *others = gathered  # all ranks merge in one order
    for more_sums, more_undivided, more_states in others:
        undivided |= more_undivided
        _add(sums, more_sums)
        states = {name: fold.merge(states[name], more_states[name]) for name, fold in folds.items()}
    values = {name: float(total.sum if name in undivided else total.mean()) for name, total in sums.items()}
    # Like in a step: terms without weight add nothing, and a term may be named "loss".
    used = {name: values[name] for name, total in sums.items() if total.weight}
    values["loss"] = _weighted(used, step.coefficients)
    return values | {name: float(fold.finish(states[name])) for name, fold in folds.items()}


def _add(sums: dict[str, core.Total], more: Mapping[str, core.Total]) -> None:
    for name, total in more.items():
        sums[name] = sums.get(name, core.Total.zero()) + total


def _weighted(means: Mapping[str, float], coefficients: Mapping[str, float]) -> float:
    """Return the sum of means times coefficients (default 1); NaN without means."""
    return math.fsum(coefficients.get(name, 1.0) * one for name, one in means.items()) if means else math.nan


def _totals(
    step: Step, model: Any, rows: Rows | Stream, micro_batch: int | None, batch_size: int | None
) -> Iterator[tuple[dict[str, core.Total], bool, Any]]:
    """Yield of each micro-batch its totals, True if they are sums without divisor, and its rows."""
    loss = resolve(step.loss)
    kinds = {parameter.device.type for parameter in step.model.parameters()} - {"meta"}
    computing = partial(step.precision.computing, kinds)
    # A loss may need whole batches, and the sizes of micro-batches may differ between ranks.
    for group in rows.in_order(batch_size if loss.divided or rows.share.is_many else micro_batch):
        batch = as_batch(group, step)
        sizes = core.cut_sizes(batch.rows, micro_batch or batch.rows)
        whole = loss.along(batch, sizes, model, lambda: None) if loss.divided else nullcontext()
        with ExitStack() as stack:
            with step.precision.arithmetic(), computing():  # for a first pass of the loss
                share = stack.enter_context(whole)
            turns = rows.share.turns(core.Cut.of_sizes(sizes).parts)
            micro_batches = batch.micro_batches([part for part, _ in turns])
            for (micro, index), (_, counts) in zip(micro_batches, turns, strict=True):
                part = loss if share is None else share(index[0], index[-1] + 1)
                with step.precision.arithmetic(), computing():
                    terms = part.evaluate(model, micro)
                if counts:
                    yield *_measured(part, terms), micro


def _measured(part: Any, terms: Any) -> tuple[dict[str, core.Total], bool]:
    fixed = {} if part.divided else part.divisors(core.OpenBatch(), terms, 1) or {}
    weights = fixed or terms.weigh()
    sums = dict(terms.sums)
    if part.divided:  # the mean of a term with weight 0 is NaN
        sums = {name: value * weights[name] if weights[name] else 0 for name, value in sums.items()}
    return {name: core.Total(value, weights[name]) for name, value in sums.items()}, bool(fixed)


class RunningLoss:
    """The loss over the updates of an epoch: each term is a sum of sums over a sum of weights."""

    def __init__(
        self, totals: Mapping[str, Sequence[float]] | None = None, *, dropped: int = 0, skipped: int = 0
    ) -> None:
        self._totals = {name: core.Total(*pair) for name, pair in (totals or {}).items()}
        self.counts = {"dropped": dropped, "skipped": skipped}  # rows left out, steps without update

    @property
    def totals(self) -> dict[str, list[float]]:
        """Sum and weight of each term, for a checkpoint."""
        return {name: [float(total.sum), float(total.weight)] for name, total in self._totals.items()}

    def add(self, report: core.StepReport) -> None:
        """Add an update; terms without weight add nothing."""
        self.counts["dropped"] += report.dropped
        self.counts["skipped"] += not report.updated
        used = {name: weight for name, weight in report.weights.items() if weight}
        _add(self._totals, {name: core.Total(report.terms[name] * one, one) for name, one in used.items()})

    def value(self, coefficients: Mapping[str, float]) -> float:
        """Return the sum of the terms' means times coefficients (default 1); NaN if nothing was added."""
        return _weighted({name: float(one.mean()) for name, one in self._totals.items()}, coefficients)


def _as_fold(name: str, metric: Metric) -> core.Fold[Any, Any, Any]:
    if isinstance(metric, core.Fold):
        return metric

    def measure(pair: tuple[Any, Any]) -> core.Total:
        total = metric(*pair)
        if not isinstance(total, core.Total):
            raise core.LossError(
                f"Expected metric {name!r} to return an ab.Total, got {type(total).__name__}. "
                "Do not return a mean: return ab.Total(values.sum(), values.numel())."
            )
        return _widened(total)

    return core.weighted_mean(measure)


def _widened(total: core.Total) -> core.Total:
    both = total.sum, total.weight
    return core.Total(*[core.accelerator.widened(n) if isinstance(n, Tensor) else n for n in both])


def _pair(outputs: Sequence[Any], micro: Any) -> tuple[Any, Any]:
    if not outputs:
        raise core.LossError(
            f"Expected the loss to call the model, so that metrics see its outputs, got {len(outputs)} "
            "calls. Call model(...), not its forward or its parts, or leave the metrics out."
        )
    return _single(outputs[-1]), _single(split_batch(micro)[1])


def _single(values: Any) -> Any:
    return values[0] if isinstance(values, tuple) and len(cast("tuple[Any, ...]", values)) == 1 else values


class _OutputRecorder:
    def __init__(self, model: Any, record: Callable[[Any], None]) -> None:
        self._model, self._record = model, record

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        output = self._model(*inputs, **named)
        self._record(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextmanager
def _outputs_of(step: Step) -> Generator[tuple[Any, list[Any]]]:
    """Yield the model, and a list that receives its outputs, so that metrics need no second forward."""
    outputs: list[Any] = []
    if any(map(private.is_static, step.model.modules())):  # a hook would cause a recompilation
        yield _OutputRecorder(step.model, outputs.append), outputs
    else:
        with step.model.register_forward_hook(lambda module, inputs, value: outputs.append(value)):
            yield step.model, outputs
