"""A block's forward, recomputed in backward from its former state, and compared with the first run"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from anybatch import core
from anybatch.core import torch_private as private
from anybatch.state import Contents, Reachable, SeenDraws, rng

_ADVICE = (
    "Look for a generator of its own, state that its forward changes, and values read from an object that "
    "others change too; or leave this block out of `recompute`."
)


class State:
    """The state that a block's forward reads and may write besides its arguments.

    Copies of buffers with one axis are always kept, because BatchNorm's kernels write to them without a new
    version; copies of others only if the forward wrote to them.
    """

    def __init__(self, inside: Reachable) -> None:
        self._inside = inside
        self._random = self._streams()
        self._tables = Contents(_tables(inside))
        self._registered = Contents(_registered(inside))
        buffers = [one for slots in map(private.buffers_of, inside.modules) for one in slots.values()]
        self._copies = {
            one: one.detach().clone()
            for one in buffers
            if one is not None and not (is_lazy(one) or one.requires_grad or one.is_inference())
        }
        self._versions = {buffer: private.version(buffer) for buffer in self._copies}

    def _streams(self) -> rng.RandomState:
        return rng.capture((*rng.of_process(), *self._inside.generators))

    def keep_what_changed(self) -> None:
        """Drop, after the forward, what it cannot have changed."""
        self._tables.keep_what_changed()
        for buffer, version in self._versions.items():
            if private.version(buffer) == version and buffer.dim() > 1:
                del self._copies[buffer]

    @contextmanager
    def again(self, name: str) -> Generator[None]:
        """Restore this state for a while, then the present one; refuse buffers that others changed."""
        for buffer, version in self._versions.items():
            if buffer not in self._copies and private.version(buffer) != version:
                raise core.PlanError(
                    f"Expected the buffers of {name!r} to stay as they are from forward to backward, got one "
                    f"of shape {tuple(buffer.shape)} that was written meanwhile. Leave this block out of "
                    "`recompute`."
                )
        # Copies replace the buffers, so that autograd sees no write to the buffers themselves.
        fresh = {buffer: value.clone() for buffer, value in self._copies.items()}
        random, now = self._streams(), Contents([*_tables(self._inside), *_registered(self._inside)])
        try:
            rng.restore(self._random)
            self._tables.put_back()
            self._registered.put_back()
            for slots in map(private.buffers_of, self._inside.modules):
                slots.update(
                    {key: fresh[one] for key, one in slots.items() if one is not None and one in fresh}
                )
            yield
        finally:
            now.put_back()
            rng.restore(random)


class BlockCall:
    """A call of a block: runs the forward at first, and recomputes it each time after that.

    If `verified` is set before the first run, outputs of the second are compared with those of the first,
    unless one was changed in place meanwhile. If they are equal, `verified` is called.

    Attributes:
        tensors: the tensors among the arguments, each once.
    """

    def __init__(self, name: str, forward: Callable[..., Any], inside: Reachable, arguments: Any) -> None:
        self.verified: Callable[[], object] | None = None
        args, kwargs = arguments
        self._name, self._forward = name, forward
        self._inside = inside.joined((*args, *kwargs.values()))
        self._first: list[Any] = [arguments]
        leaves, self._spec = private.pytree.tree_flatten(arguments)
        # Inference tensors are constants, and autograd could not keep them.
        given = {id(one): one for one in leaves if isinstance(one, Tensor) and not one.is_inference()}
        self.tensors = [*given.values()]
        self._leaves = [_Place([*given].index(id(one))) if id(one) in given else one for one in leaves]
        self._outputs: list[tuple[Tensor, int]] = []

    def __call__(self, *tensors: Tensor) -> Any:
        """Run or recompute the forward; see `apply_policies` for what is refused."""
        if not self._first:
            return self._again(tensors)
        args, kwargs = self._first.pop()
        self.tensors = []  # autograd keeps them, and detects changes
        self._state = State(self._inside)
        versions = private.versions(tensors)
        others = _versions(self._inside) if self.verified is not None else []
        result = self._forward(*args, **kwargs)
        if versions != private.versions(tensors):
            raise core.PlanError(
                f"Expected a block that leaves its arguments as they are, got {self._name!r}, which changes "
                "one in place and so cannot be run again. Set inplace=False in its first layers, or leave "
                "it out of `recompute`."
            )
        for tensor, version in others:
            if private.version(tensor) != version:
                raise core.BlockError(
                    f"Expected {self._name!r} to write to buffers only, got a {type(tensor).__name__} of "
                    f"shape {tuple(tensor.shape)} that its forward writes to, and would write to again in "
                    "backward. Register it as a buffer, or leave this block out of `recompute`.",
                    block=self._name,
                )
        self._state.keep_what_changed()
        replaces_draws = any(isinstance(one, SeenDraws) for one in private.dispatch_modes())
        if self.verified is not None and not replaces_draws:  # the extra run would make its own
            self._outputs = [(one, private.version(one)) for one in _readable(result)]
        return result

    def _again(self, tensors: Sequence[Tensor]) -> Any:
        try:
            if self._outputs:
                self._verify(tensors)
            args, kwargs = self._arguments(tensors)
            with core.recomputing(), self._state.again(self._name):
                return self._forward(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, (core.AnybatchError, MemoryError, torch.OutOfMemoryError)):
                error.add_note(f"This happened while block {self._name!r} was run again in backward.")
            raise

    def _arguments(self, tensors: Sequence[Tensor]) -> Any:
        leaves = [tensors[one.number] if isinstance(one, _Place) else one for one in self._leaves]
        return private.pytree.tree_unflatten(leaves, self._spec)

    def _verify(self, tensors: Sequence[Tensor]) -> None:
        """Compare the outputs with those of an extra run, which saves nothing and so needs little memory."""
        expected, self._outputs = self._outputs, []
        if any(private.version(one) != version for one, version in expected):
            return
        args, kwargs = self._arguments(tensors)
        # Without modes: neither a meter nor the mode of a selective block may see this run.
        nothing_saved = saved_tensors_hooks(lambda _: None, lambda saved: saved)
        with (
            private.disable_current_modes(),
            core.recomputing(),
            self._state.again(self._name),
            nothing_saved,
        ):
            found = _readable(self._forward(*args, **kwargs))
        same = [_is_equal(one, other) for (one, _), other in zip(expected, found, strict=False)]
        if len(found) != len(expected) or not all(same):
            place = (*same, False).index(False)
            raise core.BlockError(
                f"Expected {self._name!r} to compute the same when it is run again in backward, got other "
                f"values in its output {place + 1} of {len(expected)}. {_ADVICE}",
                block=self._name,
            )
        if self.verified is not None:
            self.verified()


def is_readable(tensor: Tensor) -> bool:
    """Return True if the values can be compared: dense, on a device, and not a fake tensor."""
    is_odd = tensor.is_meta or tensor.is_quantized or tensor.is_inference()
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not is_odd


def _readable(result: Any) -> list[Tensor]:
    return [one.detach() for one in core.tensors_in(result) if is_readable(one)]


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if tensors are bit-identical, except for the sign of zero and the kind of NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _versions(inside: Reachable) -> list[tuple[Tensor, int]]:
    held = [one for module in inside.modules for one in private.parameters_of(module).values()]
    leaves = [one for one in inside.values if isinstance(one, Tensor) and one.is_leaf]
    found = [one for one in (*held, *leaves) if one is not None and not (is_lazy(one) or one.is_inference())]
    return [(one, private.version(one)) for one in found]


class _Place(NamedTuple):
    number: int


def _tables(inside: Reachable) -> list[Any]:
    """Return the containers in which a forward may replace objects, but for parameters and buffers."""
    return [*map(vars, inside.modules), *inside.containers]


def _registered(inside: Reachable) -> list[Any]:
    modules = inside.modules
    return [*map(private.parameters_of, modules), *map(private.buffers_of, modules)]
