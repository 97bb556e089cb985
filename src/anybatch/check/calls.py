"""The calls of a model's modules: recorded, repeated, and with the outputs of the whole batch"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from anybatch.core import torch_private as private
from anybatch.state import Replayed, RowPart, rng, take

Key = tuple[str, int]  # a module's name, and the number of its call in a micro-batch
Table = Mapping[Key, "Call"]  # the calls of some rows, in the order of their ends: inner ones first


@dataclass(slots=True, eq=False)
class Call:
    """One call of a module."""

    key: Key
    arguments: Any  # positional ones and keywords, with copies of tensors
    state: rng.RandomState  # of the random streams
    outputs: list[Tensor] = field(default_factory=list[Tensor])
    is_outermost: bool = False  # True if no other module called this one

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return _tensors(self.arguments)

    def repeat(self, module: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Call a module in the same way, with copies of these tensors in place of its own."""
        rest = iter(inputs)
        args, kwargs = _mapped(lambda _: next(rest).clone(), self.arguments)
        return _tensors(_mapped(_copy, module(*args, **kwargs)))


class Calls:
    """Hooks that record the calls of modules: for each part of a batch those of its last forward.

    Args:
        model: whose modules are watched.
        draws: replayed for each part.
        known: calls with the outputs of all rows, which replace those of the same outermost calls.
    """

    def __init__(self, model: nn.Module, draws: Replayed, known: Table | None = None) -> None:
        self._draws, self._known = draws, known or {}
        self.tables: dict[RowPart, dict[Key, Call]] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
            module.register_forward_hook(self._after)

    def __deepcopy__(self, memo: object) -> "Calls":
        """Return itself: a loss may copy the model, hooks included."""
        return self

    def begin(self, part: RowPart) -> None:
        """Begin a micro-batch of these rows."""
        self._draws.begin(part)
        self._part, self._counts, self._open = part, Counter[str](), list[Call]()
        self._table = self.tables[part] = {}

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not private.is_in_backward():  # recomputed calls are known
            key = name, self._counts[name]
            self._counts[name] += 1
            self._open.append(Call(key, _mapped(_copy, (args, kwargs)), rng.capture()))

    def _after(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        if private.is_in_backward():
            return None
        call = self._open.pop()
        call.outputs, call.is_outermost = _tensors(_mapped(_copy, outputs)), not self._open
        self._table[call.key] = call
        known = self._known.get(call.key)
        return self._replaced(outputs, known.outputs) if known and call.is_outermost else None

    def _replaced(self, output: Any, known: Sequence[Tensor]) -> Any:
        rest = iter(known)

        def replaced(leaf: Tensor) -> Tensor:
            value = next(rest, None)
            value = None if value is None else take(value, leaf.shape, self._part)
            # A loss may ask for a gradient inside, and write in place, which a leaf does not allow.
            return leaf if value is None else value.clone().requires_grad_(leaf.requires_grad) * 1

        return _mapped(replaced, output)


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return private.pytree.tree_map_only(Tensor, function, value)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in private.pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
