"""Weight backup: a float32 copy of each weight that is stored short; it is what the optimizer updates."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from anybatch.core import SHORT_DTYPES
from anybatch.core import torch_private as private


class _Backup:
    """The float32 weights behind one parameter, and its version when last seen; all its steps share them."""

    def __init__(self, parameter: nn.Parameter, weights: Tensor) -> None:
        self.weights = weights
        self.note(parameter)

    def note(self, parameter: nn.Parameter) -> None:
        """The parameter holds these weights, rounded to its dtype."""
        self.dtype, self.version = parameter.dtype, _version(parameter)

    def refresh(self, parameter: nn.Parameter) -> None:
        """Take over what somebody has written to the parameter, or where it was moved."""
        data = parameter.data
        if self.weights.device != data.device or self.weights.shape != data.shape:
            self.weights = data.float()
            self.note(parameter)
        elif self.version != _version(parameter):
            # Elements that nobody wrote to keep their digits, also where the model was only made float32.
            full, stored = self.weights, self.weights.to(self.dtype)
            is_kept = (data == full.to(data.dtype)) | (data == stored.to(data.dtype))
            if not is_kept.all():
                full.copy_(torch.where(is_kept, full, data.float()))
            self.version = _version(parameter)


#: By parameter, as long as a step has them.
_KNOWN = WeakIdKeyDictionary()


class Masters:
    """The float32 weights behind those that are stored in 16 bits.

    During an update each parameter holds its float32 weights, so any optimizer updates them, with state in
    float32. Then the parameter holds the short weights again, rounded from them.

    Args:
        is_needed: whether trained weights are stored short; those that come later are held, too.

    Example:
        >>> weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> masters = Masters(is_needed=True)
        >>> masters.hold(weight, torch.ones(2))
        >>> for _ in range(4):
        ...     with masters.raised([weight]):
        ...         _ = weight.data.add_(2e-4)
        >>> (weight - 1).max() > 0  # each step by itself is lost in float16
        tensor(True)
    """

    def __init__(self, *, is_needed: bool = False) -> None:
        self._is_needed = is_needed
        self._held: dict[nn.Parameter, _Backup] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy
        vars(self).update(state)
        for parameter, backup in self._held.items():
            _KNOWN[parameter] = ref(backup)

    @property
    def tensors(self) -> list[Tensor]:
        """The copies, in the order in which they were taken."""
        return [backup.weights for backup in self._held.values()]

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """The float32 weights of a parameter, as they stand; None where it is not stored short."""
        backup = self._held.get(parameter)
        if backup is None:
            return None
        backup.refresh(parameter)
        return backup.weights

    def hold(self, parameter: nn.Parameter, weights: Tensor) -> None:
        """Keep these float32 weights, which are not copied, behind a parameter."""
        self._hold(parameter, _Backup(parameter, weights))

    def shorten(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Store a parameter short, and keep the weights behind it: another step's, or else its own."""
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
        """For a while the parameters hold their float32 weights; afterwards those, rounded.

        Args:
            parameters: those to be updated. One that came later is held from now on.
            optimizers: their state of parameters that came later becomes float32.
        """
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
        """The same for stand-ins of these tensors, which `of` gives, as where a step is traced."""
        twin = Masters(is_needed=self._is_needed)
        for parameter, backup in self._held.items():
            twin.hold(of(parameter), of(backup.weights))
        return twin

    def keep_states(self, optimizer: Optimizer) -> None:
        """Let an optimizer load its state as it is: torch would round it to the dtype of short weights."""
        if self._held or self._is_needed:
            given: dict[str, Any] = {}
            optimizer.register_load_state_dict_pre_hook(lambda _, state: given.update(state))
            optimizer.register_load_state_dict_post_hook(lambda one: _restore(one, given))

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """A module's state dict with the float32 weights in the place of the short ones.

        Example:
            >>> model = nn.Linear(2, 1).half()
            >>> masters = Masters()
            >>> masters.hold(model.weight, torch.zeros(1, 2))
            >>> masters.state_dict(model)["weight"].dtype
            torch.float32
        """
        found: dict[str, Any] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            full = self.of(value) if isinstance(value, nn.Parameter) else None
            found[name] = (value.detach() if isinstance(value, Tensor) else value) if full is None else full
        return found

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load what `state_dict` gave, with the arguments and the answer of `nn.Module.load_state_dict`."""
        found = module.load_state_dict(state, strict=strict)
        for name, value in module.state_dict(keep_vars=True).items():
            if name in state and isinstance(value, nn.Parameter) and value in self._held:
                self._held[value].weights.copy_(state[name])
                self._held[value].note(value)
        return found


def lengthen(parameter: nn.Parameter) -> None:
    """Store in float32 what is stored short, with the digits that a step has behind it."""
    if parameter.dtype not in SHORT_DTYPES:
        return
    backup = _known(parameter)
    if backup is None:
        parameter.data = parameter.data.float()
    else:  # the very memory, so that who writes to one writes to both
        parameter.data = backup.weights
        backup.note(parameter)


def lengthen_states(optimizers: Iterable[Optimizer], parameters: Iterable[nn.Parameter]) -> None:
    """Make float32 of what optimizers have in 16 bits for these parameters."""
    wanted = list(parameters)
    for optimizer in optimizers:
        for parameter in wanted:
            slots: dict[str, Any] = optimizer.state.get(parameter, {})
            for name, value in slots.items():
                if isinstance(value, Tensor) and value.dtype in SHORT_DTYPES:
                    slots[name] = value.float()


def _known(parameter: nn.Parameter) -> _Backup | None:
    """What any step has behind a parameter, as it stands."""
    found = _KNOWN.get(parameter)
    backup = None if found is None else found()
    if backup is not None:
        backup.refresh(parameter)
    return backup


def _restore(optimizer: Optimizer, given: dict[str, Any]) -> None:
    """Give short parameters the state that was loaded, not what torch has made of it."""
    for group, saved in zip(optimizer.param_groups, given["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            known = given["state"].get(key, {}) if parameter.dtype in SHORT_DTYPES else {}
            for name, value in known.items():
                if isinstance(value, Tensor) and optimizer.state[parameter][name].dtype != value.dtype:
                    optimizer.state[parameter][name] = value.to(parameter.device, copy=True)
            lengthen_states([optimizer], [parameter] if known else [])
    given.clear()


def _version(parameter: nn.Parameter) -> tuple[int, int]:
    """Changes where somebody writes to a parameter, or puts other memory in its place."""
    return private.version(parameter), private.storage_key(parameter)
