"""A shard of the parameters on a server: merges sums in the order of the units and makes the update."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from anybatch.core import NonFiniteLossError, OptimizerError, PlanError, RankError
from anybatch.parallel.ranges import even, within

Array = np.ndarray[Any, np.dtype[Any]]
State = list[dict[str, Any]]  # optimizer state of each piece

# Optimizers that update an element from its own gradient and state only.
_NAMES = "SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD"
_ELEMENTWISE = [getattr(optim, name) for name in _NAMES.split(", ")]
_WIDE = "float32", "float64"
_SCALARS = ("step", "eta", "mu", "mu_product")  # optimizer state with one number per parameter


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

    sizes: tuple[int, ...]  # elements of each shard
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
            if type(one) not in _ELEMENTWISE:
                raise OptimizerError(
                    f"Expected an optimizer of torch that updates each element by itself, got "
                    f"{type(one).__name__}: a server holds only part of a parameter. Use one of {_NAMES}."
                )
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
        if len(kinds) > 1 or kinds[0] not in _WIDE:
            raise PlanError(
                f"Expected trained parameters all of float32 or all of float64, got {kinds}. Convert "
                'the model, as in model.float(), and choose precision="bf16-mixed" instead of "bf16-true".'
            )
        sums = str(accumulate or kinds[0]).removeprefix("torch.")
        if sums not in _WIDE:
            raise PlanError(
                f"Expected gradient sums in float32 or float64, got {accumulate}. Leave accumulate= out."
            )
        place = {
            p: (i, j)
            for i, one in enumerate(optimizers)
            for j, group in enumerate(one.param_groups)
            for p in group["params"]
        }
        elements = [p.numel() for p in parameters]
        shards = even(sum(elements), servers)
        pieces: list[tuple[Piece, ...]] = []
        for shard in shards:
            at, found = 0, list[Piece]()
            for index, start, stop in within(elements, shard):
                found.append(Piece(index, start, stop, at, *place[parameters[index]]))
                at += stop - start
            pieces.append(tuple(found))
        return Layout(
            sizes=tuple(map(len, shards)),
            pieces=tuple(pieces),
            dtype=kinds[0],
            sum_dtype=sums,
            optimizers=tuple(type(one) for one in optimizers),
        )

    def flat(self, values: Sequence[Tensor | None], shard: int, out: Array) -> Array:
        """Copy the elements of a shard from tensors like the parameters; zeros for None."""
        whole = torch.from_numpy(out)
        for piece in self.pieces[shard]:
            value = values[piece.parameter]
            if value is None:
                out[piece.there] = 0
            else:
                flat = value.detach().to_dense().reshape(-1)
                whole[piece.there].copy_(flat[piece.start : piece.stop])
        return out

    def write(self, parts: Sequence[Array], parameters: Sequence[Tensor]) -> None:
        """Write the elements of all shards into the parameters."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # arrays from another process are read-only
            for pieces, part in zip(self.pieces, parts, strict=True):
                for piece in pieces:
                    target = parameters[piece.parameter]
                    flat = target.reshape(-1)  # a view if contiguous
                    flat[piece.start : piece.stop].copy_(torch.from_numpy(part[piece.there]))
                    if not target.is_contiguous():
                        target.copy_(flat.view(target.shape))

    def split(self, optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter]) -> list[State]:
        """Return each shard's part of the optimizer state."""

        def state(piece: Piece) -> dict[str, Any]:
            p = parameters[piece.parameter]
            return _arrays(optimizers[piece.optimizer].state.get(p, {}), p, slice(piece.start, piece.stop))

        return [[*map(state, pieces)] for pieces in self.pieces]

    def join(
        self, states: Sequence[State], optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter]
    ) -> None:
        """Invert `split`: set the state of the optimizers."""
        # Tensors of their own: others may hold the old ones.
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for pieces, state in zip(self.pieces, states, strict=True):
            for piece, values in zip(pieces, state, strict=True):
                like = parameters[piece.parameter]
                for name, value in values.items():
                    slots = found.setdefault((piece.optimizer, piece.parameter), {})
                    if isinstance(value, np.ndarray):
                        part = tensor_of(value)
                        whole = slots.setdefault(name, part.new_empty(like.shape, device=like.device))
                        whole.view(-1)[piece.start : piece.stop].copy_(part)
                    else:
                        slots[name] = value
        for (number, place), slots in found.items():
            optimizers[number].state[parameters[place]] = slots


