"""A shard of the parameters on a server: merges pushes in the order of the units and makes the update."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core import OptimizerError, PlanError

Array = np.ndarray[Any, np.dtype[Any]]
State = list[dict[str, Any]]  # optimizer state of each piece

# Optimizers that update an element from its own gradient and state only.
_ELEMENTWISE = (
    "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD".split()  # noqa: SIM905 - one line
)
_SCALARS = ("step", "eta", "mu", "mu_product")  # optimizer state with one number per parameter
NOT_FINITE = "NaN or infinity in it"
COUNTED = "it was counted before"


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a parameter in a shard."""

    parameter: int  # its position among the trained ones
    start: int  # its first element
    stop: int
    at: int  # its first element in the shard
    optimizer: int
    group: int

    @property
    def there(self) -> slice:
        """Its elements in the shard."""
        return slice(self.at, self.at + self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Layout:
    """The position of each trained element: one flat vector, cut into shards of equal size."""

    bounds: tuple[int, ...]  # the first element of each shard, and the end
    pieces: tuple[tuple[Piece, ...], ...]  # pieces of each shard
    dtype: str  # dtype of the parameters; a name of NumPy
    sum_dtype: str  # dtype of the gradient sums
    optimizers: tuple[type[Optimizer], ...]

    @staticmethod
    def of(
        parameters: Sequence[nn.Parameter],
        optimizers: Sequence[Optimizer],
        servers: int,
        accumulate: torch.dtype | None,
    ) -> "Layout":
        """Cut the parameters into shards; raise if dtypes differ or an optimizer is not elementwise."""
        for one in optimizers:
            if (
                type(one).__module__.split(".")[:2] != ["torch", "optim"]
                or type(one).__name__ not in _ELEMENTWISE
            ):
                raise OptimizerError(
                    f"Expected an optimizer of torch that updates each element by itself, got "
                    f"{type(one).__name__}: a server holds only part of a parameter. Use one of "
                    f"{', '.join(_ELEMENTWISE)}."
                )
        kinds = {str(p.dtype).removeprefix("torch.") for p in parameters}
        if kinds not in ({"float32"}, {"float64"}):
            raise PlanError(
                f"Expected trained parameters all of float32 or all of float64, got {sorted(kinds)}. Convert "
                'the model, as in model.float(), and choose precision="bf16-mixed" instead of "bf16-true".'
            )
        dtype = getattr(torch, kinds.pop())
        wide = torch.promote_types(dtype, torch.float32) if accumulate is None else accumulate
        if wide not in (torch.float32, torch.float64):
            raise PlanError(
                f"Expected gradient sums in float32 or float64, got {wide}. Leave accumulate= out."
            )
        place = {
            p: (i, j)
            for i, one in enumerate(optimizers)
            for j, group in enumerate(one.param_groups)
            for p in group["params"]
        }
        total = sum(p.numel() for p in parameters)
        bounds = tuple(total * index // servers for index in range(servers + 1))
        return Layout(
            bounds=bounds,
            pieces=tuple(_pieces(parameters, place, *pair) for pair in pairwise(bounds)),
            dtype=str(dtype).removeprefix("torch."),
            sum_dtype=str(wide).removeprefix("torch."),
            optimizers=tuple(type(one) for one in optimizers),
        )

    def flat(
        self, values: Sequence[Tensor | None], shard: int, dtype: str, out: Array | None = None
    ) -> Array:
        """Return the elements of a shard from tensors like the parameters; zeros for None."""
        if out is None:
            out = np.empty(self.bounds[shard + 1] - self.bounds[shard], dtype)
        whole = torch.from_numpy(out)
        for piece in self.pieces[shard]:
            value = values[piece.parameter]
            if value is None:
                out[piece.there] = 0
            else:
                there = value.detach().to_dense().reshape(-1)[piece.start : piece.stop]
                whole[piece.there].copy_(there)
        return out

    def write(self, parts: Sequence[Array], parameters: Sequence[Tensor]) -> None:
        """Write the elements of all shards into the parameters."""
        for pieces, part in zip(self.pieces, parts, strict=True):
            for piece in pieces:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # arrays from another process are read-only
                    values = torch.from_numpy(part[piece.there])
                    target = parameters[piece.parameter]
                    flat = target.reshape(-1)  # a view if contiguous
                    flat[piece.start : piece.stop].copy_(values)
                    if not target.is_contiguous():
                        target.copy_(flat.view(target.shape))

    def split(
        self, state: Mapping[nn.Parameter, Any], parameters: Sequence[nn.Parameter], shard: int
    ) -> State:
        """Return a shard's part of the optimizer state."""
        found: State = []
        for piece in self.pieces[shard]:
            parameter = parameters[piece.parameter]
            found.append(
                {
                    name: value.detach().reshape(-1)[piece.start : piece.stop].cpu().numpy().copy()
                    if _is_elementwise(name, value, parameter)
                    else value
                    for name, value in state.get(parameter, {}).items()
                }
            )
        return found

    def join(self, states: Sequence[State], parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Any]:
        """Invert `split`."""
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for pieces, state in zip(self.pieces, states, strict=True):
            for piece, values in zip(pieces, state, strict=True):
                parameter = parameters[piece.parameter]
                for name, value in values.items():
                    slots = found.setdefault(parameter, {})
                    if isinstance(value, np.ndarray):
                        part = tensor_of(value)
                        whole = slots.setdefault(
                            name, part.new_empty(parameter.shape, device=parameter.device)
                        )
                        whole.view(-1)[piece.start : piece.stop].copy_(part)
                    else:
                        slots[name] = value
        return found


class ServerShard:
    """A part of the parameters, updated once per version. A repeated call counts once."""

    def __init__(self, layout: Layout, index: int) -> None:
        self._layout, self._index, self._pieces = layout, index, layout.pieces[index]
        self._size = layout.bounds[index + 1] - layout.bounds[index]
        self._flat = torch.zeros(self._size, dtype=getattr(torch, layout.dtype))
        self._parameters = [nn.Parameter(self._flat[piece.there]) for piece in self._pieces]
        self._optimizers: list[Optimizer | None] = []
        self.version = -1
        self._room: Array = np.empty(0)
        self._forget()

    def _forget(self) -> None:
        self._sum: Array | None = None
        self._waiting: dict[int, Array] = {}
        self._merged = 0  # units merged so far, in their order
        self._gradient: Tensor | None = None

    def load(self, version: int, values: Array, state: State) -> None:
        """Set parameters and optimizer state, and forget earlier pushes."""
        self._flat.numpy()[...] = values
        self.version, self._given = version, state
        self._optimizers = []
        self._forget()

    def begin(self, version: int) -> None:
        """Begin a round: forget the pushes of an unfinished one."""
        if version == self.version:
            self._forget()

    def push(self, version: int, unit: int, part: Array) -> str:
        """Count the gradient sums of a unit, `(terms, elements)`; return why it is refused."""
        if version != self.version:
            return f"version {version} of the parameters, where {self.version} is the newest"
        if part.ndim != 2 or part.shape[1] != self._size or str(part.dtype) != self._layout.sum_dtype:
            return (
                f"{part.dtype} of shape {part.shape}, where {self._layout.sum_dtype} of shape "
                f"(terms, {self._size}) is expected"
            )
        if self._sum is not None and len(self._sum) != len(part):
            return f"{len(part)} terms, where other units have {len(self._sum)}"
        if unit < self._merged or unit in self._waiting:
            return COUNTED
        with np.errstate(over="ignore", invalid="ignore"):  # a sum takes half the time, but may overflow
            if not (np.isfinite(part.sum()) or np.isfinite(part).all()):
                return NOT_FINITE
        self._waiting[unit] = part
        while self._merged in self._waiting:  # in the order of the units, not of arrival
            one = self._waiting.pop(self._merged)
            if self._sum is None:  # reused memory: allocation takes longer than the copy
                self._room = self._sum = self._room if self._room.shape == one.shape else np.empty_like(one)
                np.copyto(self._sum, one)
            else:
                self._sum += one
            self._merged += 1
        return ""

    def seal(self, version: int, units: int, factors: Sequence[float]) -> float:
        """Divide the sums of all units, once, by the terms' factors; return the gradient's sum of squares."""
        if self._gradient is None:
            if version != self.version or self._merged != units or self._sum is None:
                raise RuntimeError(
                    f"{self._merged} of {units} units at version {self.version}, not {version}"
                )
            gradient = np.zeros(self._size, self._layout.sum_dtype)
            for index, factor in enumerate(factors):
                one = self._sum[index] * gradient.dtype.type(factor)
                gradient = one if not index else gradient + one
            self._gradient = torch.from_numpy(gradient)
        return float(torch.linalg.vector_norm(self._gradient, dtype=torch.float64)) ** 2

    def commit(
        self,
        version: int,
        units: int,
        factors: Sequence[float],
        scale: float,
        used: frozenset[int],
        options: Sequence[Sequence[Mapping[str, Any]]],
    ) -> tuple[Array, State]:
        """Make the update with the scaled gradient; return the new parameters and optimizer state."""
        if version + 1 != self.version:
            self.seal(version, units, factors)
            assert self._gradient is not None  # noqa: S101 - `seal` has made it
            gradient = (self._gradient if scale == 1.0 else self._gradient * scale).to(self._flat.dtype)
            for piece, parameter in zip(self._pieces, self._parameters, strict=True):
                there = gradient[piece.there]
                parameter.grad = there if piece.parameter in used else None
            for optimizer in self._made(options):
                optimizer.step()
            for parameter in self._parameters:
                parameter.grad = None
            self.version += 1
            self._forget()
        states: dict[Any, Any] = {p: s for one in self._optimizers if one for p, s in one.state.items()}
        return self._flat.numpy(), [
            {
                name: value.numpy() if _is_elementwise(name, value, parameter) else value
                for name, value in states.get(parameter, {}).items()
            }
            for parameter in self._parameters
        ]

    def _made(self, options: Sequence[Sequence[Mapping[str, Any]]]) -> list[Optimizer]:
        if not self._optimizers:
            for index, kind in enumerate(self._layout.optimizers):
                held: list[list[nn.Parameter]] = [[] for _ in options[index]]
                for piece, parameter in zip(self._pieces, self._parameters, strict=True):
                    if piece.optimizer == index:
                        held[piece.group].append(parameter)
                pairs = zip(held, options[index], strict=True)
                mine = [{"params": one, **group} for one, group in pairs]
                make: Any = kind
                self._optimizers.append(make(mine) if any(one["params"] for one in mine) else None)
            for piece, parameter, values in zip(self._pieces, self._parameters, self._given, strict=True):
                optimizer = self._optimizers[piece.optimizer]
                if values and optimizer is not None:
                    optimizer.state[parameter] = {
                        name: tensor_of(value) if isinstance(value, np.ndarray) else _copied(value)
                        for name, value in values.items()
                    }
        for optimizer, groups in zip(self._optimizers, options, strict=True):
            for group, given in zip(optimizer.param_groups if optimizer else (), groups, strict=False):
                group.update(given)
        return [one for one in self._optimizers if one is not None]


def tensor_of(values: Array) -> Tensor:
    """Return a tensor in its own memory: arrays from another process are read-only."""
    return torch.from_numpy(np.array(values))


def options_of(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """Return the options of each group of each optimizer."""
    return [
        [{name: value for name, value in group.items() if name != "params"} for group in one.param_groups]
        for one in optimizers
    ]


def _pieces(
    parameters: Sequence[nn.Parameter], place: Mapping[nn.Parameter, tuple[int, int]], start: int, stop: int
) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    first = 0
    for index, parameter in enumerate(parameters):
        last = first + parameter.numel()
        begin, end = max(first, start), min(last, stop)
        if begin < end:
            there = index, begin - first, end - first, begin - start
            pieces.append(Piece(*there, *place[parameter]))
        first = last
    return tuple(pieces)


def _is_elementwise(name: str, value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and name not in _SCALARS and value.shape == parameter.shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
