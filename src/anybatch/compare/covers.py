"""Covers: the rows, attributes and modes that a comparison was made with, to tell when others come"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from operator import is_
from types import CellType
from typing import Any, NamedTuple, cast

from torch import Tensor

from anybatch.core import Batch, SampleBatch
from anybatch.state import Reachable

_PLAIN = {int, float, bool, str}
_MOST = 256  # items of a container whose numbers, strings and flags are read; a longer one is data
_SMALLEST = 4  # rows of a part; smaller ones are compared only if a plan has them
_TRIES = 3  # batches that are tried if some tell nothing
_CHANGES = 3  # values of an attribute that are compared; one with more of them may be a counter


class Doubt(NamedTuple):
    """The reason why a look could not judge; `lasts` if other rows do not help."""

    reason: str
    lasts: bool = False
    is_quiet: bool = False  # True for no warning


class _Kept(NamedTuple):
    read: Callable[[Any], Any]
    key: Any
    name: tuple[int, Any]  # the container and the key


class Covers:
    """The rows of one kind that were compared, and the numbers, strings and flags of model and loss then.

    Values of tensors are read on the host only: a device would have to be waited for.

    Attributes:
        doubt: the reason why the last comparison could not judge; None if it has held.
        has_held: True once a comparison has held.
        bytes_of: the bytes that a micro-batch of so many rows took, without and with its graph.
        is_quiet: False if the loss of a forward depends on random numbers or moves what it computes with:
            then a later forward gives another loss.
    """

    def __init__(self) -> None:
        self.doubt: Doubt | None = None
        self.is_quiet = True
        self.bytes_of: dict[tuple[int, bool], int] = {}
        self._left = 0  # comparisons still to be tried
        self._rows, self._smallest = 0, _SMALLEST + 1
        self._form = cast("Hashable", None)
        self._is_ragged = self.has_held = False
        self._lowest: dict[int, int] = {}  # by tensor, the lowest sign of its numbers
        self._places: list[_Kept] = []
        self._values: list[Any] = []  # at these places; None for what is no number, string or flag
        self._raw: list[Any] = []  # what was found there: the same objects are the same values
        self._known: dict[tuple[int, Any], set[Any]] = {}  # by place, the values that were compared

    def renew(self) -> None:
        """Compare once more."""
        self._left = max(self._left, 1)

    def wants(self, batch: Batch, smallest: int) -> bool:
        """Return True if these rows, in parts as small as `smallest`, are to be compared.

        That is if they are not covered: more rows, smaller parts, another length, a first number of 0 or
        less, other attributes.
        """
        smallest = min(smallest, _SMALLEST)
        found = batch.rows > self._rows or smallest < self._smallest
        self._rows, self._smallest = max(batch.rows, self._rows), min(smallest, self._smallest)
        if not self._is_ragged and (batch.draws or batch.like != self._form):
            found |= self._is_longer(batch)
        found |= self._is_lower(batch)
        raw = [place.read(place.key) for place in self._places]
        if not all(map(is_, raw, self._raw)):
            found |= self._has_changed(raw)
        if found:
            self._left = _TRIES
        return self._left > 0

    def judged(self, doubt: Doubt | None) -> bool:
        """Note the outcome of a comparison; return True if it is the last one that is tried."""
        self._left = 0 if doubt is None or doubt.lasts else self._left - 1
        if self.has_held and doubt is not None and not doubt.lasts:
            return False  # earlier rows could tell
        self.doubt, self.has_held = doubt, doubt is None
        return not self._left

    def add(self, found: Reachable) -> None:
        """Add the attributes that are reached from model and loss, which are now compared."""
        self._places = [*_places_of(found)]
        self._raw = [place.read(place.key) for place in self._places]
        self._values = [*map(_plain, self._raw)]
        for place, value in zip(self._places, self._values, strict=True):
            self._known.setdefault(place.name, set()).add(value)

    def _is_longer(self, batch: Batch) -> bool:
        """Return True the first time that lengths differ, among samples or from the last batch."""
        forms = {*map(_form_of, batch.given)} if isinstance(batch, SampleBatch) else {batch.like}
        forms |= set() if self._form is None else {self._form}
        self._form, self._is_ragged = next(iter(forms)), len(forms) > 1
        return self._is_ragged

    def _is_lower(self, batch: Batch) -> bool:
        """Return True the first time that a tensor holds a zero or a negative number (an ignored label)."""
        leaves: tuple[Tensor, ...] = getattr(batch, "leaves", ())
        found = False
        for at, leaf in enumerate(leaves):
            lowest, is_real = self._lowest.get(at, 2), leaf.is_floating_point()
            # Real numbers may be a mask or weights as long as none is negative.
            if lowest > (0 if is_real else -1) and leaf.device.type == "cpu" and not leaf.is_complex():
                low = leaf.detach().min().item() if leaf.numel() else 1
                self._lowest[at] = min(lowest, (low > 0) - (low < 0))
                found = found or self._lowest[at] < lowest
        return found

    def _has_changed(self, raw: list[Any]) -> bool:
        now = [*map(_plain, raw)]
        counters: set[int] = set()
        found = False
        for at, (place, value) in enumerate(zip(self._places, now, strict=True)):
            known = self._known[place.name]
            if value not in known:
                is_counter = len(known) >= _CHANGES
                counters |= {at} if is_counter else set()
                found = found or not is_counter
        self._places = [place for at, place in enumerate(self._places) if at not in counters]
        self._values = [value for at, value in enumerate(now) if at not in counters]
        self._raw = [value for at, value in enumerate(raw) if at not in counters]
        return found


def _plain(value: Any) -> Any:
    return value if type(value) in _PLAIN else None


def _places_of(found: Reachable) -> Iterator[_Kept]:
    """Yield the places of numbers, strings and flags; modules of torch have none that meet rows."""
    own = {id(vars(one)) for one in found.modules if type(one).__module__.startswith("torch.nn.")}
    for container in [one for one in found.containers if id(one) not in own and len(one) <= _MOST]:
        if isinstance(container, dict):
            table = cast("dict[Any, Any]", container)
            yield from [_of(table.get, key, table) for key, one in table.items() if type(one) in _PLAIN]
        elif isinstance(container, list):
            items = enumerate(cast("list[Any]", container))
            yield from [_of(_item_of(container), at, container) for at, one in items if type(one) in _PLAIN]
    for cell in found.cells:
        yield _of(_content_of(cell), None, cell)
    for scope, names in found.scopes:
        yield from [_of(scope.get, name, scope) for name in names if type(scope.get(name)) in _PLAIN]


def _of(read: Callable[[Any], Any], key: Any, holder: object) -> _Kept:
    return _Kept(read, key, (id(holder), key))


def _item_of(items: Any) -> Callable[[int], Any]:
    return lambda at: items[at] if at < len(items) else None


def _content_of(cell: CellType) -> Callable[[Any], Any]:
    def read(_: Any) -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # an empty one
            return None

    return read


def _form_of(sample: Any) -> Hashable:
    """Return the shapes of the tensors of a sample, and the lengths of its lists."""
    parts = [*sample.values()] if isinstance(sample, Mapping) else sample
    parts = cast("Any", parts) if isinstance(parts, tuple | list) else [parts]
    return tuple([getattr(one, "shape", len(one) if isinstance(one, list) else None) for one in parts])
