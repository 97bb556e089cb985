"""Findings: why a split differs from the whole batch, and whether padding matters"""

from dataclasses import replace
from functools import partial

from anybatch.check.finding import WAYS_OUT, Finding, finding, module_finding
from anybatch.check.modules import explain_module
from anybatch.check.passes import Pass
from anybatch.check.rows import find_padding, trimmed
from anybatch.check.splits import Comparison, Pieces, find_state
from anybatch.check.terms import find_terms
from anybatch.core import LossError
from anybatch.state import RowPart


def explain(compared: Comparison) -> list[Finding]:
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
    if short.holds(compared.limit):
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
