"""A block earns trust: its first runs in backward are compared, bit for bit, with those in forward."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # pyright: ignore
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from anybatch.core import BlockError

#: How many second runs of a block are compared before it is trusted.
RUNS = 2

ADVICE = (
    "Look for a generator of its own, state that its forward changes, and values read from an object that "
    "others change too; or leave this block out of `recompute`."
)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_not_compiled = torch._disable_dynamo  # pyright: ignore


class Trust:
    """What is known of one block under one policy.

    Attributes:
        left: second runs that are still to be compared.
        silent: buffers, by place and name, that the forward writes to without telling autograd.
    """

    __slots__ = ("left", "silent")

    def __init__(self, left: int = RUNS) -> None:
        self.left = left
        self.silent: set[tuple[int, str]] = set()


_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[str, bool], Trust]] = WeakKeyDictionary()


def trust_in(block: nn.Module, policy: str) -> Trust:
    """The trust in a block, in this process, as it is now: to train or to evaluate.

    Example:
        >>> trust_in(nn.Tanh(), "recompute").left
        2
    """
    return _KNOWN.setdefault(block, {}).setdefault((policy, block.training), Trust())


def is_fake() -> bool:
    """Whether only shapes are computed just now: there is nothing to compare."""
    key = torch._C._TorchDispatchModeKey.FAKE  # pyright: ignore
    return torch._C._get_dispatch_mode(key) is not None  # pyright: ignore


def mark(tensor: Any) -> tuple[Any, ...]:
    """What tells a tensor's bits from others, as numbers; shape and dtype only where they cannot be read.

    The sum of the bits read as integers, and of numbers as they are, since signs come in pairs; and for each
    axis those of its first half and of every other element, so that another order is seen as well. No element
    is copied.

    Args:
        tensor: any tensor, or an array of NumPy.

    Example:
        >>> mark(torch.tensor([1, 2])) == mark(torch.tensor([2, 1]))
        False
    """
    if not isinstance(tensor, Tensor):
        return (tensor.shape, str(tensor.dtype), hash(tensor.tobytes()) if not tensor.dtype.hasobject else 0)
    if not is_plain(tensor):
        return (tensor.shape, str(tensor.dtype)) if not is_lazy(tensor) else ()
    with _disable_current_modes(), torch.no_grad():  # nobody else is to see these operations
        numbers = tensor.detach()
        numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
        parts = [numbers]
        for axis, size in enumerate(numbers.shape):
            if size > 1:
                every_other = (slice(None),) * axis + (slice(None, None, 2),)
                parts += [numbers.narrow(axis, 0, size // 2), numbers[every_other]]
        sums = [str(_sum(part.view(_INTEGERS[part.element_size()]))) for part in parts]
        if numbers.is_floating_point() and numbers.element_size() > 1:
            sums += [str(_sum(part)) for part in parts]
    return (tuple(tensor.shape), str(tensor.dtype), *sums)


def _sum(tensor: Tensor) -> Any:
    return tensor.sum(dtype=tensor.dtype).item()


def is_plain(tensor: Tensor) -> bool:
    """Whether its bits can be read: no fake, nested, sparse or quantized one."""
    is_odd = tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or is_lazy(tensor)
    kinds = (Tensor, nn.Parameter, nn.Buffer)
    return type(tensor) in kinds and tensor.layout is torch.strided and not is_odd and not _is_wrapped(tensor)


class Believed:
    """In the place of a proof, where a block is trusted.

    Args:
        name: of the block, for a message.

    Attributes:
        trust: in the block.
        is_needed: whether anything is compared.
    """

    is_needed = False

    def __init__(self, name: str, trust: Trust) -> None:
        self.trust = trust
        self._name = name

    @contextmanager
    def first(self) -> Generator[None]:
        """What the first run goes under."""
        with _hooked(self._name, lambda tensor: None):
            yield

    @contextmanager
    def again(self) -> Generator[None]:
        """What every other run goes under."""
        yield


class Proof(Believed):
    """What one call saved for backward, in order, and whether a second run saves the same.

    That is all that backward reads of a block, so where it is the same, bit for bit, gradients are too. Of
    each tensor a few numbers are kept. Left out is what nobody has filled when it is saved, and results
    besides the first of an operation, parts of which may never be written (a kernel's padding or seeds).
    """

    is_needed = True

    def __init__(self, name: str, trust: Trust) -> None:
        super().__init__(name, trust)
        self._saved: list[tuple[Any, ...] | None] = []
        self._is_complete = False

    @contextmanager
    def first(self) -> Generator[None]:
        """See `Believed`.

        Raises:
            BlockError: backward would begin before the last operation has filled what it saves.
        """
        makers = _Makers()

        def note(tensor: Tensor) -> None:
            self._saved.append(makers.mark(tensor))
            makers.saved(tensor)

        with _hooked(self._name, note), makers:
            yield
        self._is_complete = True
        if makers.is_filled_late:  # torch ends the second run as soon as the last tensor is saved
            raise BlockError(
                f"Expected {self._name!r} to save for backward what is computed, got a last operation that "
                "fills what it has saved already (such as nn.RReLU). Let another operation follow in the "
                "block, or leave it out of `recompute`.",
                block=self._name,
            )

    @contextmanager
    def again(self) -> Generator[None]:
        """See `Believed`.

        Raises:
            BlockError: something else is saved than in the first run.
        """
        makers, place = _Makers(), 0

        def compare(tensor: Tensor) -> None:
            nonlocal place
            if place < len(self._saved):
                expected, found = self._saved[place], makers.mark(tensor)
                if expected is not None and found is not None and expected != found:
                    raise self._error(place, makers.of(tensor), tensor)
            place += 1

        try:
            with _hooked(self._name, compare), makers:
                yield
        except Exception as error:
            if not is_stop(error):
                raise
            self._count()
            raise
        self._count()

    def _count(self) -> None:
        if self._is_complete and self.trust.left:
            self.trust.left -= 1

    def _error(self, place: int, maker: str, tensor: Tensor) -> BlockError:
        return BlockError(
            f"Expected {self._name!r} to compute the same when it is run again in backward, got other values "
            f"in tensor {place + 1} of {len(self._saved)} that it saves, of shape {tuple(tensor.shape)}, "
            f"{maker}. {ADVICE}",
            block=self._name,
        )


def is_stop(error: Exception) -> bool:
    """Whether this is how torch ends a second run that has gone far enough."""
    return type(error).__name__ == "_StopRecomputationError"


class _Makers(TorchDispatchMode):
    """Which operation made what; asked while it runs.

    Attributes:
        is_filled_late: whether something was saved that nobody had filled when the last tensor was saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_filled_late = False
        self._waiting: set[int] = set()
        self._makers: dict[int, str] = {}
        self._empty: set[int] = set()
        self._besides: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code runs under it as ever."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "is_view", False):
            return result
        written = _written(func, args)
        self._empty.difference_update(written)
        self._waiting.difference_update(written)
        first, *others = _storages(result) or [0]
        self._makers[first] = str(func)
        self._besides.discard(first)
        self._besides.update(others)
        (self._empty.add if "empty" in str(func) else self._empty.discard)(first)
        return result

    def saved(self, tensor: Tensor) -> None:
        """Note what was saved."""
        if tensor.numel():
            self._waiting |= self._empty & {*_storages(tensor)}
        self.is_filled_late = bool(self._waiting)

    def mark(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """Of what is sure to be the same."""
        is_unsure = is_plain(tensor) and _storages(tensor)[0] in self._empty | self._besides
        return None if is_unsure else mark(tensor)

    def of(self, tensor: Tensor) -> str:
        """Where it comes from, in words."""
        made = self._makers.get(_storages(tensor)[0]) if is_plain(tensor) else None
        return f"a result of {made}" if made else "made before the block began"


def _written(func: Any, args: tuple[Any, ...]) -> list[int]:
    """The storages of the arguments that an operation writes to."""
    pairs = zip(func._schema.arguments, args, strict=False)
    return _storages(
        [value for one, value in pairs if one.alias_info is not None and one.alias_info.is_write]
    )


def _storages(result: object) -> list[int]:
    tensors = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
    return [one.untyped_storage().data_ptr() if is_plain(one) else 0 for one in tensors]


@contextmanager
def _hooked(name: str, note: Callable[[Tensor], None]) -> Generator[None]:
    """What is saved for backward is noted on its way to torch's own hooks; errors of those name the block."""
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # pyright: ignore
    hooks: Sequence[Any] | None = ask(True) if ask is not None else None
    if hooks is None:
        yield
        return
    pack, unpack = hooks
    with saved_tensors_hooks(partial(_noting, note, pack), partial(_naming, name, unpack)):
        yield


# No closures: what keeps a function from being compiled refers to it and back, and what it holds would stay.
@_not_compiled
def _noting(note: Callable[[Tensor], None], pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    note(tensor)
    return pack(tensor)


@_not_compiled
def _naming(name: str, unpack: Callable[[Any], Tensor], packed: Any) -> Tensor:
    try:
        return unpack(packed)
    except CheckpointError as error:
        raise BlockError(
            f"Expected {name!r} to save the same tensors when it is run again in backward, got: "
            f"{str(error).partition(chr(10))[0]} {ADVICE}",
            block=name,
        ) from error


def _is_wrapped(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore
