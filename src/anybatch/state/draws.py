"""Random draws of torch, seen by a dispatch mode that can replace them"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from anybatch.core import accelerator, torch_private as private


class SeenDraws(private.TorchDispatchMode):
    """A dispatch mode that passes each random draw to `draw`, which here replaces dropout only.

    Dropout gives its expected value, which is the same in every split.

    Attributes:
        dtypes: floating dtypes of results.
        nbytes: of all floating results, as if all were kept.
        kept: bytes of those that backward may need, each memory once.
        largest: bytes of the largest result.
        unreplayed: draws whose numbers differ in another split.
        is_watching: set to False to stop noting and replacing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.unreplayed = self.nbytes = self.kept = self.largest = 0
        self.is_watching = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make it of a class that torch's compiler skips, if the compiler is loaded."""
        kind: Any = _uncompiled(cls) if private.is_compiler_loaded() else cls
        return super().__new__(kind)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch loads its compiler at the first operation, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        draws, written, is_alias = _traits(func)
        if written:
            self.write([args[at] if at < len(args) else kwargs.get(name) for at, name in written])
        if draws and self.is_watching and not _is_idle(func, args):
            return self.draw(func, args, kwargs)
        result = func(*args, **kwargs)
        if is_alias or not self.is_watching:
            return result
        first = result[0] if type(result) is tuple and result else result
        if isinstance(first, Tensor) and first.is_floating_point():
            floats = [one for one in args if isinstance(one, Tensor) and one.is_floating_point()]
            if floats:
                self.dtypes.add(first.dtype)  # constants are exact
                size = first.numel() * first.itemsize
                self.nbytes += size
                self.largest = max(self.largest, size)
                self.kept += size * any(one.requires_grad for one in floats)
        return result

    def write(self, values: Sequence[Any]) -> None:
        """Note what an operation is about to write to; here nothing is noted."""

    def draw(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a draw."""
        if is_dropout(func) and not has_own_generator(args, kwargs):
            if "native" in func.__name__:
                return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
            return expected_of_bernoulli(args)
        self.unreplayed += 1
        return func(*args, **kwargs)


@cache
def _traits(func: Any) -> tuple[bool, tuple[tuple[int, str], ...], bool]:
    """Return whether an operation draws, the arguments it writes to, and whether it returns memory of one."""
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return draws, *private.memory_of(func)


@cache
def _uncompiled(kind: type[SeenDraws]) -> type[SeenDraws]:
    class Uncompiled(kind):  # pyright: ignore[reportGeneralTypeIssues]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            return super().__torch_dispatch__(func, types, args, kwargs)

    return Uncompiled


@contextmanager
def eager() -> Generator[None]:
    """Disable compiled code: torch never compiles a function again that it has met under a dispatch mode."""
    with torch.compiler.set_stance("force_eager") if private.is_compiler_loaded() else nullcontext():
        yield


@contextmanager
def plain_kernels(*, is_recurrent: bool = True) -> Generator[None]:
    """Disable kernels whose draws no mode sees: compiled code, on a GPU attention and recurrent layers.

    Without recurrent layers convolutions keep cuDNN, which is many times faster.
    """
    with eager(), ExitStack() as stack:
        if accelerator.in_use() is not None:
            cudnn: Any = torch.backends.cudnn  # `flags` fails where TF32 differs between operators
            stack.callback(setattr, cudnn, "enabled", cudnn.enabled)
            cudnn.enabled = cudnn.enabled and not is_recurrent
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


def is_dropout(func: Any) -> bool:
    """Return True for the draws of dropout."""
    return "bernoulli_" in func.__name__ or "native_dropout" in func.__name__


def expected_of_bernoulli(args: Sequence[Any]) -> Tensor:
    """Fill the tensor of a Bernoulli draw with its expected value."""
    chance = args[1] if len(args) > 1 else 0.5
    return args[0].copy_(chance) if isinstance(chance, Tensor) else args[0].fill_(chance)


def has_own_generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if the numbers come from another generator than the device's default one."""
    stream = accelerator.generator_of(device_of(args, kwargs))
    return any(isinstance(one, torch.Generator) and one is not stream for one in (*args, *kwargs.values()))


def device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the device on which an operation draws."""
    for value in args:
        if isinstance(value, Tensor):
            return value.device
    device = torch.device(kwargs.get("device") or "cpu")
    # An accelerator without an index is the current one.
    return device if device.type in ("cpu", "meta") else torch.empty(0, device=device).device


def _is_idle(func: Any, args: Sequence[Any]) -> bool:
    """Return True for an operation that does not draw here: dropout in evaluation, fused kernels.

    `plain_kernels` leaves only fused kernels without dropout.
    """
    name = func.__name__
    if "native_dropout" in name:
        return len(args) > 2 and args[2] is False
    if "rrelu_with_noise" in name:
        return len(args) < 5 or not args[4]
    return "attention" in name or "rnn" in name or "lstm" in name
