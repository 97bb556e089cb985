"""From cuts that differ to findings: modules, terms of the loss, padding, and what goes into the model."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from anybatch.losses.terms import Terms
from anybatch.probe.calls import Call, Calls
from anybatch.probe.finding import WAYS_OUT, Finding, module_finding
from anybatch.probe.modules import Search
from anybatch.probe.padding import Padding, first_difference
from anybatch.probe.rows import Part, agree
from anybatch.probe.terms import Audit
from anybatch.probe.trial import Court, Trial

SEARCH_S = 8.0  # how long modules are looked at


def explain(court: Court, trials: Sequence[Trial], loss_name: str, *, bare: bool) -> list[Finding]:
    """Where split and whole part.

    Args:
        court: what the cuts were held against.
        trials: cuts of the same tensors, those that differ and those that do not.
        loss_name: what the caller's loss is called.
        bare: whether the loss returns means that have lost their denominators.
    """
    whole_calls, cut_calls = Calls(), Calls()
    court.bench.run(court.whole, whole_calls)
    outermost = whole_calls.parts.get(court.whole.part, [])
    differing = [trial for trial in trials if not trial.holds(court.limit)] or list(trials)
    worst = next((trial for trial in differing if trial.passed.error is None), differing[0])
    court.bench.run(worst.cut, cut_calls)
    parts = worst.cut.parts
    is_sound = _same_rows(outermost, cut_calls, parts, court)
    audit = Audit(
        bench=court.bench,
        whole=court.whole,
        outermost=outermost,
        tolerance=court.limit,
        name=loss_name,
        bare=bare,
        pooled=not is_sound,
    )
    terms = audit.find([trial.cut for trial in trials])
    if terms and is_sound:
        return terms  # to take a sound model apart costs the most
    search = Search(
        bench=court.bench,
        parts=parts,
        table=cut_calls.table(parts[0]),
        tolerance=10 * court.limit,  # of single outputs, with less to average over
        deadline=time.perf_counter() + SEARCH_S,
    )
    modules, pooled = search.find(outermost)
    found = [*modules, *terms] or _before_the_model(outermost, cut_calls, parts, court, loss_name) or pooled
    return found or [_unexplained(worst, loss_name)]


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


def name_of(loss: object) -> str:
    """What a loss is called.

    Example:
        >>> from torch import nn
        >>> name_of(nn.MSELoss()), name_of(Terms(name_of))
        ('MSELoss', 'name_of')
    """
    held: Any = loss.function if isinstance(loss, Terms) else loss
    held = cast("partial[Any]", held).func if isinstance(held, partial) else held
    name = getattr(held, "__qualname__", type(held).__qualname__)
    return name.rpartition("<locals>.")[2]


def _same_rows(outermost: Sequence[Call], calls: Calls, parts: Sequence[Part], court: Court) -> bool:
    """Whether the model gives each row the same, cut or not."""
    for call in outermost:
        peers = [calls.table(part).get(call.key) for part in parts]
        for index, value in enumerate(call.outputs):
            pieces = [
                (peer.outputs[index], part)
                for peer, part in zip(peers, parts, strict=True)
                if peer is not None and index < len(peer.outputs)
            ]
            if len(pieces) < len(parts):
                return False
            if all(piece.shape == value.shape for piece, _ in pieces):
                continue  # one value for all rows
            if agree(value, pieces, 10 * court.limit) is not True:
                return False
    return True


def _before_the_model(
    outermost: Sequence[Call], calls: Calls, parts: Sequence[Part], court: Court, loss_name: str
) -> list[Finding]:
    """Whether the loss hands the model other rows when it is cut."""
    for call in outermost:
        name = call.key[0] or "the model"
        peers = [calls.table(part).get(call.key) for part in parts]
        there = [peer for peer in peers if peer is not None]
        if len(there) < len(parts) or any(len(peer.inputs) != len(call.inputs) for peer in there):
            continue
        for index, value in enumerate(call.inputs):
            pieces = [(peer.inputs[index], part) for peer, part in zip(there, parts, strict=True)]
            if agree(value, pieces, 10 * court.limit) is False:
                what = f"What goes into `{name}` differs already, before it has run."
                return [Finding(kind="meeting", culprit=loss_name, what=what, ways_out=WAYS_OUT["meeting"])]
            if sum(len(piece) for piece, _ in pieces if piece.dim()) < (len(value) if value.dim() else 0):
                what = f"Fewer rows go into `{name}` in micro-batches than in the whole."
                ways_out = WAYS_OUT["dropped rows"]
                return [Finding(kind="dropped rows", culprit=loss_name, what=what, ways_out=ways_out)]
    return []


def _unexplained(trial: Trial, loss_name: str) -> Finding:
    error = trial.passed.error
    reason = "" if error is None else f" It fails with {type(error).__name__}: {str(error).splitlines()[0]}"
    what = f"Cut as {trial.words}, it differs from the whole batch, and nobody can tell where.{reason}"
    return Finding(kind="unexplained", culprit=loss_name, what=what, ways_out=WAYS_OUT["unexplained"])
