"""Whether a model gives each row the same, cut or not: in passes that were made, or in quick forwards."""

from collections.abc import Sequence

import torch

from anybatch.batchnorm import find_batch_norms, frozen_batch_norms
from anybatch.check.calls import Call, Calls
from anybatch.check.compare import Court
from anybatch.check.cut import Cut
from anybatch.check.finding import WAYS_OUT, Finding
from anybatch.check.passes import Bench
from anybatch.check.rows import Part, agree
from anybatch.losses import resolve


def rows_agree(court: Court, whole: Calls, calls: Calls, parts: Sequence[Part]) -> bool:
    """Whether the model gives each row the same, cut or not.

    Args:
        court: what counts as rounding.
        whole: calls over all rows.
        calls: calls over the parts.
        parts: their rows.
    """
    for call in whole.parts.get(court.whole.part, []):
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


def agree_in_forward(court: Court, cut: Cut, *, frozen: bool = False) -> bool:
    """Whether the model gives each row the same, cut or not, in forwards made for this.

    Args:
        court: where they are made.
        cut: which is held against the whole.
        frozen: whether each BatchNorm takes its running statistics.
    """
    whole_calls, cut_calls = Calls(), Calls()
    try:
        _forward(court.bench, court.whole, whole_calls, frozen=frozen)
        _forward(court.bench, cut, cut_calls, frozen=frozen)
    except Exception:  # the user's code may raise anything
        return False
    return rows_agree(court, whole_calls, cut_calls, cut.parts)


def _forward(bench: Bench, cut: Cut, watch: Calls, *, frozen: bool) -> None:
    """Run model and loss over each part, without gradients."""
    batch = cut.batch(bench.subject.dtype)
    with bench.fresh() as (model, loss), torch.no_grad():
        norms = find_batch_norms(model.modules()) if frozen else []
        told = watch(model)
        with frozen_batch_norms(norms):
            for part, micro in zip(cut.parts, batch.cut(cut.micro_batch), strict=True):
                bench.draws.begin(part)
                told(part)
                resolve(loss).evaluate(model, micro)


def before_the_model(
    outermost: Sequence[Call], calls: Calls, parts: Sequence[Part], court: Court, loss_name: str
) -> list[Finding]:
    """Whether the loss hands the model other rows when it is cut.

    Args:
        outermost: calls over all rows.
        calls: calls over the parts.
        parts: their rows.
        court: what counts as rounding.
        loss_name: what the caller's loss is called.
    """
    if court.whole.collate is not None:
        return []  # each micro-batch is collated by itself: numbers of nodes and the like differ rightly
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
