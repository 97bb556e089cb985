"""Private names of torch, each used once, with the behavior if it is missing.

Only this file imports private modules or functions of torch, or reads private attributes of its objects.
A name without "If missing" has no substitute: torch that lacks it raises its own ImportError or
AttributeError.
"""

import ctypes
import logging
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
)
from torch.jit._script import OrderedDictWrapper as ScriptTable
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.optim import Optimizer
from torch.utils import _python_dispatch as _modes, _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

# Base classes, classes to recognize, and torch's pytree.
__all__ = [
    "BatchNorm",
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "InstanceNorm",
    "ScriptTable",
    "TorchDispatchMode",
    "pytree",
]

# ---- the engine of autograd

_run: Any = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None)
_is_logged = logging.getLogger("torch.autograd.graph").isEnabledFor


def run_backward(
    values: Sequence[Tensor], cotangents: Sequence[Tensor], *, retain_graph: bool = False
) -> None:
    """Add the gradients of values to `.grad` of the leaves: `torch.autograd.backward` without its Python.

    If missing, for subclasses of Tensor, and if torch logs its backward, this is `torch.autograd.backward`:
    the same numbers, some 10 to 20 us slower. Tuples are fastest.
    """
    is_public = not _run or _is_logged(logging.DEBUG)  # the public call logs the name of each node
    for value in () if is_public else values:
        # Subclasses may define their own backward. Compiled code reads, in the thread of a device, the
        # context that the public call leaves there.
        is_public |= type(value) is not Tensor or not (value.is_cpu or _COMPILER not in sys.modules)
    if is_public:
        torch.autograd.backward([*values], [*cotangents], retain_graph=retain_graph)
    else:  # keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
        _run(tuple(values), tuple(cotangents), retain_graph, False, (), True, True)


def is_in_backward() -> bool:
    """Return True if this thread is inside a backward. If missing: always False."""
    return _graph_task() != -1


_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def is_graph_kept() -> bool:
    """Return True if the running backward keeps its graph for another one. If missing: True."""
    return _keeps_graph()


_C: Any = torch._C
_autograd = _C._autograd
_keeps_graph: Callable[[], bool] = getattr(_autograd, "_get_current_graph_task_keep_graph", lambda: True)


def saved(node: Any, name: str) -> Any:
    """Return the value that a graph node saved under a name, such as "reduction". If missing: None."""
    return getattr(node, f"_saved_{name}", None)


def is_packed(node: Any, name: str) -> bool:
    """Return True if saved-tensor hooks, as of a checkpoint, hold a node's saved value.

    If missing, as in torch 2.6: False; the value is then read through the hooks.
    """
    return getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None


# ---- the profiler

_profiler = _C._profiler
_PROFILER = sys.modules["torch.autograd.profiler"]


def is_profiling() -> bool:
    """Return True if a profiler is open, also one that only warms up. If missing: False.

    Using torch's profiler while one of the caller's warms up ends the process in torch 2.13.
    """
    return has_caller_profiler() or _is_enabled()


def has_caller_profiler() -> bool:
    """Return True if the caller has opened a profiler. If missing: False."""
    table = getattr(getattr(_PROFILER, "KinetoStepTracker", None), "_step_dict", {})
    return getattr(_PROFILER, "_is_profiler_enabled", False) or "ProfilerStep" in table


_is_enabled: Callable[[], bool] = getattr(_autograd, "_profiler_enabled", lambda: False)


def start_memory_events() -> Callable[[], list[int] | None]:
    """Record the CPU allocations of this thread; call `is_profiling` first.

    Returns a function that stops it and returns the bytes allocated (negative: freed) in order, or None if a
    profiler of the caller took over. Frees of memory from before the start are left out.
    """
    activities, scopes = {_profiler.ProfilerActivity.CPU}, {_profiler.RecordScope.STATIC_RUNTIME_MODEL}
    flags = False, True, False, False, False  # only profile_memory; no training enters the scope
    kind = _profiler.ProfilerState.KINETO
    config = _profiler.ProfilerConfig(kind, *flags, _profiler._ExperimentalConfig())
    _autograd._prepare_profiler(config, activities)
    _autograd._enable_profiler(config, activities, scopes)
    log = _log_level()
    level = log.value
    log.value = max(level, _ERRORS)  # or torch warns of every thousandth release of older memory

    def stop() -> list[int] | None:
        log.value = level
        if has_caller_profiler() or not _is_enabled():
            return None
        events = _autograd._disable_profiler().events()
        timed = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
        return [size for _, size in sorted(timed, key=itemgetter(0))]

    return stop


