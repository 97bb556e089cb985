"""Preparation of a check: a dtype that runs, rows that differ, as many as there is time for"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product, repeat

import torch
from torch import nn
from torch.jit import ScriptModule

from anybatch.check.bench import CheckBench, Draws, named_parameters
from anybatch.check.passes import Pass
from anybatch.check.rows import Rows, is_close
from anybatch.core import Batch, BatchError, PlanError, TensorBatch, tree
from anybatch.losses import WholeBatch, module_of
from anybatch.memory import room_of
from anybatch.planner import refuse_lazy
from anybatch.trial import choose_rows, numbered_anew

ALL_ROWS = 64  # the most rows that are tried if a few rows do not run
PASSES = 4  # over all rows: the whole and three cuts
LEAST = 3  # the fewest rows with an uneven split
WIDE_S = 1.5  # if a pass over two rows takes longer in float64, use the model's own dtype
_DTYPES = ((torch.float64, True), (torch.float64, False), (None, False))  # and: also where the model casts


def prepare(
    bench: CheckBench, given: Batch, micro_batch: int | None, rows: int | None
) -> tuple[CheckBench, Rows, Batch | None, list[str]]:
    """Choose the widest dtype that runs, and rows, so that passes over them take half of the time.

    Return the bench, the rows as one micro-batch, collated if possible, the same rows before `collate` if it
    draws no numbers, and notes for the report.
    """
    total, notes = given.rows, list[str]()
    wanted = total if rows is None else min(total, rows)
    if wanted < 2:
        raise BatchError(f"Expected at least 2 rows to cut, got {wanted}. Hand over a larger batch.")
    choose = choose_rows(given)

    def cut(count: int) -> Rows:
        chosen = dict.fromkeys([*choose(min(count, ALL_ROWS)), *range(total)])
        few = given.only([*chosen][:count])
        return Rows.uncut(numbered_anew(few, given) if isinstance(bench.loss, WholeBatch) else few)

    # Two rows may be too few for a model; a loss that holds a tensor per row needs all rows.
    sizes = dict.fromkeys([2, min(ALL_ROWS, wanted), min(ALL_ROWS, total)])
    found, few = _first_that_runs(bench, [*map(cut, sizes)], WIDE_S if rows is None else math.inf, notes)
    if rows is None:
        wanted = min(wanted, max(_affordable(found, few, bench.deadline), 2 * (micro_batch or 0) + 1))
    whole = cut(wanted) if wanted > few.batch.rows else few
    bench = replace(bench, dtype=found.dtype, draws=Draws(is_wide=found.draws.is_wide))
    whole, samples = _collated(bench, whole, notes) if whole.batch.whole is None else (whole, None)
    return bench, whole, samples, notes


def refuse_without_data(model: nn.Module, loss: object) -> None:
    """Raise PlanError if model or loss have tensors on the meta device, without values to compare."""
    held = model, module_of(loss)
    named = [pair for one in held for pair in (*one.named_parameters(), *one.named_buffers())]
    empty = [name for name, tensor in named if tensor.is_meta]
    if empty:
        raise PlanError(
            f"Expected a model with values to check, got {len(empty)} of its tensors on the meta device, the "
            f"first of them {empty[0]}. Make it on a real device; anybatch.plan takes it as it is."
        )


def refuse(model: nn.Module, loss: object) -> None:
    """Raise PlanError if a model cannot be watched, or nothing is trained."""
    refuse_without_data(model, loss)
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
    bench: CheckBench, cuts: Sequence[Rows], limit: float, notes: list[str]
) -> tuple[CheckBench, Rows]:
    """Return a bench and rows of which a pass ends; give float64 up after `limit` seconds."""
    errors = list[Exception]()
    if all(p.dtype == torch.float64 for p in bench.model.parameters()):
        limit = math.inf
    for (dtype, is_wide), few in product(_DTYPES, cuts):
        if dtype is None and not notes:
            line = str(errors[0]).strip().partition("\n")[0][:120]
            notes.append(f"it does not run in float64 ({type(errors[0]).__name__}: {line})")
        elif dtype is not None and notes:
            continue
        deadline = time.perf_counter() + (math.inf if dtype is None else limit)
        tried = replace(bench, draws=Draws(is_wide=is_wide), dtype=dtype, deadline=deadline)
        found = tried.in_time(partial(Pass, tried, few))
        if found is None:
            notes.append("float64 would take too long, so errors are those of the model's own dtype")
        elif found.failure is None:
            return tried, few
        else:
            errors.append(found.failure)
    raise errors[-1]


def _affordable(bench: CheckBench, few: Rows, deadline: float) -> int:
    start, rows = time.perf_counter(), few.batch.rows
    Pass(bench, few)  # the first one had one-time costs
    now = time.perf_counter()
    in_time = (deadline - now) / 2 * rows / (now - start)  # rows of one pass
    room = room_of(next(iter(bench.named.values())).device)
    fit = math.inf if room is None else room * 2 * rows / (bench.draws.nbytes or 1)  # two passes were noted
    return max(rows, min(LEAST, int(in_time / 2)), int(min(fit, in_time / PASSES)))


def _collated(bench: CheckBench, whole: Rows, notes: list[str]) -> tuple[Rows, Batch | None]:
    """Collate all rows once, if that gives a nest of tensors, so that all splits have the same padding."""
    bench.draws.begin(whole.part)
    one, other = [next(whole.batch.cut(whole.micro_batch)) for _ in range(2)]
    try:
        collated = TensorBatch(one)
    except BatchError:
        return whole, None
    is_same = all(map(is_close, collated.leaves, tree.flatten(other).leaves, repeat(0.0)))
    if not is_same:
        notes.append("`collate` draws random numbers; it ran once")
    return Rows.uncut(collated), whole.batch if is_same else None
