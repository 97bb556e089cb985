"""Options of a step, and the errors for keywords that have another name or place."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Literal, ParamSpec, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from anybatch.batchnorm import BatchNormChoice
from anybatch.core import KeywordError, PlanError
from anybatch.engine import FLOAT32, Plan, Strategy
from anybatch.parallel import StrategyName
from anybatch.precision import NonFinitePolicy, Precision
from anybatch.recompute import Asked, Choice
from anybatch.step.length import Order, check_order

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a step that most trainings leave as they are.

    Attributes:
        recompute: modules whose activations are recomputed in backward (checkpointing): "all", "selective",
            "offload", patterns of module names, or a mapping from pattern to one of these policies. None for
            none, or, with `memory`, for what fits.
        scheduler: learning-rate scheduler, or several, stepped once per update. None for none.
        order: "length" sorts the rows of a batch by length, cuts them by tokens (at most those of
            `micro_batch` rows of the batch's longest) and trims each micro-batch to its longest row. Rows are
            padded tensors with a mask or a padding token, or samples with a `collate`.
            `anybatch.step.ByLength(keep=...)` names columns that are not trimmed. None for the order in which
            they come.
        accumulate: dtype of the gradient sums. None for float32, or the parameter's dtype if wider.
        batch_norm: BatchNorm in training mode. None refuses to split the batch. "micro" uses the statistics
            of each micro-batch, so that the result depends on the split. "frozen" uses the running statistics
            and does not update them, split or not.
        non_finite: if the loss or gradient of a micro-batch is not finite, "raise" stops and names its rows,
            "drop" leaves out its rows and their weight, "skip" makes no update.
        check: compare loss and gradient of a few rows between several splits, and the loss of all rows with
            that of the micro-batches, at updates 1, 2, 4 ... 256 and every 256th after, and where rows or
            attributes come that were not compared. A whole number above 1 compares at every so-many-th as
            well, "always" at each update, False never.
        strategy: "auto" sums gradients over all ranks of the process group, if there are several;
            torchrun starts one. Each rank passes its own rows. "replicate" refuses to run
            alone. "local" lets each rank make updates of its own. A DistributedDataParallel is unwrapped; a
            model with `fully_shard` is taken as it is ("auto", or `anybatch.parallel.Shard(hold=True)`).
        clip_value: largest absolute value of an entry of the whole batch's gradient; others are clamped to
            it, as by `torch.nn.utils.clip_grad_value_`. Not together with `clip_norm`. None for no clipping.

    Raises:
        PlanError: a value is not supported, or two exclude each other.

    Example:
        >>> options = Options(batch_norm="frozen", clip_value=0.5)
        >>> options.batch_norm, options.non_finite
        ('frozen', 'raise')
    """

    recompute: Asked = None
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None
    order: Order | None = None
    accumulate: torch.dtype | None = None
    batch_norm: BatchNormChoice | None = None
    non_finite: NonFinitePolicy = "raise"
    check: bool | int | Literal["always"] = True
    strategy: StrategyName | Strategy = "auto"
    clip_value: float | None = None

    def __post_init__(self) -> None:
        check_order(self.order, self.batch_norm)
        if self.check not in (True, False, "always") and not (isinstance(self.check, int) and self.check > 1):
            raise PlanError(
                f'Expected check to be True, False, "always" or 2 or more, got {self.check!r}. Name one.'
            )
        self.settings()

    def settings(
        self, *, clip_norm: float | None = None, blocks: Choice = (), precision: Precision = FLOAT32
    ) -> Plan:
        """Return a plan without rows; raise PlanError for a value that no plan can have."""
        dtype = precision.accumulate if self.accumulate is None else str(self.accumulate)
        return Plan(
            rows=0,
            micro_batch=0,
            clip_norm=math.inf if clip_norm is None else clip_norm,
            clip_value=math.inf if self.clip_value is None else self.clip_value,
            accumulate=(dtype or "auto").removeprefix("torch."),
            batch_norm=self.batch_norm,
            blocks=blocks,
            precision=precision,
            non_finite=self.non_finite,
        )


