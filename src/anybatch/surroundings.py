"""What a forward may change, noted and put back: buffers, modes, gradients and random streams."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from anybatch import rng


class Surroundings:
    """Buffers and torch's random state, noted when it is made, so that they can be put back.

    Args:
        modules: those whose own buffers are noted; their children's are not.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> before = Surroundings([norm])
        >>> _ = norm(torch.randn(4, 2))
        >>> before.put_back()
        >>> norm.running_mean
        tensor([0., 0.])
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._random = rng.capture()
        found = [module._buffers for module in modules]  # pyright: ignore[reportPrivateUsage]
        self._slots = [(slots, slots.copy()) for slots in found]
        self._buffers = [
            (buffer, buffer.clone())
            for slots in found
            for buffer in slots.values()
            if buffer is not None and not is_lazy(buffer)
        ]

    def put_back(self) -> None:
        """Put buffers and the random state back."""
        rng.restore(self._random)
        self.put_buffers_back()

    def put_buffers_back(self) -> None:
        """Put the buffers back, and leave the random state where it stands."""
        for slots, found in self._slots:  # a forward may have put other tensors there
            slots.clear()
            slots.update(found)
        with torch.no_grad():
            for buffer, value in self._buffers:
                if not torch.equal(buffer, value):  # what is constant may be expanded, and not writable
                    buffer.copy_(value)


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Generator[None]:
    """Evaluation mode without gradient; afterwards everything a forward may change is as before.

    That is modes, buffers, gradients, and the random streams of torch, Python and NumPy. The modes are set as
    such, not by `eval()`, which some models use to change their weights.

    Args:
        modules: all of a model's and a loss's modules.

    Example:
        >>> model = nn.Dropout()
        >>> with evaluating([model]):
        ...     model(torch.ones(2))
        tensor([1., 1.])
        >>> model.training
        True
    """
    modes = [(module, module.training) for module in modules]
    parameters = {p for module in modules for p in module.parameters(recurse=False)}
    gradients = [(p, p.grad) for p in parameters]
    surroundings = Surroundings(modules)
    random = rng.capture_process()  # all, because collating may draw from Python's or NumPy's
    try:
        for module in modules:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        surroundings.put_buffers_back()
        rng.restore_process(random)
        for module, mode in modes:
            module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient
        # Older torch keeps what autocast cast without graph, and uses it where a gradient is wanted.
        torch.clear_autocast_cache()
