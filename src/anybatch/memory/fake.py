"""Fake tensors in the place of a model's and an optimizer's own, for as long as a step is traced."""

import gc
import inspect
import logging
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from anybatch.core import PlanError, TraceError
from anybatch.core import torch_private as private
from anybatch.memory import likely
from anybatch.state import ObjectState, Surroundings, rng


class FakeMode(private.FakeTensorMode):
    """Operations on tensors without memory; whoever asks for a value gets one that is likely.

    The sum of many numbers is how many they are, as if each was 1, so that counts of rows and of valid
    tokens add up; what is computed from such a count is the count. No number is NaN or infinite. Any other
    number is 1, any other bool true.
    An int is refused, though, where a shape may be made of it: inside a module, and in code of the caller's
    that asks for what is no count.

    Attributes:
        where: says which module is at work.
        culprit: the operation that first failed and the module it failed in, or "" if none did.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.where: Callable[[], str] = str
        self.culprit = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is _DEVICE:  # asked more often than anything is computed
            return args[0].fake_device
        try:
            result: Any = _DISPATCH(self, func, types, args, kwargs)
        except private.DataDependentOutputException:
            if func is _ATEN._local_scalar_dense.default:
                return self._likely(args[0])
            if func in (_ATEN.equal.default, _ATEN.allclose.default):
                return True
            self._blame(func)
            raise
        except Exception:
            self._blame(func)
            raise
        if func in _DRAGGING and not result.dim():
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            result.untyped_storage().resize_(shape.numel() * result.itemsize)
        if func is _RNN:
            return (*result[:3], result[3].new_empty(_rnn_workspace(args)))
        likely.note(func, args, result)
        return result

    @contextmanager
    def explained(self, what: str = "a step", instead: str = "it is measured instead") -> Generator[None]:
        """Whatever fails here becomes a TraceError that names the operation; torch does not log it, too.

        Args:
            what: runs here.
            instead: what is done, or what to do, where it cannot.

        Raises:
            TraceError: something failed.
            PlanError: as it came; a real step would not do better.
        """
        _LOG.addFilter(quiet := _Quiet())
        try:
            yield
        except (PlanError, TraceError):
            raise
        except Exception as error:
            raise TraceError(
                f"Expected {what} that runs on fake tensors, got {type(error).__name__} from "
                f"{self.culprit or what}: {error}. Shapes that depend on values, values taken out of "
                f"tensors and code that is not Python cannot be traced; {instead}."
            ) from error
        finally:
            _LOG.removeFilter(quiet)

    def _likely(self, scalar: Tensor) -> float:
        """A number for whoever asks for one."""
        each = likely.known(scalar)
        number = 1 if each is None else each
        if scalar.dtype is torch.bool or scalar.is_floating_point():
            return (bool if scalar.dtype is torch.bool else float)(number)
        module, is_ours = _who_asks()
        if module is not None or not (is_ours or each is not None):
            place = "a loss" if module is None else f"{self.where() or 'the model'} ({type(module).__name__})"
            raise TraceError(
                f"Expected shapes that are known before it runs, got an int asked of a tensor in {place}; "
                "its shapes depend on values. It is measured instead where the device is here."
            )
        return int(number)

    def _blame(self, func: object) -> None:
        self.culprit = self.culprit or f"{func} in {self.where() or 'the model'}"


class _Quiet(logging.Filter):
    """Lets no error through; each trace has its own, so that those of several threads come and go freely."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR


_LOG = logging.getLogger(private.FakeTensorMode.__module__)
_ATEN: Any = torch.ops.aten
_DEVICE: Any = torch.ops.prim.device.default
# Ours is kept from torch.compile already; to keep theirs from it once more costs a twentieth of a trace.
_DISPATCH: Any = inspect.unwrap(private.FakeTensorMode.__torch_dispatch__)
# Reduced, their scalar lies in a storage of the size of the input.
_DRAGGING = (
    _ATEN.mse_loss.default,
    _ATEN.smooth_l1_loss.default,
    _ATEN.soft_margin_loss.default,
    _ATEN.binary_cross_entropy.default,
)
_RNN: Any = getattr(_ATEN.mkldnn_rnn_layer, "default", None)


