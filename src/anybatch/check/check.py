"""`ab.check`: compare splits with the whole batch on a few rows, and name the cause of a difference"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from anybatch.check.draws import OutOfTime
from anybatch.check.finding import WAYS_OUT, Finding, module_finding
from anybatch.check.modules import ModuleTest, first_that_differs
from anybatch.check.prepare import Prepared, prepare
from anybatch.check.rows import find_padding, trimmed
from anybatch.check.splits import (
    Comparison,
    Pass,
    cut_sizes_to_try,
    find_state,
    name_of,
    rows_differ,
    worst_of,
)
from anybatch.check.terms import TermTest
from anybatch.core import BatchError, Collate, LossError, PlanError, SampleBatch, batch_of, html_table
from anybatch.engine import check_micro_batch
from anybatch.losses import LossLike
from anybatch.parallel import refuse_sharded, unwrapped
from anybatch.state import rng
from anybatch.step import DEFAULT, Options, known_keywords
from anybatch.trial import RowPart

CUTTING_S = 40.0  # a further split is given up after this time
CHECK_S = 60.0  # everything else is given up after this time
_NOT_PROVEN = "This does not say that the weight (what the loss is divided by) is the one you meant."


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The result of a check.

    Attributes:
        exact: True if every split gave the gradient, loss and saved buffers of the whole batch, and nothing
            else was found.
        error: largest relative error of the gradient. Infinite if a split failed.
        loss_error: largest relative error of the loss.
        rows: number of rows checked.
        cuts: how they were split, as in ("3+3+2", "5+3", "1 by 1").
        dtype: dtype of the model during the check.
        limit: largest error that counts as rounding.
        findings: causes of differences. Empty if exact.
        notes: further remarks.
        seconds: duration of the check.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> report = check(nn.Linear(3, 1), nn.MSELoss(), (torch.randn(8, 3), torch.randn(8, 1)))
        >>> report.exact, report.rows, report.findings
        (True, 8, ())
    """

    exact: bool
    error: float
    loss_error: float
    rows: int
    cuts: tuple[str, ...]
    dtype: str
    limit: float
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    seconds: float

    def __repr__(self) -> str:
        found = ", ".join(f"{one.kind} in {one.culprit}" for one in self.findings)
        return f"CheckReport({'exact' if self.exact else found}, error {self.error:.2g}, {self.rows} rows)"

    def to_json(self) -> str:
        """Return one JSON object; infinite numbers are null."""
        values = asdict(self)
        values |= {name: None for name in ("error", "loss_error") if not math.isfinite(values[name])}
        return json.dumps(values)

    def __str__(self) -> str:
        head, *rest = [f"{name}: {text}" for name, text in self._rows()]
        return "\n".join([head, *[one if one.startswith("note: ") else _indented(one) for one in rest]])

    def _repr_html_(self) -> str:
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        cuts = " and ".join(filter(None, (", ".join(self.cuts[:-1]), self.cuts[-1])))
        errors = f"gradient error {self.error:.2g}, loss error {self.loss_error:.2g}, {self.dtype}"
        notes = [("note", note) for note in self.notes]
        if self.exact:
            told = f"split equals whole on {self.rows} rows, cut as {cuts} ({errors})"
            return [("exact", f"{told}\n{_NOT_PROVEN}"), *notes]
        is_update = any(finding.kind != "buffer" for finding in self.findings)
        told = "" if is_update else "the update is, saved buffers are not: "
        found = [str(finding).partition(": ") for finding in self.findings]
        said = "a step refuses this loss" if found[0][0] == "refused" else f"{told}{errors}"
        head = f"{said}, on {self.rows} rows cut as {cuts}"
        return [("NOT exact", head), *[(kind, text) for kind, _, text in found], *notes]


def _indented(text: str) -> str:
    return "  " + text.replace("\n", "\n  ")


