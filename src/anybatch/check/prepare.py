"""Preparation of a check: a dtype that runs, rows that differ, as many as there is time for"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.jit import ScriptModule

from anybatch.check.bench import Bench, Draws, named_parameters
from anybatch.check.passes import Pass
from anybatch.check.rows import Rows
from anybatch.compare import choose_rows, numbered_anew
from anybatch.core import Batch, BatchError, PlanError, SampleBatch, TensorBatch, tree
from anybatch.losses import WholeBatch, module_of
from anybatch.memory import room_of
from anybatch.planner import refuse_lazy

ALL_ROWS = 64  # the most rows that are tried if a few rows do not run
PASSES = 4  # over all rows: the whole and three cuts
LEAST = 3  # the fewest rows with an uneven split
WARM_S = 0.6  # a longer first pass is not repeated for timing
WIDE_S = 1.5  # if a pass over two rows takes longer in float64, use the model's own dtype
_DTYPES = ((torch.float64, True), (torch.float64, False), (None, False))  # and: also where the model casts


class Prepared(NamedTuple):
    """The rows and the bench of a check."""

    bench: Bench
    whole: Rows  # the chosen rows, uncut; collated if possible
    samples: Batch | None  # the same rows before `collate`, if they were collated
    notes: list[str]  # for the report

    def without_dropout(self) -> "Prepared":
        """Return a copy with dropout switched off."""
        note = "dropout was switched off: it is unknown which of its numbers belong to which row"
        draws = Draws(without_dropout=True, is_wide=self.bench.draws.is_wide)
        return self._replace(bench=replace(self.bench, draws=draws), notes=[*self.notes, note])


def prepare(
    model: nn.Module,
    loss: Any,
    given: Batch,
    micro_batch: int | None,
    rows: int | None,
    batch_norm: str,
    *,
    middle: float,
    end: float,
) -> Prepared:
    """Choose rows, and find the widest dtype in which the model runs on them.

    Passes over all rows should be over in the `middle`; the check ends at the `end`.
    """
    _refuse(model, loss)
    total = given.rows
    if total < 2 or (rows is not None and rows < 2):
        raise BatchError(
            f"Expected at least 2 rows to cut, got {total if total < 2 else rows}. Hand over a larger batch."
        )
    wanted = min(total, rows or total)
    choose = choose_rows(given, min(total, ALL_ROWS))

    def cut(count: int) -> Rows:
        chosen = choose(min(count, ALL_ROWS))
        others = sorted({*range(total)} - {*chosen}) if count > len(chosen) else []
        few = given.only([*chosen, *others[: count - len(chosen)]])
        return Rows.uncut(numbered_anew(few, given) if isinstance(loss, WholeBatch) else few)

    # Two rows may be too few for a model; a loss that holds a tensor per row needs all rows.
    cuts = [cut(size) for size in dict.fromkeys([2, min(ALL_ROWS, wanted), min(ALL_ROWS, total)])]
    bench = Bench(model=model, loss=loss, draws=Draws(), dtype=None, batch_norm=batch_norm, deadline=end)
    is_wide_already = all(p.dtype == torch.float64 for p in model.parameters())
    limit = WIDE_S if rows is None and not is_wide_already else math.inf
    bench, few, seconds, notes = _first_that_runs(bench, cuts, limit)
    least = few.batch.rows
    if rows is None:
        affordable = _affordable(bench, few, seconds, middle) if least == 2 else least
        wanted = min(wanted, max(affordable, 2 * (micro_batch or 0) + 1))
    whole = cut(wanted) if wanted > least else few
    bench = replace(bench, draws=Draws(is_wide=bench.draws.is_wide), deadline=end)
    if isinstance(given, SampleBatch):
        return _collated(bench, whole, notes)
    return Prepared(bench, whole, None, notes)


def refuse_without_data(model: nn.Module, loss: object) -> None:
    """Raise PlanError if model or loss have tensors on the meta device, without values to compare."""
    held = [one for one in (model, loss) if isinstance(one, nn.Module)]
    named = [pair for one in held for pair in (*one.named_parameters(), *one.named_buffers())]
    empty = [name for name, tensor in named if tensor.is_meta]
    if empty:
        raise PlanError(
            f"Expected a model with values to check, got {len(empty)} of its tensors on the meta device, the "
            f"first of them {empty[0]}. Make it on a real device; anybatch.plan takes it as it is."
        )


def _refuse(model: nn.Module, loss: object) -> None:
    scripted = [name or "the model" for name, one in model.named_modules() if isinstance(one, ScriptModule)]
    if scripted:
        raise PlanError(
            f"Expected a model whose modules can be watched, got TorchScript at {scripted[0]}. Check it "
            "as it was before torch.jit.script or torch.jit.trace."
        )
    refuse_lazy([*model.modules(), *module_of(loss).modules()])
    if not named_parameters(model, loss):
        raise PlanError(
            f"Expected a model or a loss with trainable parameters, got {type(model).__name__} without any. "
            "Where all are frozen there is no gradient to compare."
        )


def _first_that_runs(
    bench: Bench, cuts: Sequence[Rows], limit: float
) -> tuple[Bench, Rows, float, list[str]]:
    """Return the first bench and rows of a pass that ends, its seconds and notes; `limit` is for float64."""
    errors, notes = list[Exception](), list[str]()
    for (dtype, is_wide), few in product(_DTYPES, cuts):
        if notes and dtype is not None:
            continue
        start = time.perf_counter()
        deadline = math.inf if dtype is None else start + limit
        bench = replace(bench, draws=Draws(is_wide=is_wide), dtype=dtype, deadline=deadline)
        found = bench.in_time(partial(Pass, bench, few))
        if found is None:
            notes = ["float64 would take too long, so errors are those of the model's own dtype"]
        elif found.failure is not None:
            errors.append(found.failure)
        else:
            if dtype is None and not notes:
                line = str(errors[0]).strip().partition("\n")[0][:120]
                notes = [f"it does not run in float64 ({type(errors[0]).__name__}: {line})"]
            return bench, few, time.perf_counter() - start, notes
    raise errors[-1]


def _affordable(bench: Bench, few: Rows, seconds: float, middle: float) -> int:
    """Return the number of rows for which there is time and memory, by a pass over two."""
    if seconds < WARM_S:  # the first pass includes one-time costs
        begun = time.perf_counter()
        Pass(bench, few)
        seconds = time.perf_counter() - begun
    in_time = (middle - time.perf_counter()) * 2 / (seconds or 1e-9)  # rows of one pass
    room = room_of(next(iter(bench.named.values())).device)
    fit = math.inf if room is None else room / (bench.draws.nbytes / 2 or 1)
    return max(2, min(LEAST, int(in_time / 2)), int(min(fit, in_time / PASSES)))


def _collated(bench: Bench, whole: Rows, notes: list[str]) -> Prepared:
    """Collate all rows once, if that gives a nest of tensors, so that all splits have the same padding."""
    bench.draws.begin(whole.part)
    one, other = [next(whole.batch.cut(whole.micro_batch)) for _ in range(2)]
    try:
        collated = TensorBatch(one)
    except BatchError:
        return Prepared(bench, whole, None, notes)
    pairs = zip(collated.leaves, tree.flatten(other).leaves, strict=True)
    is_same = all(a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
    if not is_same:
        notes.append("`collate` draws random numbers; it ran once")
    return Prepared(bench, Rows.uncut(collated), whole.batch if is_same else None, notes)