def _who_asks() -> tuple[nn.Module | None, bool]:
    """The module at work, and whether it is code of ours that asks for a number."""
    frame, asks = sys._getframe(1), ""  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code is private.CALL_CODE:
            return frame.f_locals["self"], False
        name = str(frame.f_globals.get("__name__"))
        if not asks and frame.f_globals is not globals() and not name.startswith("torch."):
            asks = name
        frame = frame.f_back
    return None, asks.startswith("anybatch.")


def _rnn_workspace(args: Sequence[Any]) -> int:
    """Bytes that the CPU's recurrent layer keeps for backward; only the kernel itself can tell."""
    with private.disable_current_modes(), torch.enable_grad():  # without, nothing is kept
        real = [torch.zeros(one.shape, dtype=one.dtype) if isinstance(one, Tensor) else one for one in args]
        return _RNN(*real)[3].nbytes


class Fakes:
    """One fake for each tensor, however often it is met.

    Args:
        mode: what the fakes belong to.
    """

    def __init__(self, mode: FakeMode) -> None:
        self._mode = mode
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # the tensor too, so that its id stays its own

    def of(self, tensor: Tensor) -> Tensor:
        """The fake of a tensor: same shape, strides and shared memory, hooks and attributes."""
        if is_lazy(tensor):
            return tensor
        if id(tensor) not in self._made:
            fake = self._stand_in(tensor)
            if tensor.is_leaf:
                _take_hooks_over(tensor, fake)
            self._made[id(tensor)] = tensor, fake
        return self._made[id(tensor)][1]

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta":
            return self._mode.from_tensor(tensor, static_shapes=True)
        # Nobody trains there: what has no memory yet stands for what will be on the device.
        with self._mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    def settings(self, value: Any) -> Any:
        """The same as `within`; a scalar keeps its value, as updates divide by it and branch on it."""
        fresh = self.within(value)
        for key, one in value.items():
            if isinstance(one, Tensor) and not one.dim() and one.device.type != "meta":
                number = one.item()
                with self._mode:
                    fresh[key] = torch.tensor(number, dtype=one.dtype, device=one.device)
        return fresh

    def within(self, value: Any, depth: int = 4) -> Any:
        """The same value with fakes, through Python's own containers; they are new ones."""
        if isinstance(value, Tensor):
            return self.of(value)
        kind = type(value)
        if depth and kind in (list, tuple):
            return kind([self.within(one, depth - 1) for one in value])
        if depth and kind in (dict, OrderedDict, defaultdict):
            fresh = value.copy()
            fresh.update({key: self.within(one, depth - 1) for key, one in value.items()})
            return fresh
        if depth and is_dataclass(value) and not isinstance(value, type | nn.Module):
            return self._within_fields(value, depth - 1)
        return value

    def _within_fields(self, value: Any, depth: int) -> Any:
        fresh = copy(value)
        for field in fields(value):
            object.__setattr__(fresh, field.name, self.within(getattr(value, field.name), depth))
        return fresh


def _take_hooks_over(tensor: Tensor, fake: Tensor) -> None:
    for name, value in vars(tensor).items():  # what callers note on a parameter
        vars(fake).setdefault(name, value)
    for name in private.HOOKS_OF_TENSORS:
        hooks = getattr(tensor, name)
        if hooks:
            setattr(fake, name, hooks.copy())


@contextmanager
def stand_ins(
    mode: FakeMode, modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]
) -> Generator[Fakes]:
    """Put fakes in the place of all tensors of modules and optimizers; afterwards all is as it was.

    Everything a module or an optimizer holds is put back, whatever a forward or an update puts there.

    Args:
        mode: what the fakes belong to.
        modules: all modules, children too.
        optimizers: whose parameters and state are replaced.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> weight = model.weight
        >>> with stand_ins(FakeMode(), [model], []):
        ...     type(model.weight).__name__
        'FakeTensor'
        >>> model.weight is weight
        True
    """
    fakes = Fakes(mode)
    held = {id(one): (one, dict(vars(one))) for one in (*modules, *optimizers)}
    try:
        for one, attributes in held.values():
            if isinstance(one, Optimizer):
                one.param_groups = [fakes.settings(group) for group in one.param_groups]
                state = ((fakes.of(p), fakes.settings(slots)) for p, slots in one.state.items())
                one.state = defaultdict(dict, state)
                # Callers count updates there, and this is none.
                vars(one).update({name: OrderedDict() for name in private.STEP_HOOKS})
            else:
                vars(one).update({name: fakes.within(value) for name, value in attributes.items()})
        yield fakes
    finally:
        for one, attributes in held.values():
            vars(one).clear()
            vars(one).update(attributes)


