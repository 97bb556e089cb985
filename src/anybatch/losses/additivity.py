"""Whether a loss of the caller's own adds up: a few rows at once against the same rows in parts."""

import math
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from anybatch.batchnorm import find_batch_norms
from anybatch.core import Batch, LossError
from anybatch.losses.loss import Loss
from anybatch.losses.model.graph import NoLossError
from anybatch.losses.model.model_loss import ModelTerms
from anybatch.losses.terms import Terms
from anybatch.state import evaluating, rng

MOST_ROWS, LEAST_ROWS = 8, 3
_SMALL = 64  # elements of what may be a table of factors


def refuse_what_does_not_add_up(
    loss: Loss,
    model: nn.Module,
    modules: Sequence[nn.Module],
    batch: Batch,
    micro_batch: int,
    *,
    most: int = MOST_ROWS,
) -> bool:
    """Compare the terms of a few rows at once with what their parts add up to.

    Cheap: a few forwards of at most eight rows, in evaluation mode, so that neither dropout nor BatchNorm
    disturbs; nothing is kept for a backward. Buffers, modes, gradients and random streams are as before. A
    difference within rounding, of numbers that cancel, or of a loss that is not the same twice, is no fault,
    and what fails is left to the step. `anybatch.check` is the whole test, and says where a fault lies.

    Args:
        loss: whose totals are compared. Torch's own add up, and a whole-batch loss need not, so only a
            function of the caller's own and a model's own loss are looked at.
        model: what the loss calls.
        modules: those of the model and of the loss.
        batch: the rows to choose from: the first ones.
        micro_batch: rows that are known to fit.
        most: rows that are looked at together, if these are as many as tell anything.

    Returns:
        Whether these rows could tell, or there is nothing to ask.

    Raises:
        LossError: a term of the parts differs from that of the whole by more than rounding.

    Example:
        >>> from anybatch.core.batch import TensorBatch
        >>> from anybatch.core.total import Total
        >>> def mean_of_means(model, micro):
        ...     return Total(model(micro).square().mean(), 1)
        >>> batch, model = TensorBatch(torch.arange(5.0)[:, None]), nn.Linear(1, 1)
        >>> refuse_what_does_not_add_up(Terms(mean_of_means), model, [model], batch, 4)
        Traceback (most recent call last):
        ...
        anybatch.core.errors.LossError: Expected the totals of mean_of_means to add up, got ...
    """
    if not isinstance(loss, Terms | ModelTerms):
        return True
    # More rows tell more. Fewer fit where these do not, and three at least are needed for unequal parts.
    most = min(batch.rows, MOST_ROWS, max(LEAST_ROWS, most))
    fewer = min(most, max(LEAST_ROWS, micro_batch)) if micro_batch < most else most - 1
    is_refused = False
    seen = 0  # looks
    for rows in dict.fromkeys([most, fewer, min(most, LEAST_ROWS)]):
        if rows < 2 or (seen and rows < fewer):
            continue
        seen += 1
        try:
            if _adds_up(loss, model, modules, batch.head(rows), rows) and rows >= fewer:
                return True  # fewer rows than a micro-batch has may only seem to
        except _RefusedError as error:  # by a model's loss, which another number of rows may show to be sound
            if is_refused and error.__cause__ is not None:
                raise error.__cause__ from None
            is_refused = True
    return False


class _RefusedError(Exception):
    """A model's own loss was refused as such; the cause says why."""


