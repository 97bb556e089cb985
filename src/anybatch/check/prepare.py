"""Preparation of a check: a dtype that runs, rows that differ, as many as there is time for"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule

from anybatch.check.draws import Draws, OutOfTime
from anybatch.check.passes import Bench
from anybatch.check.rows import RowCut, rows_of, subset
from anybatch.check.subject import Subject, named_parameters
from anybatch.core import BatchError, Collate, PlanError, SampleBatch, TensorBatch, tree
from anybatch.losses import WholeBatch, module_of
from anybatch.memory import room_of
from anybatch.planner import refuse_lazy
from anybatch.trial import RowPart, choose_rows, numbered_anew

ALL_ROWS = 64  # the most rows that are tried if a few rows do not run
PASSES = 3  # over all rows: the whole and two cuts
LEAST = 3  # the fewest rows with an uneven split
BUDGET_S = 30.0  # for these passes and everything before them
WARM_S = 0.6  # a longer first pass is not repeated for timing
WIDE_S = 1.5  # if a pass over two rows takes longer in float64, use the model's own dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """The rows and the bench of a check."""

    bench: Bench
    whole: RowCut  # the chosen rows, uncut; collated if possible
    # the same rows before `collate`; None without `collate`
    samples: RowCut | None
    notes: tuple[str, ...]  # for the report

    def without_dropout(self) -> "Prepared":
        """Return a copy with dropout switched off."""
        note = "dropout was switched off: it is unknown which of its numbers belong to which row"
        bench = replace(self.bench, draws=self.bench.draws.restarted(without_dropout=True))
        return replace(self, bench=bench, notes=(*self.notes, note))


def prepare(
    model: nn.Module,
    loss: object,
    batch: Any,
    collate: Collate | None,
    micro_batch: int | None,
    rows: int | None,
    batch_norm: str | None,
    start: float,
) -> Prepared:
    """Choose rows, and find the widest dtype in which the model runs on them."""
    _refuse(model, loss)
    total = rows_of(batch, collate)
    if total < 2 or (rows is not None and rows < 2):
        raise BatchError(
            f"Expected at least 2 rows to cut, got {total if total < 2 else rows}. Hand over a larger batch."
        )
    wanted = min(total, rows or total)
    given = TensorBatch(batch) if collate is None else SampleBatch(batch, collate)
    choose = choose_rows(given, min(total, ALL_ROWS))

    def cut(count: int) -> RowCut:
        chosen = choose(min(count, ALL_ROWS))
        others = sorted({*range(total)} - {*chosen}) if count > len(chosen) else []
        chosen += others[: count - len(chosen)]
        data = subset(batch, collate, chosen)
        if isinstance(loss, WholeBatch) and collate is None:
            data = numbered_anew(TensorBatch(data), given).whole
        return RowCut(data=data, micro_batch=len(chosen), part=RowPart.whole(len(chosen)), collate=collate)

    # Two rows may be too few for a model; a loss that holds a tensor per row needs all rows.
    cuts = [cut(size) for size in dict.fromkeys([2, min(ALL_ROWS, wanted), min(ALL_ROWS, total)])]
    found = _first_that_runs(model, loss, cuts, batch_norm=batch_norm or "micro", is_short=rows is None)
    least = len(found.cut.part.rows)
    wanted = max(wanted, least)
    if rows is None:
        affordable = _affordable(found, start) if least == 2 else least
        wanted = min(wanted, max(affordable, 2 * (micro_batch or 0) + 1))
    whole = found.cut if wanted == least else cut(wanted)
    bench = replace(found.bench, draws=found.bench.draws.restarted())
    if collate is None:
        return Prepared(bench=bench, whole=whole, samples=None, notes=found.notes)
    collated, note = _collated(whole, collate, bench.draws)
    return Prepared(
        bench=bench, whole=collated or whole, samples=None if note else whole, notes=(*found.notes, *note)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Found:
    bench: Bench
    cut: RowCut  # the rows
    seconds: float  # duration of the pass
    notes: tuple[str, ...]  # for the report


def _first_that_runs(
    model: nn.Module, loss: object, cuts: Sequence[RowCut], *, batch_norm: str, is_short: bool
) -> _Found:
    """Return the first pass that comes to its end: in float64, else in the own dtype."""
    errors: list[Exception] = []

    def run(dtype: torch.dtype | None, is_wide: bool, seconds: float) -> _Found | None:
        subject = Subject(model, loss, dtype)
        for cut in cuts:
            start = time.perf_counter()
            bench = Bench(subject=subject, draws=Draws(is_wide=is_wide), batch_norm=batch_norm)
            try:
                with bench.draws.until(start + seconds):
                    failure = bench.run(cut).failure
            except Exception as error:  # a device may have no float64
                failure = error
            if failure is None:
                taken = time.perf_counter() - start
                return _Found(bench=bench, cut=cut, seconds=taken, notes=())
            errors.append(failure)
        return None

    is_wide_already = all(p.dtype == torch.float64 for p in model.parameters())
    limit = WIDE_S if is_short and not is_wide_already else math.inf
    note = ""
    for is_wide in (True, False):
        try:
            found = run(torch.float64, is_wide, limit)
        except OutOfTime:
            note = "float64 would take too long, so errors are those of the model's own dtype"
            break
        if found is not None:
            return found
    found = run(None, False, math.inf)
    if found is None:
        raise errors[-1]
    return replace(found, notes=(note or f"it does not run in float64 ({_line(errors[0])})",))


def _affordable(found: _Found, start: float) -> int:
    seconds = found.seconds
    if seconds < WARM_S:  # the first pass includes one-time costs
        begun = time.perf_counter()
        found.bench.run(found.cut)
        seconds = time.perf_counter() - begun
    left = BUDGET_S - (time.perf_counter() - start)
    per_row = seconds / 2 or 1e-9
    ragged = LEAST if 2 * LEAST * per_row <= left else 2
    room = room_of(next(iter(found.bench.subject.named.values())).device)
    fit = math.inf if room is None else room / (found.bench.draws.nbytes / 2 or 1)
    return max(ragged, int(min(fit, left / (PASSES * per_row))))


def _collated(whole: RowCut, collate: Collate, draws: Draws) -> tuple[RowCut | None, tuple[str, ...]]:
    """Return all rows as one nest of tensors, so that all splits have the same padding."""
    draws.begin(whole.part)
    value = collate(list(whole.data))
    try:
        TensorBatch(value)
    except BatchError:
        return None, ()
    note = () if _same(value, collate(list(whole.data))) else ("`collate` draws random numbers; it ran once",)
    return RowCut(data=value, micro_batch=whole.micro_batch, part=whole.part), note


def _same(one: Any, other: Any) -> bool:
    pairs = zip(tree.flatten(one).leaves, tree.flatten(other).leaves, strict=True)
    return all(a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num())) for a, b in pairs)


def _line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:120]}"