@contextmanager
def undisturbed(
    parameters: Iterable[nn.Parameter],
    modules: Sequence[nn.Module] = (),
    *,
    roots: Iterable[object] = (),
    is_real: bool = False,
) -> Generator[ObjectState]:
    """Random streams, gradients, buffers, warnings and collector as before; nothing is compiled meanwhile.

    Args:
        parameters: whose gradients are put back.
        modules: whose buffers are put back.
        roots: all that can be reached from here is put back too.
        is_real: values may be written to, so those of small tensors that can be reached are put back.
    """
    known = {p for module in modules for p in (*module.parameters(recurse=False), *module.buffers(False))}
    noted = ObjectState(roots, but_for=known if is_real else None)
    buffers = Surroundings([*modules, *(noted.modules if is_real else ())])
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    random, collects = rng.capture_process(), gc.isenabled()
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        if private.is_compiler_loaded():
            stack.enter_context(cast("Any", torch.compiler).set_stance("force_eager"))
        gc.disable()  # what hangs in a cycle stays, as it may in a real step
        torch.clear_autocast_cache()
        try:
            yield noted
        finally:
            torch.clear_autocast_cache()
            buffers.put_buffers_back()
            noted.put_back()
            rng.restore_process(random)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            if collects:
                gc.enable()


@contextmanager
def dense_only(parameters: Iterable[Tensor]) -> Generator[None]:
    """No parameter gets a sparse gradient here, nor does a fake that is made of one here.

    Nobody can foretell its bytes: each micro-batch and, in the state of optimizers, each step adds to them
    as many rows as it has met, and when they are merged depends on which ones these are.

    Args:
        parameters: real ones; fakes take their hooks over.

    Raises:
        PlanError: one does.

    Example:
        >>> layer = nn.Embedding(3, 2, sparse=True)
        >>> with dense_only(layer.parameters()):
        ...     layer(torch.tensor([1])).sum().backward()
        Traceback (most recent call last):
        anybatch.core.errors.PlanError: Expected dense gradients, got sparse ones of shape (3, 2): nobody...
    """
    able = [one for one in parameters if one.requires_grad and not is_lazy(one)]
    hooks = [one.register_post_accumulate_grad_hook(_look_at_layout) for one in able]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _look_at_layout(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise sparse_refused(f"sparse ones of shape {tuple(parameter.shape)}")


def sparse_refused(what: str) -> PlanError:
    """The error that says why no bytes are foreseen of steps with sparse gradients.

    Args:
        what: came.
    """
    return PlanError(
        f"Expected dense gradients, got {what}: nobody can foretell their bytes. Make layers with "
        "sparse=False, or choose micro_batch= yourself, without memory=."
    )


def drop_left_fakes() -> None:
    """Take fakes that outlived their trace out of what holds them.

    The collector must have been off since the trace began, so that they are all young and quickly found.

    Raises:
        TraceError: something holds them that they cannot be taken out of.
    """
    if not _young_fakes(0):
        return
    gc.collect(0)  # those that only hang in cycles
    left = _young_fakes(1)
    gone = {id(fake) for fake in left}
    for holder in gc.get_referrers(*left) if left else ():
        if holder is left or isinstance(holder, FrameType):
            continue
        table = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        if isinstance(holder, list):
            holder[:] = [one for one in cast("list[Any]", holder) if id(one) not in gone]
        elif isinstance(table, dict):
            held = cast("dict[Any, Any]", table)
            for key in [key for key, one in held.items() if id(one) in gone]:
                del held[key]
        else:
            raise TraceError(
                f"Expected a step that keeps nothing, got a tensor that a {type(holder).__name__} keeps. "
                "Let it go after the step, or keep it in a dict, a list or an attribute."
            )


def _young_fakes(generation: int) -> list[Any]:
    return [
        one
        for one in gc.get_objects(generation)
        if issubclass(type(one), private.FakeTensor) and isinstance(one.fake_mode, FakeMode)
    ]