def _adds_up(
    loss: Loss, model: nn.Module, modules: Sequence[nn.Module], few: Batch, rows: int, *, keeps: bool = False
) -> bool:
    """Whether these rows could tell; raises if they tell that it does not."""
    part = min(rows - 1, -(-2 * rows // 3))  # unequal parts: equal ones hide a mean of means
    loss = _alone(loss)
    whole: Mapping[str, _Added] = {}
    try:
        with evaluating(modules), nullcontext() if keeps else _nothing_kept(loss):
            before = rng.capture_process()
            whole = _totals(loss, model, few, rows)
            parts = _totals(loss, model, few, part)
            again = _totals(loss, model, few, rows) if _differing(whole, parts, model) else whole
            # Statistics and draws would differ, and rightly; what names terms anew the step refuses.
            if find_batch_norms(modules) or rng.has_moved(before) or whole.keys() != parts.keys():
                return False
    except NoLossError:  # a model may have one in training mode only
        return False
    except LossError as error:
        if isinstance(loss, ModelTerms) and whole:  # parts of unequal size are not made as the whole is
            raise
        if isinstance(loss, ModelTerms):
            raise _RefusedError from error
        return False
    except Exception:  # the step meets it again, and says what is to be said
        # Or it sends a gradient back through a graph of its own.
        may_keep = not keeps and isinstance(loss, ModelTerms)
        return may_keep and _adds_up(loss, model, modules, few, rows, keeps=True)
    if again != whole:  # the same rows twice are not the same: a state, or numbers of its own
        return False
    for name in _differing(whole, parts, model):
        function = loss.function if isinstance(loss, Terms) else model
        called = getattr(function, "__name__", type(function).__name__)
        raise LossError(
            f"Expected the totals of {called} to add up, got {whole[name].mean:.6g} for {name!r} from {rows} "
            f"rows at once and {parts[name].mean:.6g} from the same rows in parts of {part} and "
            f"{rows - part}. Either its weight is not what its sum is divided by (return ab.Total(sum over "
            "valid elements, how many they are)), or rows meet, in the model or in the loss (ab.WholeBatch). "
            "ab.check(model, loss, batch) says which and where; Step(check=False) skips this test."
        )
    return any(total.filled > 1 for total in parts.values())


def _alone(loss: Loss) -> Loss:
    """A model's loss afresh, and one for all rows: what it sees first it must see again."""
    return ModelTerms() if isinstance(loss, ModelTerms) else loss


@contextmanager
def _nothing_kept(loss: Loss) -> Generator[None]:
    """A model's own loss needs a graph, but no gradient flows back through it: nothing is held for that."""
    if not isinstance(loss, ModelTerms):
        yield
        return

    def pack(value: Tensor) -> Any:
        # What is read off a graph: factors, and which row an index takes. What is alive anyway is there, too.
        is_small = value.numel() <= _SMALL or (value.dim() == 1 and not value.is_floating_point())
        return value.detach() if is_small else weakref.ref(value)

    def unpack(packed: Any) -> Tensor:
        value = packed if isinstance(packed, Tensor) else packed()
        if value is None:
            raise RuntimeError("this graph has no backward: only its values are looked at")
        return value

    with saved_tensors_hooks(pack, unpack):
        yield


class _Added(NamedTuple):
    """What was added up: sum, weight, size of the numbers, their rounding, and how many had any weight."""

    sum: float
    weight: float
    size: float
    eps: float
    filled: int

    @property
    def mean(self) -> float:
        return self.sum / self.weight


def _totals(loss: Loss, model: nn.Module, batch: Batch, size: int) -> dict[str, _Added]:
    totals: dict[str, _Added] = {}
    for micro in batch.cut(size):
        terms = loss.evaluate(model, micro)
        for name, weight in terms.weigh().items():
            value = float(terms.sums[name])
            eps = torch.finfo(terms.sums[name].dtype).eps
            old = totals.get(name, _Added(0.0, 0.0, 0.0, 0.0, 0))
            totals[name] = _Added(
                sum=old.sum + value,
                weight=old.weight + float(weight),
                size=old.size + abs(value),
                eps=max(old.eps, eps),
                filled=old.filled + (float(weight) != 0),
            )
    return totals


def _differing(whole: Mapping[str, _Added], parts: Mapping[str, _Added], model: nn.Module) -> list[str]:
    """The terms whose means differ by more than rounding.

    Never less than float32's is allowed for, as many a loss is computed in it whatever the parameters are;
    nor less than what numbers of size 1 leave behind where they cancel.
    """
    kinds = {p.device.type for p in model.parameters()}
    casts = [torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)]
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    eps = max(torch.finfo(dtype).eps for dtype in (torch.float32, *dtypes, *casts))
    found: list[str] = []
    for name in whole.keys() & parts.keys():
        one, other = whole[name], parts[name]
        if not (one.weight and other.weight and math.isfinite(one.sum)):  # nothing to say, or the step will
            continue
        least = max(eps, one.eps)
        bound = max(least**0.5 * other.size / other.weight, 100 * least)
        # NaN from a part of which the whole is finite is a fault, too: a mean over no valid element.
        if not abs(other.mean - one.mean) <= bound:
            found.append(name)
    return sorted(found)
