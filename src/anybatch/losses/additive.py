"""Whether a loss of the caller's own adds up: a few rows at once against the same rows in parts."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from anybatch import rng
from anybatch.batch import Batch
from anybatch.errors import LossError
from anybatch.losses.loss import Loss
from anybatch.losses.model_loss import ModelTerms
from anybatch.losses.terms import Terms
from anybatch.meetings import batch_norms

MOST_ROWS = 8


def refuse_what_does_not_add_up(
    loss: Loss, model: nn.Module, modules: Sequence[nn.Module], batch: Batch, micro_batch: int
) -> None:
    """Compare the terms of a few rows at once with what their parts add up to.

    Cheap: two forwards of at most eight rows, without gradient, in evaluation mode, so that neither dropout
    nor BatchNorm disturbs. Buffers, modes and random states are as before. What draws random numbers
    nevertheless, or fails, is left to the step. `anybatch.check` is the whole test, and says where the fault
    lies.

    Args:
        loss: whose totals are compared. Torch's own add up, and a whole-batch loss need not, so only a
            function of the caller's own and a model's own loss are looked at.
        model: what the loss calls.
        modules: those of the model and of the loss.
        batch: the rows to choose from: the first ones.
        micro_batch: rows that are known to fit.

    Raises:
        LossError: a term of the parts differs from that of the whole by more than rounding.

    Example:
        >>> from anybatch.batch import TensorBatch
        >>> from anybatch.total import Total
        >>> def mean_of_means(model, micro):
        ...     return Total(model(micro).square().mean(), 1)
        >>> batch, model = TensorBatch(torch.arange(5.0)[:, None]), nn.Linear(1, 1)
        >>> refuse_what_does_not_add_up(Terms(mean_of_means), model, [model], batch, 4)
        Traceback (most recent call last):
        ...
        anybatch.errors.LossError: Expected the totals of mean_of_means to add up, got ...
    """
    rows = min(batch.rows, max(2, micro_batch), MOST_ROWS)
    if rows < 2 or not isinstance(loss, Terms | ModelTerms):
        return
    # Unequal parts: equal ones hide a mean of means.
    few, part = batch.head(rows), min(rows - 1, -(-2 * rows // 3))
    try:
        with _undisturbed(modules), torch.no_grad():
            before = rng.capture_process()
            whole = _totals(loss, model, few, rows)
            parts = _totals(loss, model, few, part)
            # Statistics and draws would differ, and rightly; what names terms anew the step refuses.
            if batch_norms(modules) or rng.has_moved(before) or whole.keys() != parts.keys():
                return
    except LossError:
        if isinstance(loss, ModelTerms):  # which saw parts of unequal size; the step may see equal ones only
            raise
        return
    except Exception:  # the step meets it again, and says what is to be said
        return
    # Many models compute their own loss in float32, whatever their parameters.
    dtypes = [*[p.dtype for p in model.parameters()], *[torch.float32] * isinstance(loss, ModelTerms)]
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
    for name, (expected, weight, _) in whole.items():
        found, added, size = parts[name]
        if not (weight and added and math.isfinite(expected)):  # nothing to say, or the step will say it
            continue
        # NaN from a part of which the whole is finite is a fault, too: a mean over no valid element.
        if not abs(found / added - expected / weight) <= rounding * size / added:
            function = loss.function if isinstance(loss, Terms) else model
            called = getattr(function, "__name__", type(function).__name__)
            raise LossError(
                f"Expected the totals of {called} to add up, got {expected / weight:.6g} for {name!r} from "
                f"{rows} rows at once and {found / added:.6g} from the same rows in parts of {part} and "
                f"{rows - part}. Either its weight is not what its sum is divided by (return ab.Total(sum "
                "over valid elements, how many they are)), or rows meet, in the model or in the loss "
                "(ab.WholeBatch). ab.check(model, loss, batch) says which and where; Step(check=False) skips "
                "this test."
            )


@contextmanager
def _undisturbed(modules: Sequence[nn.Module]) -> Generator[None]:
    """Evaluation mode; afterwards modes, buffers and random states are as before."""
    modes = [(module, module.training) for module in modules]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers(recurse=False)]
    random = rng.capture_process()
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        rng.restore_process(random)
        for module, mode in modes:
            module.training = mode
        for buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def _totals(loss: Loss, model: nn.Module, batch: Batch, size: int) -> dict[str, tuple[float, float, float]]:
    """Sum, weight and the size of what was added, of each term."""
    totals: dict[str, tuple[float, float, float]] = {}
    if isinstance(loss, ModelTerms):  # whose later micro-batches repeat the first
        loss = ModelTerms()
    for micro in batch.cut(size):
        terms = loss.evaluate(model, micro)
        for name, weight in terms.weigh().items():
            value = float(terms.sums[name])
            old = totals.get(name, (0.0, 0.0, 0.0))
            totals[name] = (old[0] + value, old[1] + float(weight), old[2] + abs(value))
    return totals
