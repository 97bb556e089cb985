"""Every sentence of a refusal: the term, the two figures, the cause as far as it is known, the way out"""

from collections.abc import Sequence
from textwrap import shorten

from anybatch import core
from anybatch.core import LossError
from anybatch.losses import Additive, Terms, function_of
from anybatch.trial import Bench, Split

_LONGEST = 160  # characters of an error that are shown within another
_SKIP = "Options(check=False) skips this."
_NAMES = "ab.check(model, loss, batch) names the place"


def not_compared(reason: str) -> str:
    """Say that nothing was found out."""
    return (
        f"Expected to find the same loss and gradient for every split, but {reason}. The step goes on, and "
        "its reports say checked=False. ab.check(model, loss, batch) judges it; Options(check=False) skips "
        "this look."
    )


def cuts_differ(
    made: Bench,
    found: str,
    cuts: tuple[Split, Split],
    *,
    is_nonlinear: bool,
    hooked: str,
    mixes: bool,
    moved: str,
    is_disturbed: bool,
) -> LossError:
    """Say that a few rows give another loss or gradient in another cut."""
    likely = (
        "Rows affect each other (batch_first, broadcasting; a statistic of the batch: compute it before the "
        "step, or see ab.WholeBatch; pairs in two halves: make them two columns), "
    )
    if is_nonlinear:
        likely = "A backward is not linear (it clamps, rounds or normalises, as the same cut differs too "
        likely += "with another divisor or recomputation), "
    if isinstance(made.rows, core.SampleBatch):
        likely += "padded places of `collate` count, "
    if hooked:
        likely += f"a hook on {hooked!r} changes the gradient of each micro-batch, "
    is_sum = isinstance(made.task.loss, Additive)
    likely += "or ab.Additive got a mean." if is_sum else "or a Total's weight is not its divisor."
    if mixes:
        likely = "It draws random numbers and mixes rows by them (a permutation, negatives of the batch). "
    if moved:
        likely = f"The forward changes {moved}, and later forwards may compute with it{_of_norm(moved)}."
    advice = "Move it once per update, after the step" if is_disturbed else _NAMES
    return LossError(
        f"Expected the same loss and gradient from {_name(made)} for every split, got {found} for "
        f"{made.rows.rows} rows as {cuts[0]} and as {cuts[1]}. {likely} {advice}; {_SKIP}"
    )


def state_moves(made: Bench, name: str, found: str) -> LossError:
    """Say that a forward computes with a number that it moves."""
    return LossError(
        f"Expected a forward that finds the same attributes in every micro-batch, got {found} for "
        f"{made.rows.rows} rows of {_name(made)} once {name} has moved on as by the micro-batches to come. "
        f"The forward changes {name}, and later forwards compute with it. Move it once per update, after the "
        f"step; {_SKIP}"
    )


def losses_differ(rows: int, found: str, sizes: Sequence[int], compared: int) -> LossError:
    """Say that all rows have another loss than their micro-batches; it was the same at update `compared`."""
    since = f"It was the same at update {compared}. " if compared else ""
    return LossError(
        f"Expected the same loss from {rows} rows as {rows} and as {Split(tuple(sizes))}, got {found}. "
        f"{since}Rows affect each other, in the loss or in the model: see ab.WholeBatch. No update was made; "
        f"{_NAMES}, {_SKIP}"
    )


def weights_differ(
    made: Bench, name: str, weights: tuple[float, float], cuts: tuple[Split, Split]
) -> LossError:
    """Say that the weights of a term do not add up."""
    return LossError(
        f"Expected weights of {name!r} from {_name(made)} that add up, got {weights[0]:g} for "
        f"{made.rows.rows} rows as {cuts[0]} and {weights[1]:g} as {cuts[1]}. Let Total's weight be that of "
        "its rows: their number, or that of valid tokens; for a plain sum, rows / rows of the batch."
    )


def padding_counts(
    made: Bench, found: str, cured: Sequence[str], error: Exception | None = None
) -> LossError:
    """Say that trimmed rows give another result, or an error; and which columns cure that if left whole."""
    got = (
        f"Expected {_name(made)} to take rows without their padding, got {first_sentence(error)}."
        if error is not None
        else f"Expected the same loss and gradient from {_name(made)} with less padding, got {found} for "
        f"{made.rows.rows} rows padded and trimmed."
    )
    trimmed = 'order="length" trimmed ' + ", ".join([f"batch{path}" for path in made.rows.trimmed])
    keep = f"order=anybatch.step.ByLength(keep=({', '.join(cured) or '...'},))"
    if cured:
        return LossError(
            f"{got} {trimmed}; with column {' or '.join(cured)} left whole the result is right. If it does "
            f"not run along the length, pass {keep}; else mask its padding, or leave order out."
        )
    return LossError(
        f"{got} {trimmed}, where padded places must not count: no mean over them, no position that counts "
        f"them, no attention to them, no labels there. Mask them, keep columns without places whole by "
        f"{keep}, or leave order out; {_NAMES}, {_SKIP}"
    )


def buffers_differ(made: Bench, name: str, cuts: tuple[Split, Split]) -> str:
    """Say that a saved buffer depends on the cut."""
    return (
        f"Expected buffers whose values do not depend on the split, got others in {name} of {_name(made)} "
        f"as {cuts[0]} and as {cuts[1]}. Loss and gradient are exact; what reads it later differs from the "
        "whole batch. Leave out running statistics, or do not split the batch."
    )


def moved(name: str) -> str:
    """Say in brackets what a forward writes to."""
    return f" (the forward changes {name}{_of_norm(name)})" if name else ""


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error, shortened at a word, without its end."""
    first = next(iter(str(error).splitlines()), "").partition(". ")[0].rstrip(" .:")
    return f"{type(error).__name__}: {shorten(first, _LONGEST, placeholder=' (...)')}"


def _of_norm(name: str) -> str:
    is_iterated = name.endswith(("_u'", "_v'"))  # by spectral_norm
    advice = ": a power iteration. Keep spectral_norm in eval(), iterate once per update (docs/callbacks.md)"
    return advice if is_iterated else ""


def _name(made: Bench) -> str:
    loss = made.task.loss
    called = function_of(loss) if isinstance(loss, Terms | Additive) else made.task.model
    return getattr(called, "__name__", type(called).__name__)
