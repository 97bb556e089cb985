"""Gradient flow: gradient sizes of each layer, and update sizes relative to its weights."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch import core
from anybatch.core import torch_private as private
from anybatch.losses import LossLike, module_of
from anybatch.observe.figure import checked
from anybatch.observe.flow_figures import FIGURES, Figures, Flow
from anybatch.observe.flow_picture import draw
from anybatch.observe.measure import Table, norms_of, sizes_of, to_host
from anybatch.parallel import refuse_sharded, unwrapped
from anybatch.step import DEFAULT, Options, Step, dry_run, known_keywords

_MODEL, _LOSS = "(model)", "(loss)"  # parameters of no submodule


class GradientFlow(core.Callback):
    """A callback that records the gradient flow of a training: `Step(..., callbacks=[flow])`.

    The gradients are those of the whole batch, before clipping, for any cut. The weights are bit-identical
    to a training without it. A recorded update costs one more synchronization of the device, and a copy of
    the weights during the update.

    Args:
        model: the model of the step.
        every: record the first update and then every n-th.
        ratio: compare the weights before and after the update; False saves the copy. If memory does not
            suffice for the copy, the ratios of that update are None.
        limit: most records in `history`. When it is full, every second record is dropped, and the interval is
            doubled, so that the records cover the whole training.

    Attributes:
        history: the records, oldest first.
        last: the figures of the last recorded gradients, also if no update followed, as with NaN; None before
            the first.

    Raises:
        PlanError: the model is not the step's; raised by the step, which then makes no update.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> flow = GradientFlow(model, every=1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = Step(model, nn.MSELoss(), optimizer, micro_batch=4, callbacks=[flow])
        >>> report = step((torch.randn(8, 3), torch.randn(8, 1)))
        >>> flow.last.layers, len(flow.history)
        (('0', '2'), 1)

    Source: for the ratio, about 1e-3 is a common value: Karpathy, "CS231n: neural networks, part 3", ratio of
    weights to updates.
    """

    name = "flow"

    def __init__(self, model: nn.Module, *, every: int = 10, ratio: bool = True, limit: int = 256) -> None:
        core.check_whole("every", every, least=1)
        core.check_whole("limit", limit, least=2)
        self.model, self.every, self.ratio, self.limit = model, every, ratio, limit
        self.history: list[Flow] = []
        self.updates = 0  # updates so far
        self._kept_every = every
        self._seen: _FlowReading | None = None
        self._last: Flow | None = None

    @property
    def last(self) -> Flow | None:
        """The figures of the last recorded gradients."""
        if self._seen is not None:
            self._last, self._seen = self._seen.flow(), None
        return self._last

    def gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Measure the gradients, and copy the weights."""
        self._seen = None  # an undone attempt may have left one
        if self.updates % self.every == 0:
            self._seen = _FlowReading(self.model, gradients, keeps_weights=self.ratio)

    def parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Compare the weights with the copy, and store the record."""
        if self._seen is not None:
            self._seen.compare(parameters)
        self._store()

    def update(self, report: core.StepReport) -> None:
        """Store the record of a gradient that an `ab.BatchLoss` hands over; it has no ratio."""
        if not report.updated and math.isfinite(report.grad_norm):
            self._store()

    def _store(self) -> None:
        self.updates += 1
        if self._seen is None:
            return
        self._last, self._seen = replace(self._seen.flow(), update=self.updates), None
        if (self.updates - 1) % self._kept_every == 0:
            self.history.append(self._last)
        if len(self.history) > self.limit:
            del self.history[1::2]
            self._kept_every *= 2

    def record(self) -> Mapping[str, Any]:
        """Return the figures of the last update, if it was recorded."""
        found = self._last if self._seen is None else None
        return found.record() if found is not None and 0 < found.update == self.updates else {}

    def state_dict(self) -> dict[str, int]:
        """Return the number of updates, so that a resumed run records the same ones; empty if 0."""
        return {"updates": self.updates} if self.updates else {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a `state_dict`, with an empty history."""
        self.updates = state["updates"]
        self.history.clear()

    def draw(self, path: str | Path, *, title: str = "gradient flow") -> Path:
        """Draw the last record, and below it all of `history`; return the path.

        Args:
            path: file of the picture, ending in .png, .svg or .pdf.
            title: title of the picture.

        Raises:
            PlanError: nothing was recorded yet, the ending is unknown, or matplotlib is not installed.
        """
        return draw(self.history or [one for one in [self.last] if one is not None], path, title=title)


