"""What a window noted before its first micro-batch, as plain values and read again."""

# Who writes down what was noted, and puts it together again, has to know its inside.
# pyright: reportPrivateUsage=false

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch.engine import Before, Task
from anybatch.state import Stream, held, of_process, rng

_Table = dict[str, Tensor | None]
_CODED = {"dtype", "shape", "of"}  # says what is no plain value by itself
_NAMES = "python", "numpy"  # of the streams of the process, in the order of `of_process`


def write(before: Before, task: Task) -> dict[str, Any]:
    """Random streams, gradients, buffers and what else forwards have changed since, as plain values.

    Args:
        before: as it was noted.
        task: whose surroundings they are.
    """
    position: dict[Tensor, int] = {parameter: index for index, parameter in enumerate(_everyone(task))}
    process = of_process()
    names = dict(zip(_NAMES, process, strict=False))
    states = [(stream, plain_state(state)) for stream, state in before._streams]
    random = before._random
    return {
        "random": {"cpu": random.cpu.clone(), "cuda": tuple(one.clone() for one in random.cuda)},
        "held": [state for stream, state in states if stream not in process],
        "process": {name: state for name, own in names.items() for one, state in states if one == own},
        "tables": _changed_tables(before),
        "written": {
            position[p]: copied(value)
            for p, (value, _) in before._copies.items()
            if p in position and not torch.equal(p, value)
        },
        "gradients": {position[p]: plain(value) for p, value in before._gradients if value is not None},
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Noted:
    """What `write` wrote, read for another process.

    Attributes:
        gradients: the `.grad` that stood there, by parameter.
        tables: the buffers of modules, by the number of the module, where they have changed since.
        written: the values of parameters that forwards have written to.
        random: torch's streams.
        streams: other ones.
    """

    gradients: Mapping[nn.Parameter, Tensor]
    tables: Mapping[int, _Table]
    written: Mapping[nn.Parameter, Tensor]
    random: rng.RandomState
    streams: Sequence[tuple[Stream, Any]]

    def into(self, before: Before) -> None:
        """Let it be what was noted."""
        before._gradients = [(one, self.gradients.get(one)) for one, _ in before._gradients]
        before._random, before._streams = self.random, list(self.streams)
        for number, values in self.tables.items():
            _note(before, before._tables[number], values)
        before._copies.update({parameter: (value, math.nan) for parameter, value in self.written.items()})


def read(values: Mapping[str, Any], task: Task) -> Noted:
    """Read what `write` gave; nothing is touched, and the values stay as they are.

    Raises:
        KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError: it is something else.
    """
    everyone = _everyone(task)
    gradients, written = (
        [(everyone[int(position)], value) for position, value in values[name].items()]
        for name in ("gradients", "written")
    )
    cuda: tuple[Tensor, ...] = tuple(values["random"]["cuda"])
    return Noted(
        gradients={p: tensor(value, p, p.dtype) for p, value in gradients},
        tables=_read_tables(values["tables"], task),
        written={p: tensor(value, p, p.dtype) for p, value in written},
        random=rng.RandomState(
            cpu=values["random"]["cpu"].clone(), cuda=cuda if len(cuda) == torch.cuda.device_count() else ()
        ),
        streams=_read_streams(values, task),
    )


def _everyone(task: Task) -> list[nn.Parameter]:
    """All parameters in an order that is the same in another process."""
    tables = [module._parameters for module in task.modules]
    inside = [one for table in tables for one in table.values() if one is not None]
    groups = [group for optimizer in task.optimizers for group in optimizer.param_groups]
    return list(dict.fromkeys([*task.parameters, *inside, *(p for group in groups for p in group["params"])]))


# ---- buffers


def _changed_tables(before: Before) -> dict[int, _Table]:
    slots = {id(table): found for table, found in before._slots}
    changed: dict[int, _Table] = {}
    for number, table in enumerate(before._tables):
        was = {name: _value(before, buffer) for name, buffer in slots.get(id(table), {}).items()}
        if was.keys() != table.keys() or not all(_is_same(was[name], table[name]) for name in was):
            changed[number] = {name: None if value is None else copied(value) for name, value in was.items()}
    return changed


def _value(before: Before, buffer: Tensor | None) -> Tensor | None:
    """What a buffer held; what nobody could note is as it is."""
    return buffer if buffer is None or buffer not in before._copies else before._copies[buffer][0]


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or is_lazy(one) or is_lazy(other):
        return one is other
    return _is_alike(one, other) and torch.equal(one, other)


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)


