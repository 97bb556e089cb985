"""What every module was given and gave back, in a pass over the whole batch or over its parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from anybatch.check.draws import Draws
from anybatch.check.rows import Axis, Part
from anybatch.core import torch_private as private

Key = tuple[str, int]  # a module's name, and which of its calls


@dataclass(frozen=True, slots=True, eq=False)
class Returned:
    """What a call gave back, but for the numbers.

    Attributes:
        leaves: what was given back, taken apart, with None in the place of tensors.
        form: how that is put together again.
        places: where among them the tensors stand.
        flows: for each tensor, whether a gradient flows into it.
        states: where the random streams stood afterwards.
    """

    leaves: Sequence[Any]
    form: Any
    places: Sequence[int]
    flows: Sequence[bool]
    states: Mapping[str, Tensor]

    @staticmethod
    def of(outputs: Any) -> "Returned":
        """Of the outputs of a call that has just ended."""
        leaves, form = private.pytree.tree_flatten(outputs)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return Returned(rest, form, places, [leaves[p].requires_grad for p in places], Draws.states())

    def join(self, outputs: Sequence[Tensor]) -> Any:
        """The same with these tensors."""
        leaves = list(self.leaves)
        for place, value in zip(self.places, outputs, strict=True):
            leaves[place] = value
        return private.pytree.tree_unflatten(leaves, self.form)


class Call:
    """One call of a module.

    Attributes:
        key: the module, and which of its calls in this micro-batch.
        values: what it was given, taken apart: tensors and all else.
        form: how that is put together again.
        states: where the random streams stood.
        outputs: the tensors it gave back.
        inner: calls made while this one ran, in the order in which they ended.
        returned: what else is needed to give the same back without running the module.
        axes: on which axes rows lie in what it was given and gave back, where that has been made sure of.
    """

    def __init__(self, *, key: Key, values: list[Any], form: Any, states: Mapping[str, Tensor]) -> None:
        self.key, self.values, self.form, self.states = key, values, form, states
        self.outputs: list[Tensor] = []
        self.inner: list[Call] = []
        self.returned: Returned | None = None
        self.axes: tuple[Sequence[Axis | None], Sequence[Axis | None]] | None = None

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors it was given."""
        return [value for value in self.values if isinstance(value, Tensor)]

    def repeat(self, module: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Call a module in the same way, with these tensors in place of its own."""
        rest = iter(inputs)
        values = [next(rest) if isinstance(value, Tensor) else value for value in self.values]
        args, kwargs = private.pytree.tree_unflatten(values, self.form)
        return tensors(module(*args, **kwargs))

    def flat(self) -> "Iterator[Call]":
        """This call after all those inside it."""
        for call in self.inner:
            yield from call.flat()
        yield self


class Calls:
    """Notes calls by hooks: of each part of a batch those of its last forward.

    Attributes:
        parts: the outermost calls of each part, in their order.
    """

    def __init__(self) -> None:
        self.parts: dict[Part, list[Call]] = {}
        self._open: list[Call] = []
        self._counts: dict[str, int] = {}
        self._outermost: list[Call] = []

    def __call__(self, model: nn.Module) -> Callable[[Part], None]:
        """Watch a model; what comes back is told when a part begins."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            module.register_forward_hook(self._after, always_call=False)
        return self._begin

    def table(self, part: Part) -> dict[Key, Call]:
        """All calls of a part by their key, innermost first."""
        return {call.key: call for outer in self.parts.get(part, []) for call in outer.flat()}

    def _begin(self, part: Part) -> None:
        self._open, self._counts, self._outermost = [], {}, []
        self.parts[part] = self._outermost

    def _before(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if _in_backward():  # what is computed anew there has been noted before
                return
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            values, form = private.pytree.tree_flatten((args, kwargs))
            kept = [value.detach().clone() if isinstance(value, Tensor) else value for value in values]
            self._open.append(Call(key=(name, count), values=kept, form=form, states=Draws.states()))

        return hook

    def _after(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if _in_backward():
            return
        call = self._open.pop()
        call.outputs.extend(value.detach().clone() for value in tensors(outputs))
        if not self._open:
            call.returned = Returned.of(outputs)
        (self._open[-1].inner if self._open else self._outermost).append(call)


def tensors(value: Any) -> list[Tensor]:
    """The tensors of any nested value, whatever else stands in it.

    Example:
        >>> import torch
        >>> len(tensors({"a": torch.ones(1), "b": (1, [torch.ones(2)])}))
        2
    """
    return [leaf for leaf in private.pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _in_backward() -> bool:
    return private.is_in_backward()
