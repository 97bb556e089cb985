"""Random streams: noted and put back, so that a replay repeats them."""

import hashlib
import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.core import numpy_random
from anybatch.core import torch_private as private


class RandomState(NamedTuple):
    """Where torch's generators stood: what a replay starts from."""

    cpu: Tensor  # state of the CPU generator, uint8
    # state of each CUDA device's generator, uint8; empty where CUDA is not in use
    cuda: tuple[Tensor, ...] = ()


def capture() -> RandomState:
    """Note where the streams stand. CUDA is looked at only where it is in use already.

    Example:
        >>> state = capture()
        >>> first = torch.rand(2)
        >>> restore(state)
        >>> torch.equal(torch.rand(2), first)
        True
    """
    cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
    return RandomState(torch.get_rng_state(), cuda)


def restore(state: RandomState) -> None:
    """Put the streams back to where they stood."""
    torch.set_rng_state(state.cpu)
    if state.cuda:
        torch.cuda.set_rng_state_all(list(state.cuda))


def is_same(one: RandomState, other: RandomState) -> bool:
    """Whether the streams stand at the same place."""
    if len(one.cuda) != len(other.cuda):  # CUDA has come into use
        return False
    pairs = zip((one.cpu, *one.cuda), (other.cpu, *other.cuda), strict=True)
    # These are values, also where a step is traced, and no bytes of the step.
    with private.disable_current_modes():
        return all(torch.equal(a, b) for a, b in pairs)


@contextmanager
def preserved() -> Generator[None]:
    """Run something that may draw random numbers without moving the caller's streams."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


def derive_seed(seed: int, *keys: int | str) -> int:
    """A seed for one purpose, from one seed for everything: streams that do not depend on call order.

    Args:
        seed: the user's seed.
        keys: what the stream is for, for instance `"order", epoch`.

    Returns:
        A seed of 63 bits.

    Example:
        >>> derive_seed(0, "order", 1) == derive_seed(0, "order", 1) != derive_seed(0, "order", 2)
        True
    """
    digest = hashlib.sha256(repr((seed, *keys)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def capture_process() -> dict[str, Any]:
    """Every stream a training program may draw from: torch's, Python's and, where it is loaded, NumPy's.

    Returns:
        Nested tensors, tuples and numbers, for a checkpoint.

    Example:
        >>> state = capture_process()
        >>> first = random.random()
        >>> restore_process(state)
        >>> random.random() == first
        True
    """
    with private.disable_current_modes():  # NumPy's keys are values, also where a step is traced
        torch_state = capture()
        state = {"cpu": torch_state.cpu, "cuda": torch_state.cuda, "python": random.getstate()}
        if (numpy := numpy_random()) is not None:
            name, keys, *rest = numpy.get_state()
            state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def restore_process(state: Mapping[str, Any]) -> None:
    """Put back what `capture_process` took, as far as this process has the same generators."""
    with private.disable_current_modes():
        cuda = tuple(state["cuda"]) if len(state["cuda"]) == torch.cuda.device_count() else ()
        restore(RandomState(cpu=state["cpu"], cuda=cuda))
        random.setstate(state["python"])
        if "numpy" in state and (numpy := numpy_random()) is not None:
            name, keys, *rest = state["numpy"]
            numpy.set_state((name, keys.numpy().astype("uint32"), *rest))


class Apart:
    """Random streams of one purpose, such as loading data: what is drawn there leaves the caller's alone.

    Args:
        seed: where torch's CPU stream, Python's and NumPy's begin.

    Example:
        >>> state, one, other = torch.get_rng_state(), Apart(3), Apart(3)
        >>> with one.drawn():
        ...     first = torch.rand(2)
        >>> with other.drawn():
        ...     again = torch.rand(2)
        >>> torch.equal(first, again), torch.equal(torch.get_rng_state(), state)
        (True, True)
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: dict[str, Any] | None = None  # where it stands; None before the beginning

    @contextmanager
    def drawn(self) -> Generator[None]:
        """Draw from these streams, from where they stood last."""
        before = capture_process()
        if self._state is None:
            torch.default_generator.manual_seed(self._seed)  # torch.manual_seed would seed CUDA, too
            random.seed(self._seed)
            if (numpy := numpy_random()) is not None:
                numpy.seed(self._seed % 2**32)
        else:
            restore_process(self._state)
        try:
            yield
        finally:
            self._state = capture_process()
            restore_process(before)


def has_moved(since: Mapping[str, Any]) -> bool:
    """Whether anything was drawn, from any of these streams, since `capture_process`."""
    now = capture_process()
    was = since["cpu"], *since["cuda"], *since.get("numpy", ())
    new = now["cpu"], *now["cuda"], *now.get("numpy", ())
    same = [
        torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other
        for one, other in zip(was, new, strict=False)
    ]
    return since["python"] != now["python"] or not all(same)
