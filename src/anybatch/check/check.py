"""`ab.check`: compare splits with the whole batch on a few rows, and name the cause of a difference"""

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from anybatch.check.bench import CheckBench, Draws
from anybatch.check.finding import WAYS_OUT, Finding, finding, module_finding
from anybatch.check.modules import explain_module
from anybatch.check.passes import Pass
from anybatch.check.prepare import prepare, refuse
from anybatch.check.rows import find_padding, trimmed
from anybatch.check.splits import Comparison, Pieces, find_state
from anybatch.check.terms import find_terms
from anybatch.core import Collate, LossError, batch_of, html_table
from anybatch.engine import check_micro_batch
from anybatch.losses import LossLike
from anybatch.parallel import refuse_sharded, unwrapped
from anybatch.state import rng
from anybatch.step import DEFAULT, Options, known_keywords
from anybatch.trial import RowPart

CHECK_S = 60.0  # all but the first passes are given up after this time
_DROPOUT = "dropout was switched off: it is unknown which of its numbers belong to which row"
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
        found = ["  " + str(one).replace("\n", "\n  ") for one in self.findings]
        return "\n".join([": ".join(self._head), *found, *[f"note: {note}" for note in self.notes]])

    def _repr_html_(self) -> str:
        found = [(one.kind, str(one).partition(": ")[2]) for one in self.findings]
        return html_table([self._head, *found, *[("note", note) for note in self.notes]])

    @property
    def _head(self) -> tuple[str, str]:
        cuts = " and ".join(", ".join(self.cuts).rsplit(", ", 1))
        errors = f"gradient error {self.error:.2g}, loss error {self.loss_error:.2g}, {self.dtype}"
        if self.exact:
            said = f"split equals whole on {self.rows} rows, cut as {cuts} ({errors})"
            return "exact", f"{said}\n{_NOT_PROVEN}"
        kinds = [one.kind for one in self.findings]
        told = "the update is, saved buffers are not: " if {*kinds} == {"buffer"} else ""
        said = "a step refuses this loss" if kinds[0] == "refused" else told + errors
        return "NOT exact", f"{said}, on {self.rows} rows cut as {cuts}"


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
    refuse(model, loss)
    if micro_batch is not None:
        check_micro_batch(micro_batch)
    with rng.preserved():
        bench = CheckBench(model, loss, Draws(), None, options.batch_norm or "micro", start + CHECK_S)
        prepared = prepare(bench, batch_of(batch, collate), micro_batch, rows)
        compared = Comparison(*prepared, micro_batch)
        if compared.may_be_dropout:
            draws = Draws(without_dropout=True, is_wide=prepared[0].draws.is_wide)
            again = Comparison(replace(prepared[0], draws=draws), *prepared[1:], micro_batch)
            if not (again.differs and again.rows_differ):
                compared = again
                compared.notes.append(_DROPOUT)
        findings = _explain(compared)
    dtype = compared.bench.dtype or next(iter(bench.named.values())).dtype
    return CheckReport(
        exact=not findings,
        error=max(one.error for one in compared.passes),
        loss_error=max(one.loss_error for one in compared.passes),
        rows=compared.whole.batch.rows,
        cuts=tuple([one.words for one in compared.passes]),
        dtype=str(dtype).removeprefix("torch."),
        limit=compared.limit,
        findings=tuple(findings),
        notes=tuple(compared.notes),
        seconds=time.perf_counter() - start,
    )


def _explain(compared: Comparison) -> list[Finding]:
    """Return all findings; add to the passes and the notes of the comparison."""
    findings = list[Finding]()
    if compared.doubt:
        compared.notes.append(compared.doubt)
    if compared.doubt and compared.differs and not compared.reference.bare:
        what = f"Split and whole differ, perhaps by rounding: {compared.doubt}."
        way_out = "Hand over rows that the model does not fit perfectly."
        findings.append(finding("unexplained", compared.name, what, way_out))
    elif compared.differs or compared.reference.bare:
        findings += _causes(compared)
    kinds = {one.kind for one in findings}
    if kinds <= {"denominator"}:  # the model itself splits exactly
        findings += find_state(compared)
    padding = compared.bench.in_time(partial(_of_padding, compared))
    if padding is None:
        compared.notes.append("there was no time to look whether padding matters")
    # A loss with a wrong denominator counts padded places, too.
    is_known = "denominator" in kinds
    return findings + [one for one in padding or () if not is_known or one.culprit != compared.name]


def _causes(compared: Comparison) -> list[Finding]:
    for error in [one.failure for one in compared.passes]:
        if isinstance(error, LossError):
            return [finding("refused", compared.name, str(error))]
    terms = compared.bench.in_time(partial(find_terms, compared))
    if terms and not compared.rows_differ:
        return terms
    tested = compared.pieces.first(compared.calls)
    if tested is not None and not (terms and tested[1] == "pooled"):
        return [explain_module(compared.bench, compared.pieces, *tested), *(terms or ())]
    if terms:
        return terms
    error = compared.worst.failure
    reason = "" if error is None else f" It fails with {type(error).__name__}: {str(error).splitlines()[0]}"
    where = "there was no time to look for the cause" if terms is None else "no cause was found"
    what = f"Cut as {compared.worst.words}, it differs from the whole batch, and {where}.{reason}"
    return [finding("unexplained", compared.name, what)]


def _of_padding(compared: Comparison) -> list[Finding]:
    """Compare a split with the same one with less padding: as `collate` makes it, or trimmed."""
    sound = [one for one in compared.passes if one.failure is None and one.cut.part.is_whole]
    batch, samples, model = compared.whole.batch, compared.samples, compared.bench.model
    padding = find_padding(batch.whole, model) if samples is None and batch.whole is not None else None
    if not sound or compared.doubt or samples is padding is None:
        return []
    if padding is None:
        source, words = "`collate` pads each micro-batch by itself", "as `collate` makes it"
    else:
        source = f"{padding.source} says that rows are filled up to {padding.length} places"
        samples, words = trimmed(batch, padding), "without padding"
    padded = sound[0 if padding is None else -1]
    short = compared.compare(replace(padded.cut, batch=samples), padded)
    short.words, error = f"{padded.words} {words}", short.failure
    if error is not None and padding is not None:
        return []  # a model of fixed length
    compared.passes.append(short)
    if short.is_same:
        return []
    apart = f"the gradient changes by {short.error:.2g}, the loss by {short.loss_error:.2g}"
    apart = apart if error is None else f"it fails with {type(error).__name__}: {error}"
    source = f"{source}; with less padding {apart}"
    for part, calls in Pass(compared.bench, padded.cut).tables.items():
        rows, is_left = RowPart.whole(len(part.rows)), padding is not None and padding.is_left
        pieces = Pieces([short.tables.get(part, {})], [rows], 10 * compared.limit, is_left)
        if tested := pieces.first(calls):
            name = tested[0].key[0]
            what = f"lets padding change the results at valid places: {source}."
            return [module_finding("padding", name, model.get_submodule(name), what)]
    ways_out = "Ignore padded places: ignore_index, or a weight of 0.", *WAYS_OUT["padding"][1:]
    return [finding("padding", compared.name, f"It counts padded places ({source}).", *ways_out)]
