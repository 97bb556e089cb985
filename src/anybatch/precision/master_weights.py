"""Master weights: a float32 copy of each 16-bit weight, which the optimizer updates."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from anybatch.core import SHORT_DTYPES, torch_private as private


class _Backup:
    """The float32 weights of one parameter, shared by all steps, and its version when last seen."""

    def __init__(self, parameter: nn.Parameter, weights: Tensor) -> None:
        self.weights = weights
        self.note(parameter)

    def note(self, parameter: nn.Parameter) -> None:
        self.dtype, self.version = parameter.dtype, _version(parameter)

    def refresh(self, parameter: nn.Parameter) -> None:
        """Adopt values written to the parameter, or its new device."""
        data = parameter.data
        if self.weights.device != data.device or self.weights.shape != data.shape:
            self.weights = data.float()
            self.note(parameter)
        elif self.version != _version(parameter):
            # Unwritten elements keep their digits, also if the model was only converted to float32.
            full, stored = self.weights, self.weights.to(self.dtype)
            is_kept = (data == full.to(data.dtype)) | (data == stored.to(data.dtype))
            if not is_kept.all():
                full.copy_(torch.where(is_kept, full, data.float()))
            self.version = _version(parameter)


#: Backups by parameter, alive as long as a step has them.
_KNOWN = WeakIdKeyDictionary()


class Masters:
    """The float32 master weights of parameters stored in 16 bits.

    During an update each parameter holds its float32 weights, so any optimizer updates them, with state in
    float32. Afterwards the parameter holds the 16-bit weights again, rounded from them. If `is_needed`,
    trained parameters added later get master weights, too.
    """

    def __init__(self, *, is_needed: bool = False) -> None:
        self._is_needed = is_needed
        self._held: dict[nn.Parameter, _Backup] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:  # called on a copy
        vars(self).update(state)
        for parameter, backup in self._held.items():
            _KNOWN[parameter] = ref(backup)

    @property
    def tensors(self) -> list[Tensor]:
        """The master weights, in the order of their parameters."""
        return [backup.weights for backup in self._held.values()]

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the current master weight of a parameter; None if it has none."""
        backup = self._held.get(parameter)
        if backup is None:
            return None
        backup.refresh(parameter)
        return backup.weights

    def hold(self, parameter: nn.Parameter, weights: Tensor) -> None:
        """Use this tensor (not copied) as the parameter's master weight."""
        self._hold(parameter, _Backup(parameter, weights))

    def shorten(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Store a parameter in 16 bits, and keep its master weight: another step's, or its own values."""
        backup = _known(parameter)
        if backup is None:
            full = parameter.data
            backup = _Backup(parameter, full.float() if full.dtype in SHORT_DTYPES else full)
        if parameter.dtype != dtype:
            parameter.data = backup.weights.to(dtype)
            backup.note(parameter)
        self._hold(parameter, backup)

    def raised(
        self, parameters: Iterable[nn.Parameter], optimizers: Iterable[Optimizer] = ()
    ) -> AbstractContextManager[None]:
        """Make parameters, also new ones, hold their float32 weights; on exit round them to 16 bits."""
        is_idle = not (self._held or self._is_needed)
        return nullcontext() if is_idle else self._raised(list(parameters), optimizers)

    @contextmanager
    def _raised(self, parameters: list[nn.Parameter], optimizers: Iterable[Optimizer]) -> Generator[None]:
        later = [
            parameter
            for parameter in parameters
            if parameter not in self._held and parameter.requires_grad and parameter.dtype in SHORT_DTYPES
        ]
        for parameter in later:
            self.shorten(parameter, parameter.dtype)
        lengthen_states(optimizers, later)
        held = {parameter: self._held[parameter] for parameter in parameters if parameter in self._held}
        for parameter, backup in held.items():
            backup.refresh(parameter)
        short = [parameter.data for parameter in held]
        full = [backup.weights for backup in held.values()]
        try:
            for parameter, weights in zip(held, full, strict=True):
                parameter.data = weights
            yield
        finally:
            for parameter, own in zip(held, short, strict=True):
                parameter.data = own
            if held:
                with torch.no_grad():
                    private.foreach_copy_(short, full)
            for parameter, backup in held.items():
                backup.note(parameter)

    def _hold(self, parameter: nn.Parameter, backup: _Backup) -> None:
        self._held[parameter] = backup
        _KNOWN[parameter] = ref(backup)

    def stand_in(self, of: Callable[[Tensor], Any]) -> "Masters":
        """Return the master weights for the stand-ins that `of` returns, as for a traced step."""
        twin = Masters(is_needed=self._is_needed)
        for parameter, backup in self._held.items():
            twin.hold(of(parameter), of(backup.weights))
        return twin

    def keep_states(self, optimizer: Optimizer) -> None:
        """Make an optimizer load its state unrounded: torch casts it to the dtype of 16-bit weights."""
        if self._held or self._is_needed:
            given: dict[str, Any] = {}
            optimizer.register_load_state_dict_pre_hook(lambda _, state: given.update(state))
            optimizer.register_load_state_dict_post_hook(lambda one: _restore(one, given))

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return a module's state dict with master weights in place of 16-bit weights."""
        found: dict[str, Any] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            full = self.of(value) if isinstance(value, nn.Parameter) else None
            found[name] = (value.detach() if isinstance(value, Tensor) else value) if full is None else full
        return found

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load the output of `state_dict`; arguments and result as of `nn.Module.load_state_dict`."""
        found = module.load_state_dict(state, strict=strict)
        for name, value in module.state_dict(keep_vars=True).items():
            if name in state and isinstance(value, nn.Parameter) and value in self._held:
                self._held[value].weights.copy_(state[name])
                self._held[value].note(value)
        return found


def lengthen(parameter: nn.Parameter) -> None:
    """Store a 16-bit parameter in float32, from its master weight if a step has one."""
    if parameter.dtype not in SHORT_DTYPES:
        return
    backup = _known(parameter)
    if backup is None:
        parameter.data = parameter.data.float()
    else:  # shared memory: a write to one is a write to both
        parameter.data = backup.weights
        backup.note(parameter)


def lengthen_states(optimizers: Iterable[Optimizer], parameters: Iterable[nn.Parameter]) -> None:
    """Convert 16-bit optimizer state of these parameters to float32."""
    wanted = list(parameters)
    for optimizer in optimizers:
        for parameter in wanted:
            slots: dict[str, Any] = optimizer.state.get(parameter, {})
            for name, value in slots.items():
                if isinstance(value, Tensor) and value.dtype in SHORT_DTYPES:
                    slots[name] = value.float()


def _known(parameter: nn.Parameter) -> _Backup | None:
    found = _KNOWN.get(parameter)
    backup = None if found is None else found()
    if backup is not None:
        backup.refresh(parameter)
    return backup


def _restore(optimizer: Optimizer, given: dict[str, Any]) -> None:
    for group, saved in zip(optimizer.param_groups, given["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            known = given["state"].get(key, {}) if parameter.dtype in SHORT_DTYPES else {}
            for name, value in known.items():
                if isinstance(value, Tensor) and optimizer.state[parameter][name].dtype != value.dtype:
                    optimizer.state[parameter][name] = value.to(parameter.device, copy=True)
            lengthen_states([optimizer], [parameter] if known else [])
    given.clear()


def _version(parameter: nn.Parameter) -> tuple[int, int]:
    # Changes on a write to the parameter, or if its memory is replaced.
    return private.version(parameter), private.storage_key(parameter)
