"""Batches as other libraries make them, as rows; and attributes that are replaced during a step."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anybatch.core import BatchError, batch_of, tree

_PLAIN = (bool, int, float, str)
# What kernels for flat sequences get, by its name in transformers.
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_IGNORED = -100  # label of a document's first token, which packing sets: no token before it tells it
_ENTRIES, _ROWS = "entries", "rows"  # of a batch that is a list with one entry for each row
Back = Callable[[Any], Any]


def apart(
    batch: Any, *, has_lists: bool = True, is_paired: bool = False, may_be_one: bool = False
) -> tuple[Any, Back]:
    """Return the rows of a batch, and a function that gives their micro-batches the form of the batch.

    Numbers, strings and tensors of shape () are shared by all rows. A list of numbers or strings, one for
    each row, is cut as the rows are, unless `has_lists` is False. The rows of a flat sequence, with
    `position_ids` that begin anew at 0, are its documents. Anything else stays with the tensors.
    """
    entries = _documents(batch)
    if entries is not None:
        return _column(entries), lambda micro: _flat(micro[_ENTRIES], batch)
    paired, back = _pairs(batch) if is_paired else (batch, _as_it_is)
    rows, fill = without_shared(paired, has_lists=has_lists)
    if may_be_one and not _has_rows(rows):
        return _column([batch]), lambda micro: micro[_ENTRIES][0]
    return rows, lambda micro: back(fill(micro))


def without_shared(batch: Any, *, has_lists: bool = False) -> tuple[Any, Back]:
    """Return a batch without what all rows share, and a function that gives it back; as `apart`."""
    values = batch if tree.is_sequence(batch) else ()
    entries = dict[Any, Any](batch if isinstance(batch, Mapping) else enumerate(values))
    shared = {
        key: one
        for key, one in entries.items()
        if isinstance(one, _PLAIN) or (isinstance(one, Tensor) and not one.dim())
    }
    first = next(filter(Tensor.dim, tree.tensors_in(batch)), None)
    rows = -1 if first is None or not has_lists else len(first)
    lists = {key: one for key, one in entries.items() if _is_list(one, rows)}
    if not (shared or lists):
        return batch, _as_it_is
    tensors = {key: one for key, one in entries.items() if key not in shared and key not in lists}
    build, keys = tree.mould(batch), [*entries]

    def whole(micro: Any) -> Any:
        found, places = micro if lists else (micro, torch.empty(0))
        picked = {key: [one[place] for place in places.tolist()] for key, one in lists.items()}
        return build([{**found, **shared, **picked}[key] for key in keys])

    return (tensors, torch.arange(rows)) if lists else tensors, whole


def _is_list(value: Any, rows: int) -> bool:
    is_long = tree.is_sequence(value) and len(value) == rows
    return is_long and all(isinstance(one, (*_PLAIN, Mapping)) for one in value)  # labels of images, too


def _as_it_is(micro: Any) -> Any:
    return micro


def _has_rows(batch: Any) -> bool:
    """Return False if a batch that is not empty cannot be cut."""
    try:
        batch_of(batch)
    except BatchError:
        sizes = [one.numel() for one in tree.tensors_in(batch)]
        return bool(sizes) and not any(sizes)
    return True


def _column(entries: Sequence[Any]) -> Mapping[str, Any]:
    return {_ENTRIES: entries, _ROWS: torch.arange(len(entries))}


def _documents(batch: Any) -> list[dict[str, Tensor]] | None:
    """Return the documents of a flat sequence, as packing and `padding_free` make it; None for others."""
    places = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(places, Tensor) or places.dim() != 2 or places.shape[0] != 1 or not places.numel():
        return None
    if "attention_mask" in batch or int(places[0, 0]):  # documents may attend to each other
        return None
    flat = {key: one for key, one in batch.items() if isinstance(one, Tensor) and key not in _BOUNDS}
    if any(one.shape[:2] != places.shape for one in flat.values()):
        return None
    starts = [*places[0].eq(0).nonzero().flatten().tolist(), places.shape[1]]
    sizes = [stop - start for start, stop in pairwise(starts)]
    firsts = flat["labels"][0, starts[1:-1]] if "labels" in flat else None
    if 1 in sizes or firsts is None or bool(firsts.ne(_IGNORED).any()):  # other places than those of tokens
        return None
    parts = zip(*[one[0].split(sizes) for one in flat.values()], strict=True)
    return [dict(zip(flat, part, strict=True)) for part in parts]


def _flat(documents: Sequence[Mapping[str, Tensor]], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return some documents as one flat sequence, in the form of this batch."""
    lengths = torch.tensor([len(one["position_ids"]) for one in documents])
    ends, longest = F.pad(lengths.cumsum(0), (1, 0)), int(lengths.max())
    numbers = torch.arange(len(documents)).repeat_interleave(lengths)[None]
    made = dict(zip(_BOUNDS, (ends, ends, longest, longest, numbers), strict=True))
    made |= {key: torch.cat([one[key] for one in documents])[None] for key in documents[0]}
    found = {key: made.get(key, one) for key, one in batch.items()}
    return {key: one.to(batch[key]) if isinstance(one, Tensor) else one for key, one in found.items()}


def _pairs(batch: Mapping[str, Any]) -> tuple[Any, Back]:
    """Return a batch with pairs as rows, and a function that puts the halves one after the other again."""
    sizes = {key: len(one) for key, one in batch.items() if isinstance(one, Tensor) and one.dim()}
    most = max(sizes.values(), default=0)
    if most % 2:
        return batch, _as_it_is
    halves = [key for key, size in sizes.items() if size == most]

    def together(micro: Mapping[str, Any]) -> dict[str, Any]:
        return {**micro, **{key: micro[key].transpose(0, 1).flatten(0, 1) for key in halves}}

    cut = {key: batch[key].unflatten(0, (2, most // 2)).transpose(0, 1) for key in halves}
    return {**batch, **cut}, together


@contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Generator[None]:
    """Return a context in which objects have other attributes: (object, name, value) each."""
    before = [(vars(one), name, vars(one).get(name, vars)) for one, name, _ in places]
    try:
        for one, name, value in places:
            vars(one)[name] = value
        yield
    finally:
        for own, name, value in before:
            own.pop(name, None)
            if value is not vars:  # it had one of its own
                own[name] = value
