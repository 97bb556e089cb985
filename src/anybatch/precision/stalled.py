"""What a forward writes to, though it is stored too short for small steps: looked for in its first calls."""

import warnings
from collections.abc import Iterator

from torch import Tensor, nn

from anybatch.core import SHORT_DTYPES

_CALLS = 2  # what is written only in the first one, such as a table of positions, takes no steps
#: The tensor too, so that its memory stays its own.
Marks = dict[str, tuple[Tensor, int, int]]


class Stalled:
    """Looks at the buffers and untrained weights of a model that is stored short, in its first calls.

    Running means and averaged weights move in steps that 16 bits round away, and nothing fails. Optimizers
    have float32 weights; what a forward writes to has none.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1).bfloat16().requires_grad_(False))
        >>> stalled = Stalled()
        >>> for _ in range(2):
        ...     before = stalled.before(model)
        ...     _ = model[0].weight.mul_(0.999)
        ...     stalled.after(model, before)
        Traceback (most recent call last):
        UserWarning: Expected no steps in 16 bits, where small ones vanish, got a forward that writes to...
    """

    def __init__(self) -> None:
        self._left, self._suspects = _CALLS, frozenset[str]()

    def before(self, model: nn.Module) -> Marks:
        """How things stand before a call; nothing where nobody looks any more."""
        return dict(_marks(model)) if self._left and model.training else {}

    def after(self, model: nn.Module, before: Marks) -> None:
        """Warn, once, of what was written to in each of the calls.

        Args:
            model: that was called.
            before: how things stood.
        """
        if not before:
            return
        now = dict(_marks(model))
        written = frozenset(name for name in before if name in now and now[name][1:] != before[name][1:])
        self._suspects = written if self._left == _CALLS else written & self._suspects
        self._left = self._left - 1 if self._suspects else 0
        if self._suspects and not self._left:
            _warn(sorted(self._suspects), now)


def _marks(model: nn.Module) -> Iterator[tuple[str, tuple[Tensor, int, int]]]:
    untrained = ((name, one) for name, one in model.named_parameters() if not one.requires_grad)
    held = [pair for pair in model.named_buffers() if not _is_spectral(pair[0])]
    for name, tensor in (*held, *untrained):
        if tensor.dtype in SHORT_DTYPES:
            version = 0 if tensor.is_inference() else tensor._version
            yield name, (tensor, version, _memory(tensor))


def _is_spectral(name: str) -> bool:
    """A vector of torch's spectral norm: made anew in each forward, not moved by small steps."""
    return name.endswith((".0._u", ".0._v", "weight_u", "weight_v"))


def _memory(tensor: Tensor) -> int:
    """What changes where `tensor.data` is replaced."""
    try:
        return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    except NotImplementedError:  # under torch.func
        return 0


def _warn(names: list[str], marks: Marks) -> None:
    holders = sorted({name.rpartition(".")[0] for name in names})
    way_out = f"Name what holds it in keep_float32, as in {holders}; let it be where no step is small."
    if "" in holders:  # to keep the whole model in float32 is no way out
        way_out = "Put it into a module of its own, and name that in keep_float32."
    told = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    dtype = str(marks[names[0]][0].dtype).removeprefix("torch.")
    warnings.warn(
        "Expected no steps in 16 bits, where small ones vanish, got a forward that writes to "
        f"{told}, stored in {dtype}. {way_out}",
        stacklevel=2,
    )
