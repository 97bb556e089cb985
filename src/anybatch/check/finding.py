"""Findings: a kind, a culprit, a sentence, and the ways out"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from anybatch.batchnorm import BatchNorm, listed

WAYS_OUT = {
    "meeting": (
        "Compute it for each row by itself (LayerNorm, GroupNorm; statistics kept from training).",
        "Leave the batch uncut (micro_batch=None).",
        "If the loss is what needs all rows, hand their outputs to ab.WholeBatch.",
    ),
    "padding": (
        "Hand the mask on to this place: masked attention, a mean over valid places only.",
        "Pad every batch to one fixed length, so that the result at least does not depend on the cut.",
    ),
    "position": (
        "Draw for all rows at once, torch.rand(len(x)), from torch's default stream, and set no seed.",
        "Give what belongs to a row to the batch as a tensor with one entry per row.",
        "If any numbers will do, as in augmentation, this is no fault: check the rest in .eval().",
    ),
    "state": (
        "Update the state after the optimizer's step, not in forward.",
        "Freeze it while training: .eval(), or an argument that switches the update off.",
        "Leave the batch uncut (micro_batch=None).",
    ),
    "buffer": (
        "Update it once per step, outside of forward; or switch it off: track_running_stats=False, .eval().",
        "Register it with persistent=False if nothing but a log reads it.",
        "Leave the batch uncut (micro_batch=None).",
    ),
    "dropped rows": (
        "Let every row count, however few there are in a micro-batch.",
        "Let a row that is to be left out weigh 0 by its own data, not by its place.",
    ),
    "refused": (),
    "unexplained": (
        "Look for .detach(), torch.no_grad(), hooks or a backward of your own that depend on the rows.",
        "Leave the batch uncut (micro_batch=None), or look at the cut that is named above.",
    ),
}

BATCH_NORM_WAYS_OUT = (
    "ab.batch_norm_to_group_norm(model) makes every cut exact.",
    'Options(batch_norm="frozen") or .eval() takes the running statistics.',
    'Options(batch_norm="micro") accepts that each micro-batch has its own statistics, which is inexact.',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause of a difference between split and whole."""

    kind: str  # see the table in docs/check.md
    culprit: str  # a module as `name (Class)`, a term of the loss, or the loss function
    what: str  # a plain sentence
    ways_out: tuple[str, ...]  # ways to fix it, the usual one first

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.culprit}", self.what, *[f"- {way}" for way in self.ways_out]]
        return "\n".join(lines).replace("\n", "\n  ")


def finding(kind: str, culprit: str, what: str, *ways_out: str) -> Finding:
    """Return a finding, with the usual ways out unless others are given."""
    return Finding(kind=kind, culprit=culprit, what=what, ways_out=ways_out or WAYS_OUT[kind])


def module_finding(kind: str, name: str, module: nn.Module, what: str, alike: Sequence[str] = ()) -> Finding:
    """Return a finding about a module, whose name begins the sentence, and about others that are alike."""
    ways_out = BATCH_NORM_WAYS_OUT if alike and isinstance(module, BatchNorm) else ()
    culprit = culprit_of(listed(alike or [name]), module)
    return finding(kind, culprit, f"`{name or type(module).__name__}` {what}", *ways_out)


def culprit_of(name: str, module: nn.Module) -> str:
    """Return a module as `name (Class)`."""
    return f"{name.strip('.') or 'the model'} ({type(module).__name__})"