_ERRORS = 2


def _log_level() -> ctypes.c_int:
    """Return the log level of torch's C++ code. If missing: a number without effect."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return ctypes.c_int(_ERRORS)


# ---- dispatch modes and the compiler

_COMPILER = "torch._dynamo"


def is_compiler_loaded() -> bool:
    """Return True if torch has loaded its compiler, as on first use. If renamed: False."""
    return _COMPILER in sys.modules


not_compiled: Any = torch._disable_dynamo
"""Exclude a function from compilation, without an import of the compiler."""


disable_current_modes: Callable[[], AbstractContextManager[object]] = getattr(
    _modes, "_disable_current_modes", nullcontext
)
"""Context: disable all dispatch modes.

If missing: modes see all operations. A meter then counts too much, and tracing a step fails.
"""


dispatch_modes: Callable[[], list[Any]] = getattr(_modes, "_get_current_dispatch_mode_stack", list)
"""Return the dispatch modes that see operations. If missing: none."""


_UNUSED: Any = _C.DispatchKey.AutocastIPU  # torch has no kernels for it, and no tensor has it


@contextmanager
def kernels_before_autocast(kernels: Mapping[str, Callable[..., Any]]) -> Generator[None]:
    """Call `kernel(operator, *args, **kwargs)` before the autocast of operators of ATen, in this thread.

    Kernels are registered for a key that only this thread includes: no other thread calls them. Within a
    kernel there are none.
    """

    def run(kernel: Callable[..., Any], operator: Any, *args: Any, **kwargs: Any) -> Any:
        with _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_UNUSED)):
            return kernel(operator, *args, **kwargs)

    library = torch.library._scoped_library
    with library("_", "IMPL") as others, library("aten", "IMPL") as named:
        others.fallback(torch.library.fallthrough_kernel, _UNUSED.name)
        for name, kernel in kernels.items():
            operator = attrgetter(name if "." in name else f"{name}.default")(torch.ops.aten)
            named.impl(operator, partial(run, kernel, operator), _UNUSED.name)
        with _C._IncludeDispatchKeyGuard(_UNUSED), _C._SetExcludeDispatchKeyGuard(_UNUSED, False):
            yield


def operator_of(overload: Any) -> Any:
    """Return the operator of an overload: `aten.add` for `aten.add.Tensor`."""
    return overload._overloadpacket


def arguments_of(overload: Any) -> Sequence[Any]:
    """Return the arguments in an overload's schema, with `name` and `alias_info`."""
    return overload._schema.arguments


@cache
def memory_of(overload: Any) -> tuple[tuple[tuple[int, str], ...], bool]:
    """Return the arguments that an overload writes to (place, name), and True if it returns one's memory."""
    schema = overload._schema
    named = [(at, one) for at, one in enumerate(schema.arguments) if one.alias_info is not None]
    written = tuple([(at, one.name) for at, one in named if one.alias_info.is_write])
    return written, any(one.alias_info is not None for one in schema.returns)


# ---- tensors


def version(tensor: Tensor) -> int:
    """Return the count of in-place writes except by `.data`; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return `version` of each tensor, in one C loop if none is an inference tensor."""
    found = [*tensors]
    try:
        return [*map(_read_version, found)]
    except RuntimeError:
        return [*map(version, found)]


_read_version: Callable[[Tensor], int] = attrgetter("_version")


def storage_key(tensor: Tensor) -> int:
    """Return a key that is unique among live storages."""
    return tensor.untyped_storage()._cdata


#: Returns the number of nodes that autograd has made in this thread, one per operation that it records.
operations: Callable[[], int] = torch.autograd._get_sequence_nr


def holders(tensor: Tensor) -> int:
    """Return the reference count of a tensor's storage; above `ALONE` if it is shared, or if missing."""
    return _count_holders(tensor.untyped_storage()._cdata)


