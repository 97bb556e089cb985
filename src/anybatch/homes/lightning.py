"""Lightning: a callback that cuts the batch of each `training_step`, with the gradient of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from itertools import chain
from numbers import Number
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from anybatch.core import LossError, MicroBatchDone, PlanError, StepReport
from anybatch.homes.entries import apart, replaced, without_shared
from anybatch.homes.split_loss import SplitLoss
from anybatch.losses import LossLike, ModelLoss
from anybatch.parallel import unwrapped
from anybatch.step import BatchLoss

# Lightning has two names, and classes of each: the callback is one of both.
_NAMES = [name for name in ("lightning", "pytorch_lightning") if find_spec(name)] or ["lightning"]
_PACKAGES = [*map(import_module, _NAMES)]
if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = type("Callback", tuple(one.Callback for one in _PACKAGES), {})


class WholeBatchCallback(Callback):
    """Cuts every training batch of a Lightning `Trainer` into micro-batches; the module stays unchanged.

    The Trainer is that of `lightning.pytorch` or of `pytorch_lightning`.

    `training_step` runs on each micro-batch. Lightning gets the loss of the whole batch, whose `backward()`
    gives the exact gradient. On several ranks the batches of all ranks are one batch: the gradient is divided
    by the rows or tokens of all of them.

    `self.log` in `training_step` logs once per batch: the loss of the whole batch, and of other numbers the
    mean over micro-batches, weighted by rows (or `batch_size=`). A `Metric` counts each row once. Returned
    entries are joined likewise. Other effects of `training_step` happen in every micro-batch; with
    `rows_meet=True` those on attributes and buffers of the module itself happen once.

    Args:
        micro_batch: rows per micro-batch. None for the whole batch, or, with `memory`, for what fits.
        memory: budget in bytes, as for `anybatch.BatchLoss`.
        rows_meet: False for a loss of means over rows or tokens, as for `anybatch.ModelLoss`. True for any
            other loss. Then the modules that `training_step` calls run on micro-batches, twice; its other
            code runs on the outputs of all rows.
        loss: a loss in place of `training_step`, as for `anybatch.Step`, such as `ab.Terms` of a function of
            the module and some rows: for losses that a module returns divided by a count of its own.
            `training_step` is not run, and nothing is logged: `report.terms` has the values.
        options: further options of `anybatch.BatchLoss`.

    Attributes:
        report: the report of the last batch; None before.

    Raises:
        PlanError: in `Trainer.fit`, for manual optimization, `accumulate_grad_batches` above 1, a second
            callback of this kind, and strategies other than one device and DDP. Else as `anybatch.BatchLoss`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(max_epochs=1, logger=False, callbacks=[WholeBatchCallback(micro_batch=8)])
    """

    report: StepReport | None = None
    _batch_loss: BatchLoss | None = None  # made in the first step: only then the process group is there

    def __init__(
        self,
        micro_batch: int | None = None,
        memory: str | int | None = None,
        *,
        rows_meet: bool = False,
        loss: LossLike | None = None,
        **options: Any,
    ) -> None:
        self._options: dict[str, Any] = {"micro_batch": micro_batch, "memory": memory, **options}
        self._options["callbacks"] = (*options.get("callbacks", ()), SimpleNamespace(micro_batch=self._keep))
        self._rows_meet, self._given = rows_meet, loss
        self._place = ExitStack()  # that of `training_step`
        self._run: Any = None  # the module's own `training_step`
        self._notes: list[_Note] = []  # of its last call
        self._kept: list[list[_Note]] = []  # of the micro-batches that count

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the place of `training_step`."""
        if stage != "fit":
            return
        _refuse(trainer, pl_module)
        # Proxies: a snapshot of the module includes neither this callback nor the Trainer.
        home, own, self._batch_loss = proxy(self), pl_module.training_step, None

        @wraps(own)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            return home._whole(pl_module, batch, lambda rows: own(rows, *args, **kwargs))  # pyright: ignore

        self._place.enter_context(replaced((pl_module, "training_step", training_step)))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the sum over ranks to BatchLoss: DistributedDataParallel would repeat it."""
        wrapped = trainer.strategy.model
        if isinstance(wrapped, DistributedDataParallel):
            unwrapped(wrapped, "auto")  # refuses hooks and settings that would have no effect
            wrapped.require_backward_grad_sync = False

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give `training_step` back to the module."""
        self._place.close()

    on_exception = teardown  # pyright: ignore[reportAssignmentType]

    def _whole(self, module: LightningModule, batch: Any, run: Callable[[Any], Any]) -> Any:
        """Return the loss of the whole batch, with what else `training_step` returns; log."""
        trainer, self._kept, self._notes = module.trainer, [], []
        # Several ranks exchange rows that meet, but no strings.
        if self._given is None:
            has_lists = not self._rows_meet or trainer.world_size == 1
            may_be_one = self._options["micro_batch"] is None
            batch, joined = apart(batch, has_lists=has_lists, may_be_one=may_be_one)
            self._run = lambda rows: run(joined(rows))  # pyright: ignore
        else:
            batch, _ = without_shared(batch)
        _refuse(trainer, module)
        batch_loss = self._batch_loss = self._batch_loss or self._made(module)
        zero_grad = getattr(module.optimizer_zero_grad, "__qualname__", "")
        if zero_grad == "LightningModule.optimizer_zero_grad":  # Lightning would call it only afterwards
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
        try:
            with self._noting(trainer, module):
                loss = batch_loss(batch)
        except LossError as error:
            if "random numbers" in str(error):
                error.add_note("Draw mixup and the like in on_after_batch_transfer, as parts of the batch.")
            elif self._given is None:
                if not self._rows_meet:
                    error.add_note("rows_meet=True takes a loss that training_step computes from outputs.")
                error.add_note("WholeBatchCallback(..., loss=...) takes the place of a module's own loss.")
            raise
        self.report = batch_loss.report
        merged: dict[tuple[LightningModule | None, str], list[_Note]] = {}
        kept = [self._notes] if self._rows_meet else self._kept
        for note in chain.from_iterable(kept if self._given is None else ()):
            merged.setdefault((note.module, note.name), []).append(note)
        returned: dict[str, Any] = {"loss": loss}
        for (logging, name), notes in merged.items():
            value = loss.detach() if all(note.is_loss for note in notes) else _joined(notes)
            options = {**notes[0].options}
            if "batch_size" in options:
                options["batch_size"] = sum(note.options["batch_size"] for note in notes)
            if logging is None:
                returned[name] = value
            else:
                logging.log(name, value, **options)
        return returned if len(returned) > 1 else loss

    def _made(self, module: LightningModule) -> BatchLoss:
        run = partial(type(self)._loss, proxy(self))
        loss = self._given
        if loss is None and self._rows_meet:
            loss = SplitLoss(module, run).whole()
        return BatchLoss(module, loss or ModelLoss(call=lambda _, rows: run(rows)), **self._options)

    def _noting(self, trainer: Trainer, module: LightningModule) -> AbstractContextManager[None]:
        """Note calls of `self.log` instead of logging."""
        note, home = type(self)._note, proxy(self)
        logging = [one for one in module.modules() if hasattr(one, "automatic_optimization")]
        places = [(one, "log", partial(note, home, one)) for one in logging]
        return replaced(*places, *[(one, "_trainer", proxy(trainer)) for one in logging])

    def _note(self, module: Any, *args: Any, **kwargs: Any) -> None:
        given = signature(_PACKAGES[0].LightningModule.log).bind(module, *args, **kwargs).arguments
        options = {name: one for name, one in given.items() if name != "self" and one is not None}
        self._notes.append(_Note(module, options.pop("name"), _detached(options.pop("value")), options))

    def _loss(self, rows: Any, *, keeps: bool = True) -> Any:
        """Run `training_step` on some rows and return their loss; keep notes of what else it says."""
        before, self._notes = self._notes, []
        found = self._run(rows)
        if found is None:
            raise LossError(
                f"Expected training_step to return its loss, got {found}, by which Lightning skips a batch. "
                'Leave such rows out before; for a loss of NaN pass options=ab.Options(non_finite="skip").'
            )
        said: dict[str, Any] = dict(found) if isinstance(found, Mapping) else {"loss": found}  # pyright: ignore
        loss = said.pop("loss")
        notes = [note._replace(is_loss=_is_same(note.value, loss)) for note in self._notes]
        notes += [_Note(None, name, _detached(value)) for name, value in said.items()]
        self._notes = notes if keeps else before
        return loss

    def _keep(self, event: MicroBatchDone) -> None:
        """Keep what was said in a micro-batch that counts; an index comes again if the batch is restarted."""
        notes = [note._replace(rows=event.rows) for note in self._notes]
        self._kept = [*self._kept[: event.index], notes]


