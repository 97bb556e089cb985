"""WholeBatchTrainer: a mixin for transformers' Trainer; loss and gradient become those of the whole batch."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import BatchError, LossError, PlanError, batch_of
from anybatch.homes.entries import apart, replaced, without_shared
from anybatch.homes.split_loss import SplitLoss
from anybatch.losses import Additive, LossLike, ModelLoss
from anybatch.precision import Precision
from anybatch.state import ObjectState, rng
from anybatch.step import BatchLoss, Window
from anybatch.trial import choose_rows

_CLOSE, _STEPS = 1e-6, "current_gradient_accumulation_steps"
_ITEMS = "num_items_in_batch"
_METRICS = {"_metrics", "_total_train_tokens"}  # that TRL's trainers count in `compute_loss`


class WholeBatchTrainer:
    """A mixin that goes before `transformers.Trainer`, or a subclass such as TRL's `SFTTrainer`.

    `per_device_train_batch_size` is the size of the whole batch, which is cut into micro-batches. Loss and
    gradient, and so the logged loss and `grad_norm`, are those of the whole batch. Everything else is the
    Trainer's: optimizer, scheduler, clipping, mixed precision, callbacks, evaluation, checkpoints, resume.

    The loss is that of `compute_loss`, also your own. If it divides by `num_items_in_batch`, the divisor is
    that of the whole batch. If it is made of means, these are divided once. Before the first cut, a few rows
    are compared in several splits. Other losses raise a `LossError`; pass contrastive ones as `loss`.

    The batches of an update are one batch: those of all ranks, and with `gradient_accumulation_steps` above 1
    all of these. With `average_tokens_across_devices=False`, a loss that divides by `num_items_in_batch` is a
    mean over ranks. `compute_loss` and its metrics run once per micro-batch, separately on each rank. A
    loss that is not finite raises an error, unless `whole_batch` says otherwise.

    Args:
        *args: as for the Trainer; also `**kwargs`.
        micro_batch: rows per micro-batch. None for the whole batch, or, with `memory`, for what fits.
        memory: budget in bytes, as for `anybatch.Step`. Leave room for the state of the optimizer.
        loss: a loss in place of `compute_loss` in training, as for `anybatch.Step`; None for `compute_loss`.
        rows_meet: True for a `compute_loss` of any kind, such as KTO's. Then the modules that it calls run on
            micro-batches, twice; its other code runs on the outputs of all rows.
        whole_batch: further arguments of `anybatch.BatchLoss`, such as `{"options": ab.Options(...)}`.

    Raises:
        PlanError: the Trainer runs under DeepSpeed, FSDP or `nn.DataParallel`, or comes before this class.

    Example:
        >>> from transformers import Trainer  # doctest: +SKIP
        >>> class MyTrainer(WholeBatchTrainer, Trainer):  # doctest: +SKIP
        ...     pass
        >>> MyTrainer(model, arguments, train_dataset=rows, micro_batch=8).train()  # doctest: +SKIP
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(WholeBatchTrainer)]
        if any(base.__name__ == "Trainer" and base.__module__ == "transformers.trainer" for base in before):
            raise PlanError(
                f"Expected WholeBatchTrainer before Trainer in the bases of {cls.__name__}, got it after. "
                f"Write class {cls.__name__}(WholeBatchTrainer, Trainer)."
            )
        if any(base.__module__.startswith("sentence_transformers.") for base in cls.__mro__):
            raise PlanError(
                f"Expected a Trainer whose loss is computed from one batch, got {cls.__name__}, which passes "
                "columns to a loss module. Put anybatch.homes.sentence_transformers.CutLoss around that loss."
            )

    def __init__(
        self,
        *args: Any,
        micro_batch: int | None = None,
        memory: str | int | None = None,
        loss: LossLike | None = None,
        rows_meet: bool = False,
        whole_batch: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        options = {"micro_batch": micro_batch, "memory": memory, **(whole_batch or {})}
        self._seam = _Seam(self, loss, options, rows_meet=rows_meet)
        super().__init__(*args, **kwargs)
        _refuse_unsupported(self)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Begin an update: gradients of one that was broken off are dropped."""
        self._seam.discard()
        return super().get_batch_samples(*args, **kwargs)  # pyright: ignore

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the Trainer's own step, in which `compute_loss` returns the loss of the whole batch."""
        with self._seam.in_place():
            return super().training_step(*args, **kwargs)  # pyright: ignore


def _descends(trainer: Any, *names: str) -> bool:
    """Return True for one of these trainers of TRL."""
    bases = [base for base in type(trainer).__mro__ if base.__module__.startswith("trl.")]
    return any(base.__name__ in names for base in bases)


def _refuse_unsupported(trainer: Any) -> None:
    accelerator, count = trainer.accelerator, trainer.args.n_gpu
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if not (kind == "NO" or kind.startswith("MULTI_")):
        said = f"{kind}, which exchanges gradients or weights in every micro-batch", "Leave it out."
    elif count > 1:
        said = f"one for {count} GPUs (nn.DataParallel)", f"Use torchrun --nproc-per-node {count} program.py."
    elif getattr(accelerator, "parallelism_config", None) is not None:
        said = f"{accelerator.parallelism_config}", "Leave parallelism_config out."
    else:
        return
    raise PlanError(
        f"Expected a process per GPU, each with whole rows and all weights, got {said[0]}. {said[1]}"
    )


class _Seam:
    """The place of `compute_loss` in a training step."""

    def __init__(
        self, trainer: Any, loss: LossLike | None, options: Mapping[str, Any], *, rows_meet: bool
    ) -> None:
        self._trainer, self._loss, self._options = trainer, loss, options
        self._rows_meet = rows_meet
        self._compute: Any = None  # the trainer's own compute_loss, during a step
        self._items: Any = None  # num_items_in_batch of this update
        self._steps = 1  # batches of this update, as the trainer knows them
        self._joined: Any = None  # gives a micro-batch the entries that are no tensors, as `return_loss`
        self._divides: bool | None = None  # True if the loss divides by these items; None if not known yet
        self._model: nn.Module | None = None  # the model of `_made`
        self._made: dict[str, BatchLoss] = {}
        self._open: tuple[BatchLoss, Window] | None = None  # with gradient accumulation: this update so far

    def in_place(self) -> AbstractContextManager[None]:
        """Stand in for `compute_loss`; the trainer does not divide by its number of batches per update."""
        trainer, self._compute = self._trainer, self._trainer.compute_loss
        self._steps = getattr(trainer, _STEPS)
        return replaced((trainer, "compute_loss", self), (trainer, _STEPS, 1))

    def __call__(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the loss of the whole batch; of an update's other batches zero, and keep their gradients."""
        if return_outputs:
            raise LossError(
                f"Expected compute_loss without outputs in a training step, got {return_outputs=}: the "
                "outputs of all rows are never in memory together. Call the model for them, under no_grad()."
            )
        trainer, self._items = self._trainer, num_items_in_batch
        is_alone, self._joined = trainer.args.world_size == 1, None
        if self._divides_by_entry():
            self._items = inputs[_ITEMS] * self._steps
            inputs = {**inputs, _ITEMS: self._items}
        if self._loss is not None:
            inputs, _ = without_shared(inputs)
        else:
            inputs, self._joined = apart(
                inputs,
                has_lists=is_alone or not self._rows_meet,  # ranks exchange no strings
                is_paired=_descends(trainer, "DPOTrainer", "RewardTrainer"),  # chosen rows, then rejected
                may_be_one=self._options["micro_batch"] is None,
            )
        if is_alone:
            return self._run(model, inputs)
        own = lambda values, *_, **__: values  # noqa: E731  # pyright: ignore
        # Metrics stay on a rank: the others may have more micro-batches.
        with replaced(*[(trainer.accelerator, name, own) for name in ("gather", "gather_for_metrics")]):
            return self._run(model, inputs)

    def _divides_by_entry(self) -> bool:
        known = _descends(self._trainer, "GRPOTrainer") and self._trainer.loss_type
        return known in ("cispo", "dapo", "vespo")

    def _run(self, model: nn.Module, inputs: Any) -> Tensor:
        is_last = self._trainer.accelerator.sync_gradients
        try:
            if is_last and self._open is None:
                return self._batch_loss(model, inputs)(inputs)
            if self._open is None:
                opener = self._batch_loss(model, inputs)
                self._open = opener, opener.window()
            opener, window = self._open
            window.add(inputs)
            if not is_last:
                return torch.zeros((), device=next(model.parameters()).device, requires_grad=True)
            self._open = None
            return opener(window)
        except BatchError as error:
            if self._loss is None:
                error.add_note("Without micro_batch= any batch passes (docs/trl.md).")
            raise
        except LossError as error:
            if self._loss is None:
                error.add_note(
                    "rows_meet=True cuts any compute_loss, such as KTO's (docs/trl.md). A loss "
                    "that you write for anybatch goes into its argument `loss`."
                )
            steps = self._trainer.args.gradient_accumulation_steps
            rows = steps * self._trainer.args.per_device_train_batch_size
            if steps > 1:  # a batch that comes at once can be split for more losses
                error.add_note(f"Or set per_device_train_batch_size={rows}, gradient_accumulation_steps=1.")
            raise

    def discard(self) -> None:
        """Drop an update that was broken off."""
        if self._open is not None:
            self._open[1].discard()
        self._open = None

    def _batch_loss(self, model: nn.Module, inputs: Any) -> BatchLoss:
        if model is not self._model:  # the Trainer wraps the model anew in each `train`
            self._model, self._made, self._divides = model, {}, None
        loss, name = self._loss, "given"
        if loss is None and self._rows_meet:
            loss = SplitLoss(getattr(model, "module", model), partial(self._evaluate, model)).whole()
        if loss is None:
            if self._items is not None and self._divides is None:
                self._divides = self._tells(getattr(model, "module", model), inputs)
            is_divided = self._items is not None and self._divides
            loss, name = (Additive(self._sum), "sum") if is_divided else (ModelLoss(call=self._value), "mean")
        if name not in self._made:
            options = dict(self._options)
            if getattr(self._trainer.accelerator, "scaler", None) is not None:
                options.setdefault("precision", Precision(loss_scale="dynamic"))  # autocast is the Trainer's
            self._made[name] = BatchLoss(model, loss, **options)
        return self._made[name]

    def _sum(self, model: nn.Module, micro: Any) -> Tensor:
        # The Trainer multiplies by the number of ranks, because torch's data parallelism averages.
        return self._value(model, micro, self._items) / self._trainer.args.world_size

    def _evaluate(self, model: nn.Module, micro: Any, *, keeps: bool) -> Tensor:
        """Return the loss of some rows; unless it `keeps` them, metrics stay as they were."""
        items, known = self._items if self._trainer.args.world_size == 1 else None, vars(self._trainer)
        metrics = () if keeps else _METRICS & known.keys()
        with replaced(*[(self._trainer, name, deepcopy(known[name])) for name in metrics]):
            return self._value(model, micro, items)

    def _value(self, model: nn.Module, micro: Any, items: Any = None) -> Tensor:
        inputs = self._joined(micro)
        inputs = {**inputs} if isinstance(inputs, Mapping) else inputs  # the Trainer removes the labels
        value = self._compute(model, inputs, num_items_in_batch=items)
        if not isinstance(value, Tensor):
            raise LossError(
                f"Expected compute_loss to return the loss, a scalar tensor, got a {type(value).__name__}. "
                "Return outputs only if return_outputs is True."
            )
        return value

    def _tells(self, model: nn.Module, inputs: Any) -> bool | None:
        """Return True if the loss of two rows divides by the number of items; None if they have no loss."""
        batch, trainer = batch_of(inputs), self._trainer
        if self._divides_by_entry():
            return True
        rows = next(batch.only(choose_rows(batch)(2)).cut(2)) if batch.rows > 1 else inputs
        count = self._count(rows)
        noted = ObjectState([trainer, model], but_for=[*model.parameters()])

        def tried(items: Any) -> float:
            with rng.preserved(), torch.no_grad():
                return float(self._value(model, rows, items))

        close = partial(math.isclose, rel_tol=_CLOSE)
        try:
            first, second = tried(count), tried(2 * count)
            if not first or not math.isfinite(first):
                return None
            if close(first, 2 * second) or close(first, second):
                return close(first, 2 * second)
            third = trainer.args.world_size * tried(None)
        finally:
            noted.put_back()
        if close(first, third):  # such as a mean and a router loss
            return False
        raise LossError(
            "Expected a loss that is divided by num_items_in_batch, or is the same without it, got "
            f"{first:g} for {int(count)} items, {second:g} for {2 * int(count)} and {third:g} for None. "
            "Divide all of it by num_items_in_batch, or take means."
        )

    def _count(self, rows: Any) -> Any:
        """Return the number of items of some rows, counted as the Trainer does."""
        rows = self._joined(rows)
        labels = rows.get("shift_labels", rows["labels"])
        if "shift_labels" not in rows and getattr(self._trainer, "_loss_shifts_labels", False):
            labels = labels[..., 1:]
        count = labels.ne(-100).sum().clamp(min=1)
        return count if isinstance(self._items, Tensor) else int(count)


@cache
def __getattr__(name: str) -> Any:
    """Return `Trainer`: transformers' Trainer with the mixin."""
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    host = import_module("transformers").Trainer
    doc = "transformers' Trainer, with `WholeBatchTrainer` before it."
    return type(name, (WholeBatchTrainer, host), {"__module__": __name__, "__doc__": doc})