_count_holders: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda storage: 1)
ALONE = holders(torch.empty(1)) if hasattr(torch._C, "_storage_Use_Count") else 0


HOOKS_OF_TENSORS = "_backward_hooks", "_post_accumulate_grad_hooks"


def hooks_of_tensor(tensor: Tensor) -> list[Mapping[int, Any]]:
    """Return hooks on a tensor's gradient, and hooks after its accumulation."""
    return [getattr(tensor, name) or {} for name in HOOKS_OF_TENSORS]


_accumulated = attrgetter("_post_accumulate_grad_hooks")


def hooks_after_accumulation(tensors: Sequence[Tensor]) -> list[Callable[..., Any]]:
    """Return hooks and optimizers that run after a gradient is accumulated."""
    if not any(map(_accumulated, tensors)) and "_in_backward_optimizers" not in chain(*map(vars, tensors)):
        return []
    found = [hook for tensor in tensors for hook in hooks_of_tensor(tensor)[1].values()]
    return [*found, *[one for t in tensors for one in getattr(t, "_in_backward_optimizers", ())]]


# ---- many tensors at once


foreach_add_: Callable[..., None] = torch._foreach_add_
"""`foreach_add_(totals, values, alpha=1.0)`: add alpha * value to each total."""

foreach_mul_: Callable[..., None] = torch._foreach_mul_
"""`foreach_mul_(values, factor)`: multiply each value by one number.

On the CPU torch rounds the factor to the dtype of the values first, which changes results in bfloat16;
`Tensor.mul_` does not. Powers of two are exact.
"""

foreach_norm: Callable[..., tuple[Tensor, ...]] = torch._foreach_norm
"""The 2-norm of each tensor; all are of one dtype and device."""

foreach_copy_: Callable[..., None] = torch._foreach_copy_
"""`foreach_copy_(targets, values)`: write each value into its target."""

check_finite_: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_
"""`check_finite_(tensors, found, one)`: set `found` to 1 if a number is not finite.

All must be on one device and of one dtype; `found` and `one` are float32 of shape (1,). The tensors are
multiplied by `one`, which holds 1.
"""

attention_unfused: Callable[..., tuple[Tensor, Tensor]] = torch._scaled_dot_product_attention_math
"""`scaled_dot_product_attention` by products and a softmax, on every device; returns outputs and scores."""

# ---- modules and optimizers

HOOKS_OF_MODULES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
STEP_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
LOAD_HOOKS = "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"
CALL_CODE: CodeType = nn.Module._call_impl.__code__
"""The code object that calls a module's forward, for comparison with frames."""


def step_without_hooks(optimizer: Optimizer) -> None:
    """Step an optimizer without its hooks, and without what a scheduler has put around `step`."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's table of buffers, which may be written to."""
    return module._buffers


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's table of parameters, which may be written to."""
    return module._parameters


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's table of submodules, which may be written to."""
    return module._modules


def hooks_of_module(module: nn.Module) -> list[dict[int, Any]]:
    """Return a module's tables of forward hooks, in the order of `HOOKS_OF_MODULES`."""
    return [vars(module)[name] for name in HOOKS_OF_MODULES]


COMPILED_CALL = "_compiled_call_impl"
"""The attribute in which `module.compile()` stores the compiled call."""


def compiled_call_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the compiled call that `module.compile()` stored, or None. If missing: None."""
    return getattr(module, COMPILED_CALL, None)


def compiled_from(module: nn.Module) -> nn.Module | None:
    """Return the module that `torch.compile(module)` has wrapped, or None. If missing: None."""
    return getattr(module, "_orig_mod", None)


def is_static(module: nn.Module) -> bool:
    """Return True if a module is compiled without `dynamic=True`. If torch does not tell: True."""
    if compiled_from(module) is not None:
        held = [getattr(module, "dynamo_ctx", None)]
    elif (call := compiled_call_of(module)) is not None:
        held = [cell.cell_contents for cell in getattr(call, "__closure__", None) or ()]
    else:
        return False
    return not any(getattr(one, "_dynamic", None) for one in held)


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer without compiled wrappers."""
    return name.replace("_orig_mod.", "")


