"""Entries of a batch that are no tensors, and attributes that are replaced during a step."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from anybatch.core import tree

_PLAIN = (bool, int, float, str)


def apart(batch: Any, *, has_lists: bool = True) -> tuple[Any, Callable[[Any], Any]]:
    """Return the tensors of a batch, and a function that gives their micro-batches the other entries back.

    Numbers and strings are shared by all rows. A list of numbers or strings, one for each row, is cut as the
    rows are, unless `has_lists` is False. Anything else stays with the tensors.
    """
    values = batch if isinstance(batch, list | tuple) else ()
    entries = dict[Any, Any](batch if isinstance(batch, Mapping) else enumerate(values))
    first = next(tree.tensors_in(batch), None)
    rows = len(first) if has_lists and first is not None and first.dim() else -1
    shared = {key: one for key, one in entries.items() if isinstance(one, _PLAIN)}
    lists = {key: one for key, one in entries.items() if _is_list(one, rows)}
    if not (shared or lists):
        return batch, lambda micro: micro
    tensors = {key: one for key, one in entries.items() if key not in shared and key not in lists}
    build, keys = tree.mould(batch), [*entries]

    def whole(micro: Any) -> Any:
        found, places = micro if lists else (micro, torch.empty(0))
        picked = {key: [one[place] for place in places.tolist()] for key, one in lists.items()}
        return build([{**found, **shared, **picked}[key] for key in keys])

    return (tensors, torch.arange(rows)) if lists else tensors, whole


def _is_list(value: Any, rows: int) -> bool:
    is_long = isinstance(value, list | tuple) and len(value) == rows
    return is_long and all(isinstance(one, (*_PLAIN, Mapping)) for one in value)  # labels of images, too


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