class ServerShard:
    """A server of a shard. It remembers no call: a new process that repeats one returns the same bits."""

    def __init__(self, layout: Layout, index: int) -> None:
        self._layout, self._pieces = layout, layout.pieces[index]
        self._size = layout.sizes[index]
        self._room: Array = np.empty(0)  # of the sums, reused: allocation takes longer than the copy

    def merge(self, factors: Sequence[float], *parts: Array) -> tuple[float, Array]:
        """Add up the sums of all units, `(terms, elements)` each, in their order, and divide once.

        Return the sum of squares of the shard's gradient, and the gradient.
        """
        shape, dtype = (len(factors), self._size), np.dtype(self._layout.sum_dtype)
        total = self._room = self._room if self._room.shape == shape else np.empty(shape, dtype)
        for unit, part in enumerate(parts):
            if part.shape != shape or part.dtype != dtype:
                raise RankError(
                    f"Expected {dtype} sums of shape {shape} from unit {unit}, got {part.dtype} of shape "
                    f"{part.shape}. No update was made. Start workers and servers with the same model and "
                    "version of anybatch."
                )
            with np.errstate(over="ignore", invalid="ignore"):  # a sum takes half the time, but may overflow
                if not (np.isfinite(part.sum()) or np.isfinite(part).all()):
                    raise NonFiniteLossError(
                        f"Expected finite gradients, got NaN or infinity from unit {unit}. No update was "
                        "made. Look for bad data in its rows, or too high a learning rate."
                    )
            np.add(total, part, total) if unit else np.copyto(total, part)
        total *= np.array(factors, dtype)[:, None]
        gradient = total[0]
        for one in total[1:]:
            gradient += one
        norm = torch.linalg.vector_norm(torch.from_numpy(gradient), dtype=torch.float64)
        return float(norm) ** 2, gradient

    def update(
        self,
        values: Array,
        state: State,
        gradient: Array,
        scale: float,
        used: frozenset[int],
        options: Sequence[Sequence[Mapping[str, Any]]],
    ) -> tuple[Array, State]:
        """Make the update with the scaled gradient; return the new parameters and optimizer state."""
        flat = tensor_of(values)
        scaled = torch.from_numpy(gradient * gradient.dtype.type(scale)).to(flat.dtype)
        held: list[list[list[nn.Parameter]]] = [[[] for _ in groups] for groups in options]
        parameters = [nn.Parameter(flat[piece.there]) for piece in self._pieces]
        for piece, parameter in zip(self._pieces, parameters, strict=True):
            parameter.grad = scaled[piece.there] if piece.parameter in used else None
            held[piece.optimizer][piece.group].append(parameter)
        known, states = dict(zip(parameters, state, strict=True)), dict[Any, Any]()
        for kind, mine, groups in zip(self._layout.optimizers, held, options, strict=True):
            make: Any = kind
            if any(mine):
                pairs = zip(mine, groups, strict=True)
                optimizer: Optimizer = make([{"params": one, **group} for one, group in pairs])
                for parameter in chain(*mine):
                    if known[parameter]:
                        optimizer.state[parameter] = {
                            name: tensor_of(value) if isinstance(value, np.ndarray) else copy.deepcopy(value)
                            for name, value in known[parameter].items()
                        }
                optimizer.step()
                states |= optimizer.state
        return flat.numpy(), [_arrays(states.get(one, {}), one) for one in parameters]


def tensor_of(values: Array) -> Tensor:
    """Return a tensor in its own memory: arrays from another process are read-only."""
    return torch.from_numpy(np.array(values))


def options_of(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """Return the options of each group of each optimizer."""
    return [
        [{name: value for name, value in group.items() if name != "params"} for group in one.param_groups]
        for one in optimizers
    ]


def _arrays(state: Mapping[str, Any], like: Tensor, part: slice = slice(None)) -> dict[str, Any]:
    """Return a parameter's optimizer state with one number per element as arrays of a part of them."""
    return {
        name: value.detach().reshape(-1)[part].cpu().numpy()
        if isinstance(value, Tensor) and name not in _SCALARS and value.shape == like.shape
        else value
        for name, value in state.items()
    }
