"""Fake tensors in place of a model's and an optimizer's own while a step is traced."""

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

from anybatch.core import PlanError, TraceError, torch_private as private
from anybatch.state import ObjectState, rng

_ATEN: Any = torch.ops.aten
_SUMS = (_ATEN.sum.default, _ATEN.sum.dim_IntList, _ATEN.count_nonzero.default)
_ADDS = (_ATEN.add.Tensor, _ATEN.add_.Tensor)
_CHECK_FINITE = _ATEN._amp_foreach_non_finite_check_and_unscale_.default
_COUNT = "anybatch_count"  # attribute of a fake: the number of elements that it counts, and its version then


def set_count(func: Any, args: Sequence[Any], result: object) -> None:
    """Note on a scalar the number of elements that it counts, if its operands tell."""
    if func is _CHECK_FINITE and not args[1].is_inference():
        setattr(args[1], _COUNT, (0, private.version(args[1])))  # the flag for "not finite"; no new version
    if not (args and isinstance(args[0], Tensor) and isinstance(result, Tensor)):
        return
    if result.dim() or result.dtype is torch.bool or result.is_inference():
        return
    count, more = count_of(args[0]), count_of(args[1]) if func in _ADDS else None
    if func in _SUMS:
        count = args[0].numel()  # each element counts as 1: a weight of 0 would leave no gradient
    elif more is not None:
        count = (1 if count is None else count) + more
    if count:
        # An in-place operation raises the version afterwards.
        setattr(result, _COUNT, (count, private.version(result) + (result is args[0])))


def count_of(tensor: Any) -> int | None:
    """Return the count noted on a tensor; None if there is none or it was written to since."""
    count, version = getattr(tensor, _COUNT, (None, 0))
    return count if isinstance(tensor, Tensor) and private.version(tensor) == version else None


class FakeMode(private.FakeTensorMode):
    """The mode in which operations run on tensors without memory.

    Values are not computed. The sum of many numbers is taken to be their count, as if each were 1, so that
    counts of rows and of valid tokens add up; a number computed from a count is that count. Any other float
    is 1. A bool, and an int that is no count, is refused in the caller's code: shapes or branches may depend
    on it.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.statistics: set[int] = set()  # ids of tensors that BatchNorm's kernels write to unversioned
        self.where: Callable[[], str] = str  # returns the name of the module at work
        self.culprit = ""  # the operation that failed first, and its module

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is _DEVICE:  # asked more often than anything is computed
            return args[0].fake_device
        try:
            result: Any = _DISPATCH(self, func, types, args, kwargs)
        except Exception as error:
            if isinstance(error, private.DataDependentOutputException):
                if func is _ATEN._local_scalar_dense.default:
                    return self._number(args[0])
                if func in (_ATEN.equal.default, _ATEN.allclose.default) and _find_caller()[1]:
                    return True
            self.culprit = self.culprit or f"{func} in {self.where() or 'the model'}"
            raise
        if func in _DRAGGING and not result.dim():
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            result.untyped_storage().resize_(shape.numel() * result.itemsize)
        if func in _NORMS and args[5]:  # in training
            self.statistics |= {*map(id, args[3:5])}
        if func is _RNN:
            return (*result[:3], result[3].new_empty(_rnn_workspace(args)))
        set_count(func, args, result)
        return result

    @contextmanager
    def explained(self) -> Generator[None]:
        """Turn errors, except PlanError, into a TraceError that names the operation; silence torch's log."""

        def is_no_error(record: logging.LogRecord) -> bool:  # one per trace: threads may trace at once
            return record.levelno < logging.ERROR

        _LOG.addFilter(is_no_error)
        try:
            yield
        except PlanError:
            raise
        except Exception as error:
            raise TraceError(
                f"Expected a step that can be traced, got {type(error).__name__} from "
                f"{self.culprit or 'it'}: {str(error).partition(chr(10))[0][:80]}. Shapes and values taken "
                f"from tensors, and code that is not Python, cannot be traced. {_INSTEAD}"
            ) from error
        finally:
            _LOG.removeFilter(is_no_error)

    def _number(self, scalar: Tensor) -> float:
        count = count_of(scalar)
        number = 1 if count is None else count
        if scalar.is_floating_point():
            return float(number)
        module, is_ours = _find_caller()
        if scalar.dtype is torch.bool:
            # torch's own modules compare masks, as TransformerEncoder does with the causal one.
            if is_ours or (module is not None and type(module).__module__.startswith("torch.")):
                return bool(number)
        elif module is None and (is_ours or count is not None):
            return int(number)
        place = "a loss" if module is None else f"{self.where() or 'the model'} ({type(module).__name__})"
        kind = "a bool" if scalar.dtype is torch.bool else "an int"
        raise TraceError(
            f"Expected shapes that are known before it runs, got {kind} asked of a tensor in {place}; "
            f"its shapes depend on values. {_INSTEAD}"
        )


_INSTEAD = "Choose micro_batch= yourself, without memory=."
_LOG = logging.getLogger(private.FakeTensorMode.__module__)
_DEVICE: Any = torch.ops.prim.device.default
# Our method is hidden from torch.compile; torch's wrapper that hides theirs costs 5 % of a trace.
_DISPATCH: Any = inspect.unwrap(private.FakeTensorMode.__torch_dispatch__)
# Their reduced scalar lies in a storage of the size of the input.
_DRAGGING = (
    _ATEN.mse_loss.default,
    _ATEN.smooth_l1_loss.default,
    _ATEN.soft_margin_loss.default,
    _ATEN.binary_cross_entropy.default,
)
_NORMS = (_ATEN.native_batch_norm.default, _ATEN.cudnn_batch_norm.default, _ATEN.miopen_batch_norm.default)
_RNN: Any = getattr(_ATEN.mkldnn_rnn_layer, "default", None)


