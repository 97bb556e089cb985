"""From cuts that differ to findings: modules, terms of the loss, padding, and what goes into the model."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from anybatch.batchnorm import BatchNorm, find_batch_norms
from anybatch.check.agreement import agree_in_forward, before_the_model, rows_agree
from anybatch.check.calls import Calls
from anybatch.check.compare import Court, Trial, cut_sizes_to_try, worst_of
from anybatch.check.draws import OutOfTime
from anybatch.check.finding import WAYS_OUT, Finding, module_finding
from anybatch.check.modules import Search
from anybatch.check.outputs import make_given
from anybatch.check.padding import Padding, first_difference
from anybatch.check.terms import Audit

CLOSER = 1e-6  # how exactly sums of float32 add up, if they do


def explain(
    court: Court,
    trials: Sequence[Trial],
    loss_name: str,
    *,
    bare: frozenset[str],
    deadline: float = math.inf,
) -> list[Finding]:
    """Where split and whole part.

    Args:
        court: what the cuts were held against.
        trials: cuts of the same tensors, those that differ and those that do not.
        loss_name: what the caller's loss is called.
        bare: terms that are means which have lost their denominators.
        deadline: when to look no further, on the clock of `time.perf_counter`.
    """
    worst = worst_of(court, trials)
    parts, outermost = worst.cut.parts, court.reference.calls.parts.get(court.whole.part, [])
    is_sound = rows_agree(court, court.reference.calls, worst.passed.calls, parts)
    make_given(court, worst)
    terms: list[Finding] = []
    found: list[Finding] = []
    pooled: list[Finding] = []
    draws = court.bench.draws
    try:
        with draws.until(deadline):
            terms = _terms(court, trials, loss_name, bare, deadline, is_sound=is_sound)
            if terms and is_sound:
                return terms  # to take a sound model apart costs the most
            found = [] if is_sound else _batch_norms(court, worst, has_terms=bool(terms))
        if not found:
            search = Search(
                bench=court.bench,
                parts=parts,
                table=worst.passed.calls.table(parts[0]),
                tolerance=10 * court.limit,  # of single outputs, with less to average over
                deadline=deadline,
            )
            found, pooled = search.find(outermost)
    except OutOfTime:
        pass
    found = [*found, *terms]
    found = found or before_the_model(outermost, worst.passed.calls, parts, court, loss_name) or pooled
    found = found or _suspects(court)
    return found or [_unexplained(worst, loss_name, is_late=time.perf_counter() > deadline)]


def _terms(
    court: Court,
    trials: Sequence[Trial],
    loss_name: str,
    bare: frozenset[str],
    deadline: float,
    *,
    is_sound: bool,
) -> list[Finding]:
    whole = court.whole
    sizes = cut_sizes_to_try(len(whole.part.rows), None)
    cuts = [trial.cut for trial in trials]
    known = {cut.micro_batch for cut in cuts}
    cuts += [replace(whole, micro_batch=size) for size in sizes if size not in known]
    # In float32, terms of about the same size seem to add up: then they are looked at more closely.
    limits = (court.limit, CLOSER) if is_sound and court.limit > CLOSER else (court.limit,)
    for limit in limits:
        audit = Audit(
            bench=court.bench,
            whole=whole,
            outermost=court.reference.calls.parts.get(whole.part, []),
            tolerance=limit,
            name=loss_name,
            bare=bare,
            pooled=not is_sound,
            deadline=deadline,
        )
        found = audit.find(cuts)
        if found:
            return found
    return []


def _norms(court: Court) -> list[tuple[str, BatchNorm]]:
    """BatchNorms that take their statistics from the rows at hand, by name."""
    with court.bench.fresh() as (model, _):
        return [(name, norm) for name, module in model.named_modules() for norm in find_batch_norms([module])]


def _suspects(court: Court) -> list[Finding]:
    """Where no experiment came to an end in time: what is known to make rows meet."""
    what = "takes mean and variance of all rows of a micro-batch. (No time was left to try if it is all.)"
    norms = [] if court.bench.batch_norm == "frozen" else _norms(court)
    return [module_finding("meeting", name, norm, f"`{name or 'the model'}` {what}") for name, norm in norms]


def _batch_norms(court: Court, worst: Trial, *, has_terms: bool) -> list[Finding]:
    """All BatchNorms in training mode, if nothing else makes rows differ: one experiment for all of them."""
    norms = _norms(court)
    if not norms or any(norm.running_mean is None for _, norm in norms):
        return []
    if court.bench.batch_norm == "frozen" or not agree_in_forward(court, worst.cut, frozen=True):
        return []
    what = (
        "takes mean and variance of all rows of a micro-batch; with running statistics the same cuts agree."
    )
    return [module_finding("meeting", name, norm, f"`{name or 'the model'}` {what}") for name, norm in norms]


def is_sound_when_quiet(court: Court, trials: Sequence[Trial], deadline: float) -> bool:
    """Whether the model gives rows the same in every cut once dropout is off, but not with it.

    Its numbers go to other rows where a model sorts them, or packs them, and puts them back.

    Args:
        court: what the cuts were held against.
        trials: the cuts, of which one differs.
        deadline: when to look no further, on the clock of `time.perf_counter`.
    """
    draws, worst = court.bench.draws, worst_of(court, trials)
    if draws.guessed:
        return True
    if not draws.thrown or rows_agree(court, court.reference.calls, worst.passed.calls, worst.cut.parts):
        return False
    quiet = replace(court, bench=replace(court.bench, draws=draws.anew(is_quiet=True)))
    try:
        with quiet.bench.draws.until(deadline):
            return agree_in_forward(quiet, worst.cut)
    except OutOfTime:
        return False


def explain_padding(
    court: Court,
    padded: Trial,
    short: Trial,
    told: str,
    loss_name: str,
    padding: Padding | None = None,
) -> Finding:
    """Which module, or else the loss, looks at padded places.

    Args:
        court: where passes are made.
        padded: a cut as it came.
        short: the same cut, without padding that its rows do not need, or with another.
        told: what says that there is padding.
        loss_name: what the caller's loss is called.
        padding: where it is, if the other cut is of single rows that are padded too.
    """
    long_calls, short_calls = Calls(), Calls()
    court.bench.run(padded.cut, long_calls)
    court.bench.run(short.cut, short_calls)
    parts = padded.cut.parts
    found = first_difference(
        [(part, long_calls.parts.get(part, [])) for part in parts],
        [(part, short_calls.table(part)) for part in parts],
        10 * court.limit,
        padding,
    )
    error = short.passed.error
    apart = (
        f"it fails with {type(error).__name__}: {error}"
        if error is not None
        else f"the gradient changes by {short.error:.2g}, the loss by {short.loss_error:.2g}"
    )
    told = f"{told}; {'without what rows do not need' if padding is None else 'with other content'} {apart}"
    if found is None:
        what = f"It counts padded places ({told})."
        ways_out = ("Ignore padded places: ignore_index, or a weight of 0.", *WAYS_OUT["padding"][1:])
        return Finding(kind="padding", culprit=loss_name, what=what, ways_out=ways_out)
    with court.bench.fresh() as (model, _):
        name, inside = found
        module = model.get_submodule(name)
    place = f"`{name or type(module).__name__}`" + f" (first at `{inside}` inside it)" * (inside != name)
    what = f"{place} lets padding change what belongs to valid places: {told}."
    return module_finding("padding", name, module, what)


def _unexplained(trial: Trial, loss_name: str, *, is_late: bool) -> Finding:
    error = trial.passed.error
    reason = "" if error is None else f" It fails with {type(error).__name__}: {str(error).splitlines()[0]}"
    where = "there was no time to look where" if is_late else "nobody can tell where"
    what = f"Cut as {trial.words}, it differs from the whole batch, and {where}.{reason}"
    return Finding(kind="unexplained", culprit=loss_name, what=what, ways_out=WAYS_OUT["unexplained"])
