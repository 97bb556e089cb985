"""BatchLoss: the loss of a whole batch as one tensor, whose backward() hands over the exact gradient."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import core
from anybatch.core import torch_private as private
from anybatch.engine import Task, Window, check_parts, multiply
from anybatch.losses import LossLike, module_of
from anybatch.precision import Precision, PrecisionName, find_precision
from anybatch.step.options import DEFAULT, Options, known_keywords
from anybatch.step.step import Step
from anybatch.step.window import OpenWindow, refuse_others

_LOOP = "Do it in your loop after backward(), or use ab.Step."


class BatchLoss:
    """The loss of a batch, computed in micro-batches, for a training loop that makes its updates itself.

    Calling it runs forward and backward of every micro-batch, and returns the loss of the whole batch as a
    scalar. `backward()` of this scalar adds the exact gradient of the whole batch to `.grad`, times what
    flows in, as for any other loss. Clipping, a GradScaler, the optimizer, schedulers and checkpoints stay as
    they are. Under `torch.no_grad()` it is a plain loss.

    If the loop runs under autocast, so do the model and the loss. With float16 a loss scale of its own keeps
    small gradients; the gradient that is handed over is unscaled.

    If all rows are left out, or with `non_finite="skip"` the batch is, the gradient is zero. If a call fails,
    everything is as before it.

    Args:
        model: called on each micro-batch.
        loss: as for `anybatch.Step`.
        parameters: the parameters to compute gradients of. None for all of the model and the loss that
            require them.
        micro_batch: rows per micro-batch. None for the whole batch, or, with `memory`, for what fits.
        memory: budget in bytes, as for `anybatch.Step`. It counts parameters, gradients (also those that
            `.grad` holds) and activations. Leave room for the state of your optimizer.
        precision: None for the dtypes and the autocast of the loop. Otherwise as for `anybatch.Step`, but for
            "bf16-true" and "fp16-true".
        collate, callbacks: as for `anybatch.Step`.
        options: as for `anybatch.Step`, but for those of the update: scheduler, clip_value.

    Attributes:
        report: the report of the last call; None before.

    Raises:
        PlanError: an option of the update (`clip_norm`, `clip_value`, `scheduler`, `optimizer`, a
            `ParameterServer`), or a precision that stores weights in 16 bits.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> batch_loss = BatchLoss(model, nn.CrossEntropyLoss(), micro_batch=4)
        >>> batch = torch.randn(10, 3), torch.randint(2, (10,))
        >>> batch_loss(batch).backward()
        >>> model.weight.grad.shape, batch_loss.report.micro_batches
        (torch.Size([2, 3]), 3)
    """

    @known_keywords(clip_norm=_LOOP, optimizer=_LOOP, scheduler=_LOOP, clip_value=_LOOP)
    def __init__(
        self,
        model: nn.Module,
        loss: LossLike,
        *,
        parameters: Sequence[nn.Parameter] | None = None,
        micro_batch: int | None = None,
        memory: str | int | None = None,
        precision: PrecisionName | Precision | None = None,
        collate: core.Collate | None = None,
        callbacks: Iterable[core.CallbackLike] = (),
        options: Options = DEFAULT,
    ) -> None:
        odd = [name for name in ("scheduler", "clip_value") if getattr(options, name) is not None]
        if odd or getattr(options.strategy, "is_elsewhere", False):
            raise core.PlanError(
                f"Expected options of the gradient, got {odd[0] if odd else options.strategy!r}, which "
                f"belongs to the update. {_LOOP}"
            )
        self._model = model
        self._make = partial(
            GradientStep,
            model,
            loss,
            None if parameters is None else [*dict.fromkeys(parameters)],
            micro_batch=micro_batch,
            memory=memory,
            collate=collate,
            callbacks=core.check_callbacks(callbacks),
            options=options,
        )
        self._precision = None if precision is None else find_precision(precision)
        self._steps: dict[str, GradientStep] = {}
        self._step(self._precision or "float32")  # refuses what cannot be
        self.report: core.StepReport | None = None

    def __call__(self, batch: Any, *others: Any) -> Tensor:
        """Return the loss of a whole batch: a scalar, in float32 or the parameters' dtype if that is wider.

        Args:
            batch: as for `anybatch.Step`; or a window of `BatchLoss.window`, which is closed.

        Raises:
            BatchError, PlanError, LossError, OutOfMemoryError: see `anybatch.Step`.
        """
        refuse_others("batch_loss", others)
        if isinstance(batch, OpenWindow):
            step = next((one for one in self._steps.values() if one.open_window is batch), None)
            if step is None:
                raise core.LossError(
                    f"Expected an open window of this BatchLoss, got another one, of {batch.rows} rows. Open "
                    "it with batch_loss.window(), and call add() first."
                )
            self.report = batch.close()
            return step.handed(self.report)
        step, without_autocast = self._found()
        with without_autocast:
            self.report = step(batch)
        return step.handed(self.report)

    def window(self) -> OpenWindow:
        """Open a window, for a loop that gets its batch in micro-batches: `batch_loss(window)` ends it.

        Example:
            >>> model = nn.Linear(3, 2)
            >>> batch_loss = BatchLoss(model, nn.CrossEntropyLoss())
            >>> window = batch_loss.window()
            >>> for rows in (4, 2):
            ...     window.add((torch.randn(rows, 3), torch.randint(2, (rows,))))
            >>> batch_loss(window).backward()
        """
        return self._found()[0].window()

    def _found(self) -> tuple["GradientStep", AbstractContextManager[object]]:
        """Return the step for the autocast that is on, and a context in which it is off."""
        precision: PrecisionName | Precision = "float32"
        kinds = {p.device.type for p in self._model.parameters()} - {"meta"}
        kind = next((kind for kind in sorted(kinds) if torch.is_autocast_enabled(kind)), None)
        if kind is not None:
            precision = "fp16-mixed" if torch.get_autocast_dtype(kind) == torch.float16 else "bf16-mixed"
        step = self._step(self._precision or precision)
        return step, nullcontext() if kind is None else torch.autocast(kind, enabled=False)

    def _step(self, precision: PrecisionName | Precision) -> "GradientStep":
        name = str(find_precision(precision))
        if name not in self._steps:
            self._steps[name] = self._make(precision=precision)
        return self._steps[name]

    def __repr__(self) -> str:
        step = next(iter(self._steps.values()))
        names = [getattr(one, "__name__", type(one).__name__) for one in (step.model, step.loss)]
        return f"BatchLoss({', '.join(names)}, micro_batch={step.micro_batch})"


class GradientStep(Step):
    """A step that ends before the update: its gradient waits to be handed over."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossLike,
        chosen: Sequence[nn.Parameter] | None,
        *,
        precision: PrecisionName | Precision,
        **keywords: Any,
    ) -> None:
        asked = find_precision(precision)
        if asked.store is not None:
            raise core.PlanError(
                f"Expected weights as they are, got precision={str(asked)!r}: 16-bit weights are updated "
                'through float32 copies, which only ab.Step knows. Choose "bf16-mixed".'
            )
        self._chosen, self._taken = chosen, dict[nn.Parameter, Tensor]()
        super().__init__(model, loss, (), precision=precision, **keywords)

    def _checked(self, model: object, loss: object, optimizer: object, scheduler: object) -> Any:
        held = self.held() if isinstance(model, nn.Module) else []
        check_parts(model, loss, torch.optim.SGD(held or [torch.zeros(1)], lr=0.0), None)
        return (), ()

    def held(self) -> Sequence[nn.Parameter]:
        """Return the parameters to compute gradients of."""
        if self._chosen is not None:
            return self._chosen
        return [*dict.fromkeys([*self.model.parameters(), *module_of(self.loss).parameters()])]

    def _begun(self) -> Task:
        if core.running.get():
            raise core.PlanError(
                f"Expected one ab.BatchLoss around a batch, got one of {type(self.model).__name__} inside a "
                "loss that is computed in micro-batches: the batch is cut twice. Leave one of the two out."
            )
        self._taken, task = {}, super()._begun()
        hooked = [one for one in task.network.parameters if private.hooks_of_tensor(one)[0]]
        if hooked:
            raise core.OptimizerError(
                f"Expected parameters without gradient hooks, got {len(hooked)} with hooks: they would run "
                "in every micro-batch and again on the whole gradient. Remove them, and change `.grad` after "
                "backward()."
            )
        return task

    def end(self, window: Window) -> core.StepReport:
        """End before the update."""
        return window.hand_over(partial(setattr, self, "_taken"))

    def handed(self, report: core.StepReport) -> Tensor:
        """Return the loss, with the gradient of the last batch behind it; once."""
        gradient, self._taken = self._taken, {}
        trained = [one for one in self.held() if one.requires_grad]
        first = trained[0]
        dtype = torch.promote_types(first.dtype, torch.float32).to_real()
        value = torch.full((), report.loss, dtype=dtype, device=first.device)
        if not torch.is_grad_enabled():
            return value
        reached = [one for one in trained if one in gradient] or trained
        return _Handed.apply(value, [*map(gradient.get, reached)], *reached)


class _Handed(torch.autograd.Function):
    """A scalar whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *parameters: nn.Parameter) -> Tensor:
        ctx.gradients, ctx.parameters = gradients, parameters
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled():  # by create_graph
            raise core.LossError(
                "Expected backward() of an ab.BatchLoss without create_graph, got create_graph=True: the "
                f"gradient of its {len(ctx.parameters)} parameters has no graph. Compute penalties on "
                "gradients inside the loss."
            )
        (flowing,), found, ctx.gradients = grad_outputs, ctx.gradients, None
        if found is None:
            raise core.LossError(
                "Expected one backward() of the loss of an ab.BatchLoss, got another: the gradient of its "
                f"{len(ctx.parameters)} parameters was handed over. Call batch_loss(batch) again, or add "
                "losses up before backward()."
            )
        if found[0] is None:  # nothing counts
            return None, None, *[torch.zeros_like(one) for one in ctx.parameters]
        multiply([one for one in found if not one.is_sparse], flowing)
        return None, None, *[one * flowing if one.is_sparse else one for one in found]