class _Note(NamedTuple):
    """A value that `training_step` logs or, without a module, returns."""

    module: LightningModule | None
    name: str
    value: Any
    options: Mapping[str, Any] = {}  # of `self.log`
    is_loss: bool = False
    rows: int = 1


def _joined(notes: Sequence[_Note]) -> Any:
    """Join a value of several micro-batches: rows one after the other, numbers as their mean."""
    values, how = [note.value for note in notes], notes[0].options.get("reduce_fx", "mean")
    if len(values) == 1 or not isinstance(values[0], Tensor | Number):
        return values[-1]
    if isinstance(values[0], Tensor) and values[0].dim() and notes[0].module is None:
        return torch.cat(values)
    numbers = torch.stack([torch.as_tensor(one).reshape(()) for one in values])
    numbers = numbers if numbers.is_floating_point() else numbers.to(torch.get_default_dtype())
    if how not in ("mean", torch.mean):
        return getattr(torch, how)(numbers) if isinstance(how, str) else how(numbers)
    sizes = [note.options.get("batch_size", note.rows) for note in notes]
    return numbers @ numbers.new_tensor(sizes) / sum(sizes)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _is_same(value: Any, loss: Any) -> bool:
    """Return True if a logged value is the loss: the tensor, detached or not, or its number."""
    if not isinstance(value, Tensor):
        return type(value) is float and bool(value == loss)
    return isinstance(loss, Tensor) and value.shape == loss.shape and value.data_ptr() == loss.data_ptr()


def _refuse(trainer: Any, module: LightningModule) -> None:
    """Raise PlanError if Lightning would change the gradient of a batch, or not use it."""
    kinds, count = [kind.__name__ for kind in type(trainer.strategy).__mro__], trainer.accumulate_grad_batches
    many = [one for one in trainer.callbacks if isinstance(one, WholeBatchCallback)]
    if not module.automatic_optimization:
        said = "automatic optimization, got manual", "Call ab.BatchLoss in training_step."
    elif count != 1:
        said = f"whole batches, got accumulate_grad_batches={count}", "Leave it out: load larger batches."
    elif len(many) > 1:
        said = f"one such callback, got {len(many)}", "Leave out the others."
    elif "DeepSpeedStrategy" in kinds or not {"SingleDeviceStrategy", "DDPStrategy"} & {*kinds}:
        said = f"one device or DDP, got {kinds[0]}", 'Use Trainer(strategy="ddp").'
    else:
        return
    raise PlanError(f"Expected, with WholeBatchCallback, {said[0]}. {said[1]}")