def hooks_of_optimizer(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return hooks on the step of one optimizer, and on those of all. If missing: none."""
    places = [(optimizer, name) for name in STEP_HOOKS]
    places += [(sys.modules[Optimizer.__module__], name) for name in _GLOBAL_HOOKS]
    return [hook for place, name in places for hook in getattr(place, name, {}).values()]


_GLOBAL_HOOKS = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"


def default_generators(device_module: Any) -> Sequence[torch.Generator]:
    """Return the default generators of a module such as `torch.xpu`; MPS has one. If missing: none."""
    found = getattr(device_module, "default_generators", None)
    mps = getattr(device_module, "_get_default_mps_generator", None)
    return found or (() if mps is None else (mps(),))


def default_store(c10d: Any) -> Any:
    """Return the store of the default process group in `torch.distributed`'s c10d. If missing: None."""
    return getattr(c10d, "_get_default_store", lambda: None)()


def has_backward_hooks(module: nn.Module) -> bool:
    """Return True if a module calls hooks in backward. If missing: False."""
    return any(getattr(module, name, None) for name in ("_backward_hooks", "_backward_pre_hooks"))


def told_to_wrapper(model: nn.Module) -> str:
    """Return the name of an unsupported DistributedDataParallel setting, or "". If missing: ""."""
    of_hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    attributes = {
        "ignored parameters or buffers": ["parameters_to_ignore"],
        "a buffer hook": ["buffer_hook"],
        "mixed_precision": ["mixed_precision"],
        "hooks of its own": of_hooks,
    }
    return next(
        (told for told, names in attributes.items() if any(getattr(model, name, None) for name in names)), ""
    )


def communication_hooks(model: nn.Module) -> list[str]:
    """Return the names of a DistributedDataParallel's communication hooks. If missing: none."""
    return [getattr(hook, "__qualname__", str(hook)) for hook, _ in getattr(model, "_comm_hooks", [])]


# ---- FSDP2


def local(value: Any) -> Tensor:
    """Return the part of a tensor on this rank, outside of the graph; a plain tensor as it is."""
    return getattr(value, "_local_tensor", value)


def groups_of_shards(model: nn.Module) -> list[Any]:
    """Return the parameter groups of all modules that `fully_shard` was applied to."""
    modules: list[Any] = [one for one in model.modules() if hasattr(one, "_get_fsdp_state")]
    states: list[Any] = [one._get_fsdp_state() for one in modules]
    return [*dict.fromkeys(group for state in states for group in state._fsdp_param_groups)]


def reset_shards(model: Any) -> None:
    """Drop what a forward or backward that failed has left in a sharded model, its gradients too."""
    model.reset_iter_state()
    for group in groups_of_shards(model):
        group._partial_reduce_output = None
        for one in group.fsdp_params:  # torch 2.13 leaves these, and the next backward would add them
            one.unsharded_accumulated_grad = None
            if (whole := getattr(one, "_unsharded_param", None)) is not None:
                whole.grad = None


def dtypes_of_shards(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes in which FSDP adds up gradients that it has not reduced yet."""
    found: set[torch.dtype] = set()
    for group in groups_of_shards(model):
        policy = group.mp_policy
        found |= {
            policy.reduce_dtype or policy.param_dtype or p.sharded_param.dtype for p in group.fsdp_params
        }
    return found


def connections_of_shards(model: nn.Module) -> tuple[Any, Any]:
    """Return FSDP's group, and the group of ranks with the same shard; None for one rank.

    An equal mesh may have other groups.
    """
    info = groups_of_shards(model)[0].mesh_info
    return info.shard_process_group, getattr(info, "replicate_process_group", None)


def sharding_of(model: nn.Module) -> list[Any]:
    """Return what the order and sizes of FSDP's collectives depend on, for each group of parameters."""
    return [
        (
            [tuple(p._orig_size) for p in group.fsdp_params],
            str(group.mp_policy),
            getattr(group.post_forward_mesh_info, "shard_mesh_size", 1),  # ranks of the gather in backward
        )
        for group in groups_of_shards(model)
    ]


def keeps_weights(groups: Iterable[Any]) -> bool:
    """Return True if one of these parameter groups keeps gathered weights after backward."""
    return not all(group.reshard_after_backward for group in groups)