@known_keywords()
def check(
    model: nn.Module,
    loss: LossLike,
    batch: Any,
    *,
    collate: Collate | None = None,
    micro_batch: int | None = None,
    rows: int | None = None,
    options: Options = DEFAULT,
) -> CheckReport:
    """Test on rows of a batch that every split gives the same result, and name the cause if one does not.

    The test runs the model itself, in float64 if the model can. It compares a step on all rows at once
    with steps on the same rows in several splits. Random numbers are replayed, so that dropout gives each row
    the same mask. If gradient or loss differ, it searches for the innermost module or term that differs.
    Padded rows are also tried without their padding. Model, loss, batch and random state are not changed.

    Args:
        model: as for `anybatch.Step`, in the mode to check (usually training).
        loss: as for `anybatch.Step`. May also be a function `(model, micro)` that returns a plain mean: then
            the check searches for its denominator.
        batch: as for `anybatch.Step`, at least 2 rows. Use rows of different lengths and classes.
        collate: as for `anybatch.Step`.
        micro_batch: another size to try.
        rows: rows to check on. By default as many as the batch has and half a minute allows.
        options: those of your step. Only `batch_norm` matters: unless it is "frozen", each BatchNorm in
            training mode is a finding.

    Returns:
        The report. Print it to read it.

    Raises:
        BatchError, LossError, PlanError: a step would refuse these rows in every split.
        Exception: whatever the model or the loss raises on all rows at once.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        >>> batch = torch.randn(16, 3), torch.randn(16, 1)
        >>> report = check(model, nn.MSELoss(), batch)
        >>> report.exact, report.findings[0].kind, report.findings[0].culprit
        (False, 'meeting', '1 (BatchNorm1d)')
        >>> check(model.eval(), nn.MSELoss(), batch).exact
        True
    """
    start = time.perf_counter()
    model = unwrapped(model, "auto")  # rank 0 may check while the others wait
    refuse_sharded(model, "a check")
    refuse_without_data(model, loss)
    if micro_batch is not None:
        check_micro_batch(micro_batch)
    found = batch_of(batch, collate)
    if isinstance(found, SampleBatch):  # also a batch with columns
        batch, collate = found.given, found.collate
    with rng.preserved():
        prepared = prepare(model, loss, batch, collate, micro_batch, rows, options.batch_norm, start)
        comparison, passes = _compare_cuts(prepared, micro_batch, start)
        if _differ(comparison, passes) and may_be_dropout(comparison, passes):
            again = prepared.without_dropout()
            other, others = _compare_cuts(again, micro_batch, start)
            if not _differ(other, others) or not rows_differ(other, others):
                prepared, comparison, passes = again, other, others
        findings: list[Finding] = []
        notes = list(prepared.notes)
        if comparison.doubt:
            notes.append(comparison.doubt)
        with comparison.bench.draws.until(start + CHECK_S):
            if comparison.doubt and _differ(comparison, passes) and not comparison.reference.bare:
                what = f"Split and whole differ, perhaps by rounding: {comparison.doubt}."
                way_out = "Hand over rows that the model does not fit perfectly."
                findings.append(
                    Finding(kind="unexplained", culprit=name_of(loss), what=what, ways_out=(way_out,))
                )
            elif comparison.reference.bare or _differ(comparison, passes):
                findings += explain(comparison, passes, name_of(loss))
            if all(finding.kind == "denominator" for finding in findings):  # the model itself splits exactly
                findings += find_state(comparison, passes)
            try:
                more, found = _try_padding(comparison, prepared, passes, name_of(loss))
            except OutOfTime:
                notes.append("there was no time to look whether padding matters")
            else:
                passes += more
                if any(one.kind == "denominator" for one in findings):  # it counts padded places, too
                    found = [one for one in found if one.culprit != name_of(loss)]
                findings += found
        limit = comparison.limit
    subject = prepared.bench.subject
    dtype = subject.dtype or next(iter(subject.named.values())).dtype
    return CheckReport(
        exact=not findings,
        error=max(one.error for one in passes),
        loss_error=max(one.loss_error for one in passes),
        rows=len(prepared.whole.part.rows),
        cuts=tuple(one.words for one in passes),
        dtype=str(dtype).removeprefix("torch."),
        limit=limit,
        findings=tuple(findings),
        notes=tuple(notes),
        seconds=time.perf_counter() - start,
    )


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


def _compare_cuts(prepared: Prepared, micro_batch: int | None, start: float) -> tuple[Comparison, list[Pass]]:
    bench, whole = prepared.bench, prepared.whole
    reference = bench.run(whole)
    rows = range(len(whole.part.rows))
    if reference.failure is not None:
        raise reference.failure
    if not reference.is_weighed:
        raise BatchError(
            f"Expected rows that count, got {len(rows)} whose weight is 0 (all of them are masked). "
            "Hand over a batch with valid targets."
        )
    comparison = Comparison(bench=bench, whole=whole, reference=reference)
    passes: list[Pass] = []
    for size in cut_sizes_to_try(len(rows), micro_batch):
        try:
            with bench.draws.until(start + CUTTING_S if passes else math.inf):
                passes.append(comparison.cut_by(size))
        except OutOfTime:
            break
        if reference.bare:
            break  # never exact, whatever the others say
    if reference.unreplayed:
        # Numbers drawn by position may be right by chance while rows come in order.
        turned = replace(whole.only(rows[::-1]), micro_batch=1)
        passes.append(comparison.compare(turned, reference, "1 by 1 from the last"))
    several = [one for one in passes if one.cut.micro_batch > 1 or one.failure is None]
    # A model may refuse single rows (BatchNorm does): no fault if other splits run.
    return comparison, several or passes


def _differ(comparison: Comparison, passes: Sequence[Pass]) -> bool:
    return not all(one.holds(comparison.limit) for one in passes)


