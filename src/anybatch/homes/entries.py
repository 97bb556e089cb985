"""Entries of a batch that are no tensors: lists are cut along with the rows, settings are shared."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from anybatch.core import tree

_PLAIN = (bool, int, float, str)


def apart(batch: Any, *, has_lists: bool = True) -> tuple[Any, Callable[[Any], Any]]:
    """Return the tensors of a batch, and a function that gives their micro-batches the other entries back.

    Numbers and strings are shared by all rows. A list of numbers or strings, one for each row, is cut as the
    rows are, unless `has_lists` is False. Anything else stays with the tensors.
    """
    if not isinstance(batch, Mapping | list | tuple):
        return batch, lambda micro: micro
    entries = cast("dict[Any, Any]", dict(batch.items() if isinstance(batch, Mapping) else enumerate(batch)))
    first = next(tree.tensors_in(batch), None)
    rows = len(first) if has_lists and first is not None and first.dim() else -1
    shared = {key: one for key, one in entries.items() if isinstance(one, _PLAIN)}
    lists = {key: one for key, one in entries.items() if _is_list(one, rows)}
    if not (shared or lists):
        return batch, lambda micro: micro
    tensors = {key: one for key, one in entries.items() if key not in shared and key not in lists}
    build, keys = tree.mould(batch), [*entries]

    def whole(micro: Any) -> Any:
        found, places = micro
        picked = {key: [one[place] for place in places.tolist()] for key, one in lists.items()}
        return build([{**found, **shared, **picked}[key] for key in keys])

    return (tensors, torch.arange(rows) if lists else None), whole


def _is_list(value: Any, rows: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == rows
        and all(isinstance(one, _PLAIN) for one in value)
    )
