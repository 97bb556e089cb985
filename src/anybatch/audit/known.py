"""Known: what was compared, of rows of which kind, at which update, and what nobody could say"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from anybatch.core import Batch, SampleBatch
from anybatch.state import Reachable
from anybatch.trial import Place, places_of, plain

TRIES = 3  # batches that are tried if some tell nothing
_CHANGES = 3  # values of an attribute that are compared; one with more of them may be a counter
RAGGED = "several"
SMALLEST = 4  # rows of a part; smaller ones are compared only if a plan has them


class Doubt(NamedTuple):
    """The reason why a comparison could not judge; `lasts` if other rows do not help."""

    reason: str
    lasts: bool = False
    is_quiet: bool = False  # True for no warning


class Forward:
    """The forwards of a model, as a few rows have shown them.

    Attributes:
        is_quiet: False if one draws random numbers or moves what it computes with.
        draws: True if one draws random numbers.
        draws_process: True if one draws numbers of Python or NumPy.
        dtypes: in which they compute.
        nbytes: bytes of all results of a row; 0 if unknown, like the next two.
        kept: bytes of those that backward may need.
        largest: bytes of the largest.
        axes: the axis of rows in each output of each call of the model; None if unknown.
        count: comparisons of all rows.
    """

    def __init__(self) -> None:
        self.is_quiet, self.draws, self.draws_process = True, False, False
        self.dtypes = set[torch.dtype]()
        self.nbytes = self.kept = self.largest = 0.0
        self.axes: Sequence[Sequence[int]] | None = None
        self.count = 0


class KnownKind:
    """Rows of one kind: which of them were compared, and the numbers, strings and flags held then.

    Values of tensors are read on the host only: a device would have to be waited for.

    Attributes:
        rows, smallest: the most rows of a batch, the fewest of a part, that were compared.
        at: the update at which a few of them were compared last, 0 for none.
        at_all: that at which the loss of all of them was.
        error: the largest difference of those comparisons, relative to the gradient.
        doubt: the reason why the last comparison of a few could not judge; None if it has held.
        doubt_of_all: that of the last comparison of all.
        left: comparisons still to be tried.
        asked: the last update in which one was due.
        forward: what they have shown of the model's forwards.
        form: the shape of one row; `RAGGED` if there are several.
        lowest: by tensor, the lowest sign of its numbers.
        places, raw: where numbers, strings and flags are, and the objects that were there.
    """

    def __init__(self) -> None:
        self.rows, self.smallest, self.left, self.asked = 0, SMALLEST + 1, TRIES, 0
        self.at, self.at_all, self.error = 0, 0, 0.0
        self.doubt: Doubt | None = None
        self.doubt_of_all: Doubt | None = None
        self.forward = Forward()
        self.form: Hashable = None
        self.lowest: dict[int, int] = {}
        self.places: list[Place] = []
        self.raw: list[Any] = []
        self._values: dict[tuple[int, Any], set[Any]] = {}  # by place, those that were compared

    def notes(self, found: Reachable) -> None:
        """Note the attributes that are reached from model and loss, which are now compared."""
        self.places = [*places_of(found)]
        self.raw = [place.read(place.key) for place in self.places]
        for place, value in zip(self.places, self.raw, strict=True):
            self._values.setdefault(place.name, set()).add(plain(value))

    def has_other_values(self, raw: Sequence[Any]) -> bool:
        """Return True if a place has a value that was not compared; forget counters."""
        found, kept = False, list[int]()
        for at, (place, value) in enumerate(zip(self.places, raw, strict=True)):
            known = self._values[place.name]
            is_new = plain(value) not in known
            found |= is_new and len(known) < _CHANGES
            if not (is_new and len(known) >= _CHANGES):
                kept.append(at)
        self.places, self.raw = [self.places[at] for at in kept], [raw[at] for at in kept]
        return found

    def is_longer(self, batch: Batch) -> bool:
        """Return True the first time that lengths differ, among samples or from the last batch."""
        forms = {*map(_form_of, batch.given)} if isinstance(batch, SampleBatch) else {batch.like}
        forms |= set() if self.form is None else {self.form}
        self.form = RAGGED if len(forms) > 1 else next(iter(forms))
        return self.form is RAGGED

    def judged(self, doubt: Doubt | None, update: int) -> bool:
        """Note the outcome of a comparison of a few rows; return True if it is the last one that is tried."""
        self.left = 0 if doubt is None or doubt.lasts else self.left - 1
        if self.at and doubt is not None and not doubt.lasts:
            return False  # earlier rows could tell
        self.doubt, self.at = doubt, update if doubt is None else 0
        return not self.left

    def state(self) -> dict[str, Any]:
        """Return what a later process may know, for a checkpoint."""
        return {name: getattr(self, name) for name in _SAVED}

    @staticmethod
    def of(state: Mapping[str, Any]) -> "KnownKind":
        """Return the kind of this state; its attributes are still to be compared."""
        kind = KnownKind()
        for name in _SAVED & state.keys():
            setattr(kind, name, state[name])
        return kind

    def __str__(self) -> str:
        doubts = [one.reason for one in (self.doubt, self.doubt_of_all) if one is not None]
        few = f"a few compared at update {self.at}" if self.at else "a few not compared"
        every = f", the loss of all at update {self.at_all}" if self.at_all else ""
        told = f"up to {self.rows} rows, parts from {min(self.smallest, SMALLEST)}: {few}{every}"
        names = f", {len(self.places)} attributes" if self.places else ""
        return "; ".join([f"{told}{names}, largest difference {self.error:.1g}", *doubts])


_SAVED = {"rows", "smallest", "at", "at_all", "error", "lowest"}


class Known(dict[Hashable, KnownKind]):
    """The comparisons so far, by kind of rows: dtypes, numbers of dimensions, what is trimmed."""

    limits: Any = None  # sizes of micro-batches that memory has taught; printed, too

    def kind(self, key: Hashable) -> KnownKind:
        """Return what is known of a kind of rows."""
        return self.get(key) or self.setdefault(key, KnownKind())

    def state(self) -> list[tuple[Hashable, dict[str, Any]]]:
        """Return all of it for a checkpoint."""
        return [(key, kind.state()) for key, kind in self.items()]

    def load(self, state: Sequence[tuple[Hashable, Mapping[str, Any]]]) -> None:
        """Load the result of `state`."""
        self.clear()
        self.update({key: KnownKind.of(one) for key, one in state})

    def __str__(self) -> str:
        rows = [f"{_in_words(key)}: {kind}" for key, kind in self.items()]
        limits = {} if self.limits is None else self.limits.known
        met = [f"memory ran out: {one.fits} rows fit" for one in limits.values()]
        return "\n".join([*(rows or ["nothing was compared yet"]), *met])


def _in_words(key: Any) -> str:
    leaves = [one for one in key if not isinstance(one[1], bool)]
    return ", ".join([f"{str(dtype).removeprefix('torch.')} x {axes}" for dtype, axes in leaves]) or "samples"


def _form_of(sample: Any) -> Hashable:
    """Return the shapes of the tensors of a sample, and the lengths of its lists."""
    parts = [*sample.values()] if isinstance(sample, Mapping) else sample
    parts = cast("Any", parts) if isinstance(parts, tuple | list) else [parts]
    return tuple([getattr(one, "shape", len(one) if isinstance(one, list) else None) for one in parts])