def _try_padding(
    comparison: Comparison, prepared: Prepared, passes: Sequence[Pass], loss_name: str
) -> tuple[list[Pass], list[Finding]]:
    """Compare a split with the same one with less padding: as `collate` makes it, or trimmed."""
    sound = [one for one in passes if one.failure is None and one.cut.part.is_whole]
    if not sound or comparison.doubt or prepared.whole.collate is not None:
        return [], []
    padded = sound[-1] if prepared.samples is None else sound[0]
    size = padded.cut.micro_batch
    padding = None
    if prepared.samples is not None:
        cut, words = replace(prepared.samples, micro_batch=size), "as `collate` makes it"
        source = "`collate` pads each micro-batch by itself"
    else:
        with comparison.bench.fresh() as (model, _):
            padding = find_padding(prepared.whole.data, model)
        if padding is None:
            return [], []
        cut, words = trimmed(prepared.whole, padding, size), "without padding"
        source = f"{padding.source} says that rows are filled up to {padding.length} places"
    short = comparison.compare(cut, padded, f"{padded.words} {words}")
    if padding is not None and short.failure is not None:
        return [], []  # a model of fixed length
    if short.holds(comparison.limit):
        return [short], []
    is_left = padding is not None and padding.is_left
    return [short], [explain_padding(comparison, padded, short, source, loss_name, is_left=is_left)]


CLOSER = 1e-6  # relative error of sums in float32 that add up


def explain(comparison: Comparison, passes: Sequence[Pass], loss_name: str) -> list[Finding]:
    """Return the findings that explain why a split differs from the whole batch."""
    if refused := [str(one.failure) for one in passes if isinstance(one.failure, LossError)]:
        return [Finding(kind="refused", culprit=loss_name, what=refused[0], ways_out=())]
    worst, is_late = worst_of(comparison, passes), False
    is_sound = not rows_differ(comparison, passes)
    terms: list[Finding] = []
    try:
        terms = _terms(comparison, passes, loss_name, is_sound=is_sound)
    except OutOfTime:
        is_late = True
    if terms and is_sound:
        return terms
    parts, tolerance = worst.cut.parts, 10 * comparison.limit  # outputs average over fewer numbers
    tables = [worst.calls.table(part) for part in parts]
    whole = comparison.reference.calls.table(comparison.whole.part)
    tested = first_that_differs(whole, tables, parts, tolerance)
    found: list[Finding] = []
    if tested is not None and not (terms and tested.fault == "pooled"):
        found = [ModuleTest(comparison.bench, parts[0].total, tolerance).explain(tested)]
    return [*found, *terms] or [_unexplained(worst, loss_name, is_late=is_late)]


def _terms(
    comparison: Comparison, passes: Sequence[Pass], loss_name: str, *, is_sound: bool
) -> list[Finding]:
    whole = comparison.whole
    sizes = cut_sizes_to_try(len(whole.part.rows), None)
    cuts = [one.cut for one in passes]
    known = {cut.micro_batch for cut in cuts}
    cuts += [replace(whole, micro_batch=size) for size in sizes if size not in known]
    # In float32, terms of about the same size seem to add up: compare them with a smaller limit, too.
    limits = (comparison.limit, CLOSER) if is_sound and comparison.limit > CLOSER else (comparison.limit,)
    for limit in limits:
        if found := TermTest(comparison, limit, loss_name).find(cuts):
            return found
    return []


def may_be_dropout(comparison: Comparison, passes: Sequence[Pass]) -> bool:
    """Return True if rows may differ only because dropout draws for them in another order."""
    draws = comparison.bench.draws
    if comparison.reference.unreplayed:
        return False
    return draws.has_packed or (draws.has_dropout and rows_differ(comparison, passes))


def explain_padding(
    comparison: Comparison,
    padded: Pass,
    short: Pass,
    source: str,
    loss_name: str,
    *,
    is_left: bool,
) -> Finding:
    """Return a finding on the module, or the loss, that depends on padded places."""
    long_calls = comparison.bench.run(padded.cut).calls
    short_calls = comparison.bench.run(short.cut).calls
    found = None
    for part in padded.cut.parts:
        tables, rows = [short_calls.table(part)], [RowPart.whole(len(part.rows))]
        found = found or first_that_differs(
            long_calls.table(part), tables, rows, 10 * comparison.limit, from_end=is_left
        )
    error = short.failure
    apart = (
        f"it fails with {type(error).__name__}: {error}"
        if error is not None
        else f"the gradient changes by {short.error:.2g}, the loss by {short.loss_error:.2g}"
    )
    source = f"{source}; with less padding {apart}"
    if found is None:
        what = f"It counts padded places ({source})."
        ways_out = ("Ignore padded places: ignore_index, or a weight of 0.", *WAYS_OUT["padding"][1:])
        return Finding(kind="padding", culprit=loss_name, what=what, ways_out=ways_out)
    with comparison.bench.fresh() as (model, _):
        name = found.call.key[0]
        module = model.get_submodule(name)
    place = name or type(module).__name__
    what = f"`{place}` lets padding change the results at valid places: {source}."
    return module_finding("padding", name, module, what)


def _unexplained(one: Pass, loss_name: str, *, is_late: bool) -> Finding:
    error = one.failure
    reason = "" if error is None else f" It fails with {type(error).__name__}: {str(error).splitlines()[0]}"
    where = "there was no time to look for the cause" if is_late else "no cause was found"
    what = f"Cut as {one.words}, it differs from the whole batch, and {where}.{reason}"
    return Finding(kind="unexplained", culprit=loss_name, what=what, ways_out=WAYS_OUT["unexplained"])