_OPTIONS = {one.name for one in fields(Options)}
_STEPS = ("clip_norm", "collate", "memory", "micro_batch", "precision")
#: Names that other libraries and loops use, by what is to be written here.
_FOREIGN = {
    "Write micro_batch=..., the rows of a micro-batch: of 512 rows in 4 steps 128.": (
        "accumulation_steps "  # gradient accumulation
        "gradient_accumulation_steps "  # gradient accumulation by another name
        "accumulate_grad_batches accum_steps grad_accum_steps num_micro_batches n_micro_batches micro_batches"
    ),
    "Write clip_norm=..., the largest 2-norm, or options=ab.Options(clip_value=...) to clamp each entry.": (
        "clip_grad grad_clip clip_grad_norm max_norm max_grad_norm gradient_clip_val gradient_clipping"
    ),
    'Write precision="bf16-mixed" or precision="fp16-mixed".': (
        "amp use_amp autocast mixed_precision fp16 bf16"
    ),
    "Write callbacks=[...]: functions called with each StepReport, or objects.": "listeners",
    "Write callbacks=[...], with methods of ab.Callback such as gradients(gradients).": "observers",
    "Write options=ab.Options(accumulate=torch.float64): as exact, in as much memory.": "compensated",
    "Write options=ab.Options(clip_value=...).": "clip_grad_value",
    'Write options=ab.Options(recompute="all").': "gradient_checkpointing",
    "Write options=ab.Options(scheduler=...).": "lr_scheduler schedulers",
    "Pass the whole batch to the step, and write micro_batch=..., the rows of a micro-batch.": "batch_size",
    'Write precision="fp16-mixed", which scales the loss by itself.': "scaler grad_scaler",
}
#: The same for a trainer.
_TRAINERS = {
    "Write callbacks=[ab.Metrics(accuracy=ab.accuracy)].": "metrics",
    "Write callbacks=[ab.EMA(...)].": "ema",
    "Write trainer.fit(epochs=...).": "epochs max_epochs num_epochs num_train_epochs",
    "Write callbacks=[ab.EarlyStopping(...)].": "patience early_stopping",
    "Write best_by=..., and larger_is_better=True where it is.": "monitor mode",
    "Write validation=...": "val valid eval eval_dataset",
    "Write out=..., the folder of the run.": "output_dir",
}


def known_keywords(**places: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that raises KeywordError for an unknown keyword, and names its place.

    Args:
        places: sentences for keywords that this function refuses in its own words.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in signature(function).parameters if name != "self"]
        *_, owner, last = ["", *function.__qualname__.split(".")]
        called = owner if last == "__init__" else last

        @wraps(function)
        def checked(*args: P.args, **keywords: P.kwargs) -> R:
            for name in keywords:
                if name not in known:
                    raise KeywordError(_told(called, name, known, places))
            if "options" in keywords and not isinstance(options := keywords["options"], Options):
                raise KeywordError(
                    f"Expected options to be an ab.Options, got {options!r}. Write options=ab.Options(...)."
                )
            return function(*args, **keywords)

        return checked

    return decorate


def _told(called: str, name: str, known: Sequence[str], places: Mapping[str, str]) -> str:
    """Return the message for a keyword that `called` does not take."""
    got = f"got {called}({name}=...)"
    if name in places:
        return f"Expected parameters of {called}, {got}. {places[name]}"
    if name in _OPTIONS and "options" in known:
        return f"Expected {name} in the options, {got}. Write options=ab.Options({name}=...)."
    if called == "Trainer" and (advice := _advice_on(name, _TRAINERS)):
        return f"Expected parameters of Trainer, {got}. {advice}"
    if called == "Trainer" and name in {*_STEPS, *_OPTIONS}:
        written = f"{name}=..." if name in _STEPS else f"options=ab.Options({name}=...)"
        return f"Expected {name} in the step, {got}. Write ab.Step(..., {written})."
    if name in _STEPS and called == "Options":
        return f"Expected {name} beside the options, {got}. Write Step(..., {name}=...)."
    if advice := _advice_on(name, _FOREIGN):
        return f"Expected parameters of {called}, {got}. {advice}"
    options = _OPTIONS if "options" in known else ()
    names = {one: f"options=ab.Options({one}=...)" for one in options} | {one: f"{one}=..." for one in known}
    close = get_close_matches(name, names, n=1)
    advice = f"Did you mean {names[close[0]]}?" if close else f"It takes {', '.join(known)}."
    return f"Expected parameters of {called}, {got}. {advice}"


def _advice_on(name: str, table: Mapping[str, str]) -> str:
    return next((advice for advice, names in table.items() if name in names.split()), "")


Options.__init__ = known_keywords()(Options.__init__)
DEFAULT = Options()
