"""Findings: why a split differs from the whole batch, and whether padding matters"""

from dataclasses import replace

from anybatch.check.finding import WAYS_OUT, Finding, module_finding
from anybatch.check.modules import explain_module
from anybatch.check.passes import Pass
from anybatch.check.rows import find_padding, trimmed
from anybatch.check.splits import Comparison, Pieces, find_state
from anybatch.check.terms import find_terms
from anybatch.core import LossError
from anybatch.state import RowPart


def explain(compared: Comparison) -> list[Finding]:
    """Return all findings; add to the passes and the notes of the comparison."""
    findings: list[Finding] = []
    if compared.doubt:
        compared.notes.append(compared.doubt)
    if compared.doubt and compared.differs and not compared.reference.bare:
        what = f"Split and whole differ, perhaps by rounding: {compared.doubt}."
        ways_out = ("Hand over rows that the model does not fit perfectly.",)
        findings += [Finding(kind="unexplained", culprit=compared.name, what=what, ways_out=ways_out)]
    elif compared.differs or compared.reference.bare:
        findings += _causes(compared)
    if all(finding.kind == "denominator" for finding in findings):  # the model itself splits exactly
        findings += find_state(compared)
    padding = compared.bench.in_time(lambda: _of_padding(compared))
    if padding is None:
        compared.notes.append("there was no time to look whether padding matters")
    counts_padding = any(finding.kind == "denominator" for finding in findings)  # the loss does, too
    return findings + [one for one in padding or () if not counts_padding or one.culprit != compared.name]


def _causes(compared: Comparison) -> list[Finding]:
    failures = [one.failure for one in compared.passes]
    if refused := [str(error) for error in failures if isinstance(error, LossError)]:
        return [Finding(kind="refused", culprit=compared.name, what=refused[0], ways_out=())]
    terms = compared.bench.in_time(lambda: find_terms(compared))
    if terms and not compared.rows_differ:
        return terms
    found, tested = [*(terms or ())], compared.pieces.first(compared.calls)
    if tested is not None and not (terms and tested[1] == "pooled"):
        found.insert(0, explain_module(compared.bench, compared.pieces, *tested))
    return found or [_unexplained(compared, is_late=terms is None)]


def _unexplained(compared: Comparison, *, is_late: bool) -> Finding:
    error = compared.worst.failure
    reason = "" if error is None else f" It fails with {type(error).__name__}: {str(error).splitlines()[0]}"
    where = "there was no time to look for the cause" if is_late else "no cause was found"
    what = f"Cut as {compared.worst.words}, it differs from the whole batch, and {where}.{reason}"
    return Finding(kind="unexplained", culprit=compared.name, what=what, ways_out=WAYS_OUT["unexplained"])


def _of_padding(compared: Comparison) -> list[Finding]:
    """Compare a split with the same one with less padding: as `collate` makes it, or trimmed."""
    sound = [one for one in compared.passes if one.failure is None and one.cut.part.is_whole]
    whole = compared.whole.batch
    if not sound or compared.doubt or whole.whole is None:
        return []
    if compared.samples is not None:
        padded, less, words, is_left = sound[0], compared.samples, "as `collate` makes it", False
        source = "`collate` pads each micro-batch by itself"
    elif padding := find_padding(whole.whole, compared.bench.model):
        padded, less, words, is_left = sound[-1], trimmed(whole, padding), "without padding", padding.is_left
        source = f"{padding.source} says that rows are filled up to {padding.length} places"
    else:
        return []
    short = compared.compare(replace(padded.cut, batch=less), padded)
    short.words = f"{padded.words} {words}"
    error = short.failure
    if error is not None and compared.samples is None:
        return []  # a model of fixed length
    compared.passes.append(short)
    if short.holds(compared.limit):
        return []
    apart = (
        f"it fails with {type(error).__name__}: {error}"
        if error is not None
        else f"the gradient changes by {short.error:.2g}, the loss by {short.loss_error:.2g}"
    )
    return [
        _padding_finding(compared, padded, short, f"{source}; with less padding {apart}", is_left=is_left)
    ]


def _padding_finding(
    compared: Comparison, padded: Pass, short: Pass, source: str, *, is_left: bool
) -> Finding:
    """Return a finding on the module, or the loss, that depends on padded places."""
    bench, tolerance = compared.bench, 10 * compared.limit
    for part, calls in Pass(bench, padded.cut).tables.items():
        pieces = Pieces([short.tables.get(part, {})], [RowPart.whole(len(part.rows))], tolerance, is_left)
        if found := pieces.first(calls):
            name = found[0].key[0]
            what = f"lets padding change the results at valid places: {source}."
            return module_finding("padding", name, bench.model.get_submodule(name), what)
    what = f"It counts padded places ({source})."
    ways_out = ("Ignore padded places: ignore_index, or a weight of 0.", *WAYS_OUT["padding"][1:])
    return Finding(kind="padding", culprit=compared.name, what=what, ways_out=ways_out)