def _find_caller() -> tuple[nn.Module | None, bool]:
    """Return the module at work, and True if code of anybatch asks for the number."""
    frame, caller = sys._getframe(1), ""  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code is private.CALL_CODE:
            return frame.f_locals["self"], caller.startswith("anybatch.")
        name = str(frame.f_globals.get("__name__"))
        if not caller and frame.f_globals is not globals() and not name.startswith("torch."):
            caller = name
        frame = frame.f_back
    return None, caller.startswith("anybatch.")


def _rnn_workspace(args: Sequence[Any]) -> int:
    """Return the bytes that the CPU's recurrent layer keeps for backward; only the kernel can tell."""
    with private.disable_current_modes(), torch.enable_grad():  # without, nothing is kept
        real = [torch.zeros(one.shape, dtype=one.dtype) if isinstance(one, Tensor) else one for one in args]
        return _RNN(*real)[3].nbytes


class Fakes:
    """The fakes made in one mode, one per tensor."""

    def __init__(self, mode: FakeMode) -> None:
        self._mode = mode
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # the tensor too, so that its id stays its own

    def of(self, tensor: Tensor) -> Tensor:
        """Return the fake of a tensor: same shape, strides and shared memory, hooks and attributes."""
        if is_lazy(tensor):
            return tensor
        if id(tensor) not in self._made:
            if tensor.device.type == "meta":
                # Nothing is trained on meta: a meta tensor stands for one that will be on the device.
                with self._mode:
                    fake = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                    )
                is_parameter = isinstance(tensor, nn.Parameter)
                fake = nn.Parameter(fake, requires_grad=False) if is_parameter else fake
                fake.requires_grad_(tensor.requires_grad)
            else:
                fake = self._mode.from_tensor(tensor, static_shapes=True)
            if tensor.is_leaf:
                for name, value in vars(tensor).items():  # attributes set by the caller
                    vars(fake).setdefault(name, value)
                for name in private.HOOKS_OF_TENSORS:
                    if hooks := getattr(tensor, name):
                        setattr(fake, name, hooks.copy())
            self._made[id(tensor)] = tensor, fake
        return self._made[id(tensor)][1]

    def settings(self, value: Any) -> Any:
        """Return `within` of a dict, but keep the values of scalars: updates divide by them."""
        fresh = self.within(value)
        for key, one in value.items():
            if isinstance(one, Tensor) and not one.dim() and one.device.type != "meta":
                number = one.item()
                with self._mode:
                    fresh[key] = torch.tensor(number, dtype=one.dtype, device=one.device)
        return fresh

    def within(self, value: Any, depth: int = 4) -> Any:
        """Return a copy with fakes in place of tensors, through Python's own containers and dataclasses."""
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
            fresh = copy(value)
            for field in fields(value):
                object.__setattr__(fresh, field.name, self.within(getattr(value, field.name), depth - 1))
            return fresh
        return value


@contextmanager
def replaced_by_fakes(
    mode: FakeMode, modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]
) -> Generator[Fakes]:
    """Replace all tensors of modules and optimizers by fakes; on exit restore what they held before."""
    fakes = Fakes(mode)
    held = {id(one): (one, dict(vars(one))) for one in (*modules, *optimizers)}
    try:
        for one, attributes in held.values():
            if isinstance(one, Optimizer):
                one.param_groups = [fakes.settings(group) for group in one.param_groups]
                state = ((fakes.of(p), fakes.settings(slots)) for p, slots in one.state.items())
                one.state = defaultdict(dict, state)
                # Step hooks count updates; this is none.
                vars(one).update({name: OrderedDict() for name in private.STEP_HOOKS})
            else:
                vars(one).update({name: fakes.within(value) for name, value in attributes.items()})
        yield fakes
    finally:
        for one, attributes in held.values():
            vars(one).clear()
            vars(one).update(attributes)


@contextmanager
def undisturbed(parameters: Iterable[nn.Parameter], roots: Iterable[object]) -> Generator[ObjectState]:
    """Restore random streams, warnings, the collector and all objects of `roots` on exit.

    A PlanError is raised inside if a parameter gets a sparse gradient, whose bytes cannot be predicted.
    """
    snapshot = ObjectState(roots)
    collects = gc.isenabled()
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.enter_context(rng.preserved())
        if private.is_compiler_loaded():
            stack.enter_context(cast("Any", torch.compiler).set_stance("force_eager"))
        for one in parameters:
            if one.requires_grad and not is_lazy(one):
                stack.callback(one.register_post_accumulate_grad_hook(_refuse_sparse).remove)
        gc.disable()  # objects in cycles stay alive, as they may in a real step
        torch.clear_autocast_cache()
        try:
            yield snapshot
        finally:
            torch.clear_autocast_cache()
            snapshot.put_back()
            if collects:
                gc.enable()


def _refuse_sparse(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise sparse_refused(f"sparse ones of shape {tuple(parameter.shape)}")


def sparse_refused(what: str) -> PlanError:
    """Return the error for steps with sparse gradients, whose bytes cannot be predicted."""
    return PlanError(
        f"Expected dense gradients, got {what}: nobody can foretell their bytes. Make layers with "
        "sparse=False, or choose micro_batch= yourself, without memory=."
    )


def drop_left_fakes() -> None:
    """Remove fakes that outlived their trace from their holders; they are young if the collector was off."""
    if not _young_fakes(0):
        return
    gc.collect(0)  # frees those in cycles
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
