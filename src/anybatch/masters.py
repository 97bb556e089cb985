"""Weight backup: a float32 copy of each weight that is stored short; it is what the optimizer updates."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.total import SHORT_DTYPES


class Masters:
    """The float32 weights behind those that are stored in 16 bits.

    While an update is made each parameter holds its float32 weights, so any optimizer works on them without
    knowing, and its state is float32. Then the parameter holds the short weights again, rounded from them:
    the one further pass over memory, because no optimizer of torch writes both.

    Without weights that are stored short it holds nothing, and does nothing.

    Args:
        is_needed: whether trained weights are stored short, so that those that come later are held, too.

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
        self._held: dict[nn.Parameter, Tensor] = {}
        self._versions: dict[nn.Parameter, tuple[int, int]] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """The copies, in the order in which they were taken."""
        return list(self._held.values())

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """The float32 weights of a parameter, as they stand; None where it is not stored short."""
        if parameter in self._held:
            self._refresh([parameter])
        return self._held.get(parameter)

    def hold(self, parameter: nn.Parameter, weights: Tensor) -> None:
        """Keep these as the weights behind a parameter.

        Args:
            parameter: stored short.
            weights: float32, of the same shape; not copied.
        """
        self._held[parameter] = weights
        self._versions[parameter] = _version(parameter)

    def raised(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """For a while the parameters hold their float32 weights; afterwards those, rounded.

        Args:
            parameters: those to be updated. Who is not held yet, because it came later, is from now on.
        """
        return self._raised(list(parameters)) if self._held or self._is_needed else nullcontext()

    @contextmanager
    def _raised(self, parameters: list[nn.Parameter]) -> Generator[None]:
        for parameter in parameters:
            if parameter not in self._held and parameter.requires_grad and parameter.dtype in SHORT_DTYPES:
                self.hold(parameter, parameter.data.float())
        held = [parameter for parameter in parameters if parameter in self._held]
        self._refresh(held)
        short = [parameter.data for parameter in held]
        full = [self._held[parameter] for parameter in held]
        try:
            for parameter, weights in zip(held, full, strict=True):
                parameter.data = weights
            yield
        finally:
            for parameter, own in zip(held, short, strict=True):
                parameter.data = own
            with torch.no_grad():
                if held:
                    torch._foreach_copy_(short, full)  # pyright: ignore
            for parameter in held:
                self._versions[parameter] = _version(parameter)

    def _refresh(self, parameters: Iterable[nn.Parameter]) -> None:
        """Where somebody has written to a parameter, or moved it, that is what counts."""
        for parameter in parameters:
            weights = self._held[parameter]
            if weights.device != parameter.device or weights.shape != parameter.shape:
                self._held[parameter] = parameter.data.float()
            elif self._versions[parameter] != _version(parameter) and not _is_rounded(parameter, weights):
                # Element by element: what nobody wrote to keeps the digits that it has behind it.
                is_kept = parameter.data == weights.to(parameter.dtype)
                weights.copy_(torch.where(is_kept, weights, parameter.data.to(weights.dtype)))
            self._versions[parameter] = _version(parameter)

    def stand_in(self, of: Callable[[Tensor], Any]) -> "Masters":
        """The same for other tensors in the place of these, as where a step is traced.

        Args:
            of: gives the tensor in the place of another.
        """
        twin = Masters(is_needed=self._is_needed)
        for parameter, weights in self._held.items():
            twin.hold(of(parameter), of(weights))
        return twin

    def keep_states(self, optimizer: Optimizer) -> None:
        """Let an optimizer load its state as it is: torch would round it to the dtype the weights have then.

        Args:
            optimizer: of parameters that are held.
        """
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

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave: the float32 weights as they are, the short ones rounded from them."""
        module.load_state_dict(state)
        for name, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter) and value in self._held:
                self._held[value].copy_(state[name])
                self._versions[value] = _version(value)


def _restore(optimizer: Optimizer, given: dict[str, Any]) -> None:
    """Give parameters that are stored short the state that was given, not what torch has made of it."""
    for group, saved in zip(optimizer.param_groups, given["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            known = given["state"].get(key, {}) if parameter.dtype in SHORT_DTYPES else {}
            for name, value in known.items():
                if isinstance(value, Tensor) and optimizer.state[parameter][name].dtype != value.dtype:
                    optimizer.state[parameter][name] = value.to(parameter.device, copy=True)
    given.clear()


def _is_rounded(parameter: nn.Parameter, weights: Tensor) -> bool:
    return torch.equal(parameter.data, weights.to(parameter.dtype))


def _version(parameter: nn.Parameter) -> tuple[int, int]:
    """What changes where somebody writes to a parameter, or puts other memory in its place."""
    memory = parameter.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    return parameter._version, memory  # pyright: ignore[reportPrivateUsage]
