"""The meter: every tensor byte of a step, found by following storages from first sight to end."""

import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.flop_counter import flop_registry

from anybatch.core import is_moving, tensors_in, torch_private as private
from anybatch.memory.ledger import Ledger
from anybatch.memory.recording import (
    GRADIENTS,
    INPUT,
    OTHER,
    PARAMETERS,
    STATE,
    WORKSPACE,
    Mark,
    Recording,
    find_owner,
)

_NAME = "anybatch.memory.meter"  # key of the module's name in the metadata of a node of the graph
_AFTER = "after backward"  # a phase not known yet: the next micro-batch or the update may follow
_GRANULE = 512  # bytes; caching allocators of accelerators round sizes up to multiples of it


class Meter(private.TorchDispatchMode):
    """A mode that follows the storages of all tensors that operations take or return, around one step.

    A view adds nothing: it shares its storage. A storage ends when its last tensor (or saved tensor) is gone.
    Memory inside one kernel is not seen. Phases and modules come from hooks, which `__exit__` removes.

    `held` are other tensors alive from the start, `state` those counted as optimizer state from the start,
    `cublas` the workspaces that cuBLAS keeps. `flops` are those of products, convolutions and attention.
    `as_accelerator` counts as on an accelerator, wherever the tensors are: in multiples of 512 bytes, without
    the host copies that offload makes. Tensors on another kind of device than the parameters never count.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *,
        loss_module: nn.Module | None = None,
        batch_leaves: Iterable[Tensor] = (),
        held: Iterable[Tensor] = (),
        state: Iterable[Tensor] = (),
        cublas: Iterable[Tensor] = (),
        as_accelerator: bool = False,
    ) -> None:
        super().__init__()
        loss_module = loss_module or nn.Identity()
        self._optimizers = optimizers
        groups = [group for one in optimizers for group in one.param_groups]
        self._parameters: dict[Tensor, str] = {p: "" for group in groups for p in group["params"]}
        for name, parameter in (*loss_module.named_parameters(), *model.named_parameters()):
            self._parameters[parameter] = name.rpartition(".")[0]
        kinds = {parameter.device.type for parameter in self._parameters}
        self._storages = seen = _Storages(kinds, as_accelerator=as_accelerator)
        for parameter, place in self._parameters.items():
            seen.own(parameter, PARAMETERS, place)
        for name, buffer in (*loss_module.named_buffers(), *model.named_buffers()):
            seen.own(buffer, OTHER, name.rpartition(".")[0])
        self._own_what_is_held()
        for owner, tensors in ((INPUT, batch_leaves), (OTHER, held), (STATE, state), (WORKSPACE, cublas)):
            for tensor in tensors:
                seen.own(tensor, owner, "cuBLAS" if owner == WORKSPACE else "")
        self.held = seen.live
        of_loss = {*map(id, loss_module.modules())}
        named = (*loss_module.named_modules(), *model.named_modules())
        # By module: its name, and True for one of the loss.
        self._names = {id(module): (name, id(module) in of_loss) for name, module in named}
        self._stack: list[tuple[str, str]] = []  # phase and module before each module at work
        self._phase, self.module, self._micro_batch = "start", "", -1  # the module is that at work, by name
        self._begun = self._ended = 0  # backward passes
        # So far; floating-point operations are those of products, convolutions and attention.
        self.operations = self.flops = self.moved = 0
        self._hooks = ExitStack()

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return self._storages.live

    @property
    def peak(self) -> int:
        """The most bytes alive at once so far."""
        return self._storages.peak

    @property
    def recording(self) -> Recording:
        """The events seen so far."""
        seen = self._storages  # what follows the last backward is the update
        marks = [one._replace(phase="update") if one.phase == _AFTER else one for one in seen.marks]
        owners = list[int]()
        for one, birth in enumerate(seen.births):
            end = seen.ends.get(one, -1)
            found = find_owner(marks[birth], marks[end], has_ended=end >= 0)
            owners.append(seen.owners.get(one, found))
        return Recording(
            storages=seen.numbers[:],
            changes=seen.changes[:],
            marks=tuple(marks),
            owners=tuple(owners),
            places=tuple(
                [seen.places.get(one, marks[birth].module) for one, birth in enumerate(seen.births)]
            ),
            work=marks[-1][4:7],
        )

    def ledger(self) -> Ledger:
        """Return the bytes seen so far as a table."""
        device = next((str(one.device) for one in self._parameters), "cpu")
        return self.recording.ledger(source="measured", device=device)

    def __enter__(self) -> "Meter":
        for handle in (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            *[one.register_step_pre_hook(self._begin_update) for one in self._optimizers],
            *[one.register_step_post_hook(self._own_what_is_held) for one in self._optimizers],
        ):
            self._hooks.callback(handle.remove)
        return cast("Meter", super().__enter__())

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()
        self._storages.is_open = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is _DEVICE:  # no operation: autograd asks every fake tensor for its device
            return getattr(args[0], "fake_device", None) or func(*args, **kwargs)
        self._look()
        result = func(*args, **kwargs)
        self.operations += 1
        count = _COUNTS.get(private.operator_of(func))
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=result))
        see = self._storages.see
        for leaf in tensors_in((args, kwargs, result)):
            see(leaf)
            self.moved += leaf.numel() * leaf.element_size()
        return result

    def _own_what_is_held(self, *_: object) -> None:
        for parameter, place in self._parameters.items():
            if parameter.grad is not None:
                self._storages.own(parameter.grad, GRADIENTS, place)
        for one in self._optimizers:
            for parameter, slots in one.state.items():
                for tensor in tensors_in(slots):
                    self._storages.own(tensor, STATE, self._parameters.get(parameter, ""))

    def _look(self) -> None:
        if self._stack or private.is_in_backward() is self._is_in_backward:
            return
        if self._is_in_backward:
            self._ended += 1
            self._turn(_AFTER, "")
        else:
            self._begun += 1
            self._turn("backward", "")

    @property
    def _is_in_backward(self) -> bool:
        return self._begun > self._ended

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        known = self._names.get(id(module))
        if known is None:
            return
        phase = self._phase if self._stack else self._begin(known, args)
        self._stack.append((self._phase, self.module))
        self._turn(phase, known[0])

    def _leave_module(self, module: nn.Module, args: object, outputs: Any) -> None:
        known = self._names.get(id(module))
        if known is None or not self._stack:
            return
        name = known[0]
        is_rebuilt = self._phase == "recompute"
        phase, module_before = self._stack.pop()
        for output in tensors_in(outputs):
            node: Any = output.grad_fn
            # An output made by a submodule belongs to the submodule.
            if node is not None and not is_rebuilt and node.metadata.setdefault(_NAME, name) is name:
                node.register_prehook(partial(self._enter_backward_of, name))
        self._turn(phase if self._stack or is_rebuilt else "loss", module_before)

    def _begin_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._look()
        self._own_what_is_held()
        self._turn("update", "")

    def _begin(self, known: tuple[str, bool], args: tuple[Any, ...]) -> str:
        """Return the phase of a module that begins."""
        self._look()
        if self._is_in_backward:
            return "recompute"
        if known[1]:
            return "loss"
        is_model = not known[0]
        if is_model or self._phase not in ("forward", "loss"):
            self._micro_batch += 1
        self._own_what_is_held()
        for leaf in tensors_in(args if is_model else ()):
            if leaf.grad_fn is None:
                self._storages.own(leaf, INPUT)
        return "forward"

    def _enter_backward_of(self, name: str, gradients: object) -> None:
        if self._storages.is_open and not self._stack:
            self._look()
            self._turn("backward", name)

    def _turn(self, phase: str, module: str) -> None:
        self._phase, self.module = phase, module
        event, last = len(self._storages.numbers), self._storages.marks[-1]
        if last.phase == _AFTER:
            self._storages.marks[-1] = last._replace(phase="update" if phase == "update" else "backward")
        if event == last.event and self.operations == last.operations and event:
            self._storages.marks.pop()  # an empty stretch
        done = self.operations, self.flops, self.moved, self._begun, self._ended
        self._storages.marks.append(Mark(event, phase, self._micro_batch, module, *done))


class _Storages:
    def __init__(self, kinds: Collection[str], *, as_accelerator: bool) -> None:
        self._kinds, self._granule = kinds, _GRANULE if as_accelerator else 1
        self.marks = [Mark(0, "start", -1, "")]
        self.live = self.peak = 0
        self.numbers, self.changes = array("q"), array("q")  # by event
        self.births: list[int] = []  # by storage: the last mark before it began
        self.ends: dict[int, int] = {}  # by storage: the last mark before it ended
        self.owners: dict[int, int] = {}  # by storage: its owner, if known
        self.places: dict[int, str] = {}
        self.is_open = True
        self._followed: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # itself, number, bytes

    def see(self, tensor: Tensor) -> int:
        """Follow the storage of a tensor; return its number, -1 if it does not count."""
        if tensor.layout is not torch.strided:
            return -1  # a trace refuses sparse gradients
        storage = tensor.untyped_storage()
        key, size = id(storage), -(-storage.nbytes() // self._granule) * self._granule
        if key not in self._followed:
            is_other = self._kinds and tensor.device.type not in self._kinds
            is_counted = not (is_other or (self._granule > 1 and is_moving()))
            number = len(self.births) if is_counted else -1
            # The callback runs when the storage itself ends, not a Python handle to it, so its id is unique.
            self._followed[key] = weakref.ref(storage, partial(self._end, key)), number, 0
            if is_counted:
                self.births.append(len(self.marks) - 1)
        reference, number, known = self._followed[key]
        if known != size and number >= 0:
            self._followed[key] = reference, number, size
            self._note(number, size - known)
        return number

    def own(self, tensor: Tensor, owner: int, place: str = "") -> None:
        number = self.see(tensor)
        if number >= 0:
            self.owners.setdefault(number, owner)
            if place:
                self.places.setdefault(number, place)

    def _end(self, key: int, _: object) -> None:
        _, number, size = self._followed.pop(key)
        if self.is_open and number >= 0:
            self.ends[number] = len(self.marks) - 1
            self._note(number, -size)

    def _note(self, number: int, change: int) -> None:
        self.numbers.append(number)
        self.changes.append(change)
        self.live += change
        if self.live > self.peak:
            self.peak = self.live


_ATEN, _DEVICE = torch.ops.aten, torch.ops.prim.device.default
_FUSED = "_scaled_dot_product_flash_attention"
# torch's own table lacks the CPU's attention.
_COUNTS: dict[Any, Callable[..., int]] = flop_registry | {
    getattr(_ATEN, f"{_FUSED}_for_cpu{end}"): flop_registry[getattr(_ATEN, _FUSED + end)]
    for end in ("", "_backward")
}