def _read_tables(values: Mapping[int, Any], task: Task) -> dict[int, _Table]:
    """Each buffer where the one of its name lies now."""
    elsewhere = torch.empty(0, device=next(iter(task.devices), "cpu"))
    found: dict[int, _Table] = {}
    for number, table in values.items():
        now = task.modules[int(number)]._buffers
        places = {name: elsewhere if now.get(name) is None else now[name] for name in table}
        found[int(number)] = {
            name: None if value is None else value.to(cast("Tensor", places[name]).device, copy=True)
            for name, value in table.items()
        }
    return found


def _note(before: Before, table: _Table, values: _Table) -> None:
    """Let these be what a table of buffers held."""
    found: _Table = {}
    for name, value in values.items():
        buffer = table.get(name)
        is_there = buffer is not None and value is not None and _is_alike(buffer, value)
        own = found[name] = buffer if is_there else value
        if own is not None and value is not None:
            before._copies[own] = (
                value.clone() if own is value else value,
                math.nan,
            )  # of no version: always compared
    before._slots = [*(one for one in before._slots if one[0] is not table), (table, found)]


# ---- random streams


def _read_streams(values: Mapping[str, Any], task: Task) -> list[tuple[Stream, Any]]:
    own, process = held(task.modules), dict(zip(_NAMES, of_process(), strict=False))
    if values["held"] and len(values["held"]) != len(own):
        raise ValueError(f"{len(values['held'])} random generators in modules, not {len(own)}")
    found = [*zip(own, values["held"], strict=False)]
    found += [(process[name], state) for name, state in values["process"].items() if name in process]
    return [(stream, state_of(plain)) for stream, plain in found]


def plain_state(state: Any) -> Any:
    """Where a stream stands, without bytes and NumPy's arrays, which no checkpoint holds.

    Example:
        >>> state_of(plain_state(("MT", b"key", {"position": 3})))
        ('MT', b'key', {'position': 3})
    """
    if isinstance(state, bytes):
        return {"dtype": "bytes", "shape": [], "of": torch.frombuffer(bytearray(state), dtype=torch.uint8)}
    if hasattr(state, "tobytes"):  # an array
        return plain_state(state.tobytes()) | {"dtype": str(state.dtype), "shape": list(state.shape)}
    return _mapped(state, plain_state)


def state_of(value: Any) -> Any:
    """What `plain_state` was given."""
    if not (isinstance(value, Mapping) and set(cast("Mapping[str, Any]", value)) == _CODED):
        return _mapped(value, state_of)
    coded = cast("Mapping[str, Any]", value)
    content = bytes(coded["of"].tolist())
    if coded["dtype"] == "bytes":
        return content
    return sys.modules["numpy"].frombuffer(bytearray(content), coded["dtype"]).reshape(coded["shape"])


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: change(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        parts = [change(one) for one in cast("Sequence[Any]", value)]
        return parts if isinstance(value, list) else tuple(parts)
    return value.clone() if isinstance(value, Tensor) else value


# ---- tensors


def copied(value: Tensor) -> Tensor:
    """A copy on the host."""
    return value.detach().to("cpu", copy=True)


def plain(value: Tensor) -> Any:
    """A copy on the host; of a sparse tensor its parts, because a checkpoint holds dense ones."""
    if not value.is_sparse:
        return copied(value)
    return [copied(value._indices()), copied(value._values()), value.is_coalesced()]


def tensor(value: Any, like: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """What `plain` was given, in memory of its own that is laid out as a parameter is.

    Args:
        value: what `plain` gave.
        like: the parameter whose gradient it is.
        dtype: that it must have.

    Raises:
        ValueError: it has another shape or dtype.

    Example:
        >>> parameter = nn.Parameter(torch.zeros(2))
        >>> tensor(plain(torch.ones(2)), parameter, torch.float32)
        tensor([1., 1.])
    """
    if isinstance(value, list):
        indices, values, is_coalesced = cast("list[Any]", value)
        size, device = like.shape, like.device
        found = torch.sparse_coo_tensor(
            indices, values, size, is_coalesced=is_coalesced, check_invariants=True
        )
        return found.to(device, copy=True)
    if (value.dtype, value.shape) != (dtype, like.shape):
        raise ValueError(f"{value.dtype} {tuple(value.shape)} for {dtype} {tuple(like.shape)}")
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(value)