class _FlowReading:
    def __init__(self, model: nn.Module, gradients: Mapping[str, Tensor], *, keeps_weights: bool) -> None:
        named = {
            private.plain_name(name): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and not is_lazy(parameter)
        }
        # A step's name for parameters that are not the model's.
        of_loss = all(name.startswith("parameter ") for name in gradients)
        if not of_loss and not gradients.keys() & named.keys():
            raise core.PlanError(
                f"Expected the gradients of {type(model).__name__}, got {next(iter(gradients))!r} and others "
                "that it does not have. Give GradientFlow the model that the step has."
            )
        self._classes = {
            private.plain_name(f"{name}.")[:-1] or _MODEL: type(module).__name__
            for name, module in model.named_modules()
        }
        self._layers: dict[str, list[str]] = {}  # layer -> names of its parameters
        for name in (*named, *[name for name in gradients if name not in named]):
            layer = _LOSS if name not in named else name.rpartition(".")[0] or _MODEL
            self._layers.setdefault(layer, []).append(name)
        held = {name: value for name, value in gradients.items() if value.numel()}
        self._numbers = {name: value.numel() for name, value in held.items()}
        self._sizes = sizes_of(held)
        self._before = self._weights = dict[str, Tensor]()
        self._change = dict[str, Tensor]()
        if keeps_weights:
            self._note({name: named[name].detach() for name in held if name in named})

    def _note(self, weights: Mapping[str, Tensor]) -> None:
        try:
            self._before = {name: value.clone() for name, value in weights.items()}
            self._weights = norms_of(self._before)
        except Exception as error:
            self._before = {}
            if not core.ran_out_of_memory(error):  # the step goes on without the ratios
                raise

    def compare(self, parameters: Mapping[str, nn.Parameter]) -> None:
        before = {name: value for name, value in self._before.items() if name in parameters}
        if before:
            now = [parameters[name].detach() for name in before]
            private.foreach_add_([*before.values()], now, alpha=-1)
            self._change = norms_of(before)
        self._before = {}

    def flow(self) -> Flow:
        found = to_host(self._sizes, self._weights, self._change)
        self._before = {}
        rows = [self._row(names, *found) for names in self._layers.values()]
        columns = [*zip(*rows, strict=True)] if rows else [()] * 5
        return Flow(
            layers=tuple(self._layers),
            classes=tuple([self._classes.get(layer, "") for layer in self._layers]),
            **dict(zip(FIGURES, columns, strict=True)),
        )

    def _row(self, names: Iterable[str], sizes: Table, weights: Table, change: Table) -> Figures:
        there = [name for name in names if name in sizes]
        if not there:
            return (None,) * 5
        numbers = sum(self._numbers[name] for name in there)
        sums, norms, largest, counts = zip(*[sizes[name] for name in there], strict=True)
        moved = [name for name in there if name in change]
        weight = math.hypot(*[weights[name][0] for name in moved])
        ratio = math.hypot(*[change[name][0] for name in moved]) / weight if weight else None
        most = math.nan if any(map(math.isnan, largest)) else max(largest)
        return sum(sums) / numbers, most, math.hypot(*norms), 1 - sum(counts) / numbers, ratio


@known_keywords()
def gradient_flow(
    model: nn.Module,
    loss: LossLike,
    batch: Any,
    *,
    path: str | Path | None = None,
    micro_batch: int | None = None,
    memory: str | int | None = None,
    collate: core.Collate | None = None,
    options: Options = DEFAULT,
    title: str = "gradient flow",
) -> Flow:
    """Return the gradient of a batch by layer, and draw it; without training.

    The batch goes forward and backward once, in micro-batches if asked for. No update is made: parameters,
    buffers, `.grad`, random state and the batch are bit-identical afterwards.

    Args:
        model: the model, as for `anybatch.Step`, in the mode to observe (usually training).
        loss: the loss, as for `anybatch.Step`.
        batch: the batch, as for `anybatch.Step`.
        path: file of the picture, ending in .png, .svg or .pdf. None for no picture.
        micro_batch: rows of a micro-batch. None for all rows, or, with `memory`, for a planned number.
        memory: budget in bytes, as for `anybatch.Step`.
        collate: function from samples to tensors, as for `anybatch.Step`.
        options: as for `anybatch.Step`; its scheduler and strategy do not matter.
        title: title of the picture.

    Returns:
        The figures; `ratio` is None, because there is no update. Print them for a table.

    Raises:
        PlanError: no parameter requires grad, the ending is unknown, or matplotlib is not installed.
        BatchError, LossError: as from `anybatch.Step`.

    Example:
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()) for _ in range(8)])
        >>> flow = gradient_flow(model, nn.MSELoss(), (torch.randn(16, 8), torch.randn(16, 8)))
        >>> "0.0" in flow.marked("vanishing"), "7.0" in flow.marked("vanishing")
        (True, False)
    """
    target = None if path is None else checked(path)
    model = unwrapped(model, "auto")  # rank 0 may look while the others wait
    refuse_sharded(model, "gradient_flow")
    parameters = [*dict.fromkeys([*model.parameters(), *module_of(loss).parameters()])]
    trained = [one for one in parameters if one.requires_grad]
    if not trained:
        raise core.PlanError(
            f"Expected a model with parameters to train, got {len(parameters)}, none of which requires a "
            "gradient. Call requires_grad_(True) on what is to be looked at."
        )
    step = Step(
        model,
        loss,
        torch.optim.SGD(trained, lr=0.0),
        micro_batch=micro_batch,
        memory=memory,
        collate=collate,
        options=replace(options, scheduler=None, strategy="local"),
    )
    seen = GradientFlow(model, ratio=False)
    dry_run.show(step, batch, seen)
    flow = seen.last
    assert flow is not None  # noqa: S101 - a dry run shows its gradients once
    if target is not None:
        draw(flow, target, title=title)
    return flow
