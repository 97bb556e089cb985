"""Random streams: captured and restored, so that a replay repeats them"""

import hashlib
import pickle
import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.core import accelerator, loaded, torch_private as private


class RandomState(NamedTuple):
    """The states of torch's default generators and of some others."""

    cpu: Tensor  # uint8
    devices: tuple[Tensor, ...] = ()  # uint8, one per device of the accelerator; empty if it is not in use
    others: tuple[tuple[Any, Any], ...] = ()  # (generator, state)


def capture(generators: Iterable[Any] = ()) -> RandomState:
    """Return the states of torch's default generators and of these, also Python's and NumPy's."""
    devices = tuple([one.get_state() for one in accelerator.generators()])
    return RandomState(torch.get_rng_state(), devices, tuple([(one, ways(one)[0]()) for one in generators]))


def restore(state: RandomState) -> None:
    """Set all generators to their captured states."""
    torch.set_rng_state(state.cpu)
    for generator, one in zip(accelerator.generators(), state.devices, strict=False):
        generator.set_state(one)
    for generator, one in state.others:
        ways(generator)[1](one)


def is_same(one: RandomState, other: RandomState, *, of: Sequence[Any] | None = None) -> bool:
    """Return True if two states are equal; with `of`, compare only these of the other generators."""
    if len(one.devices) != len(other.devices):  # the accelerator was initialised in between
        return False
    others = zip(one.others, other.others, strict=False)
    pairs = [(a, b) for (generator, a), (_, b) in others if of is None or generator in of]
    if of is None:
        pairs += zip((one.cpu, *one.devices), (other.cpu, *other.devices), strict=True)
    with private.disable_current_modes():  # real tensors even while a step is traced, and not counted
        return all(_is_equal(a, b) for a, b in pairs)


def numpy_random() -> Any:
    """Return `numpy.random`, or None if NumPy is not loaded."""
    return getattr(loaded("numpy"), "random", None)


def of_process() -> tuple[Any, ...]:
    """Return the modules `random` and, if it is loaded, `numpy.random`: generators for `capture`."""
    return (random,) if (numpy := numpy_random()) is None else (random, numpy)


def ways(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return functions that get and set the state of a generator of torch, NumPy or Python."""
    if hasattr(generator, "getstate"):
        return generator.getstate, generator.setstate
    if hasattr(generator, "get_state"):
        return generator.get_state, generator.set_state
    bits = generator.bit_generator
    return partial(getattr, bits, "state"), partial(setattr, bits, "state")


def is_generator(kind: type) -> bool:
    """Return True for a class of random generators of torch, NumPy or Python."""
    if issubclass(kind, random.Random):
        return not issubclass(kind, random.SystemRandom)
    numpy = loaded("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return issubclass(kind, (torch.Generator, *of_numpy))


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return pickle.dumps(one) == pickle.dumps(other)


@contextmanager
def preserved() -> Generator[None]:
    """Restore all streams of the process afterwards: torch's, Python's and NumPy's."""
    state = capture(of_process())
    try:
        yield
    finally:
        restore(state)


def derive_seed(seed: int, *keys: int | str) -> int:
    """Return a seed for one purpose, which does not depend on the order of calls."""
    digest = hashlib.sha256(repr((seed, *keys)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_process(seed: int) -> None:
    """Seed torch's, Python's and NumPy's streams; an accelerator's only if it is in use."""
    for generator in (torch.default_generator, *accelerator.generators()):  # manual_seed would seed it later
        generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := numpy_random()) is not None:
        numpy.seed(seed % 2**32)


def capture_process() -> dict[str, Any]:
    """Return the states of torch's, Python's and, if loaded, NumPy's streams: tensors, tuples and numbers."""
    with private.disable_current_modes():  # real tensors even while a step is traced
        torch_state = capture()
        state = {"cpu": torch_state.cpu, "devices": torch_state.devices, "python": random.getstate()}
        if (numpy := numpy_random()) is not None:
            name, keys, *rest = numpy.get_state()
            state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def restore_process(state: Mapping[str, Any]) -> None:
    """Restore the result of `capture_process`; of accelerators only if they are of that kind and number."""
    with private.disable_current_modes():
        saved = tuple([one.cpu() for one in state["devices"]])  # `torch.load(map_location=...)` moves them
        sizes = [len(one.get_state()) for one in accelerator.generators()]
        restore(RandomState(state["cpu"].cpu(), saved if [*map(len, saved)] == sizes else ()))
        random.setstate(state["python"])
        if "numpy" in state and (numpy := numpy_random()) is not None:
            name, keys, *rest = state["numpy"]
            numpy.set_state((name, keys.cpu().numpy().astype("uint32"), *rest))


class OwnStreams:
    """The random streams of one purpose, such as loading data, separate from the caller's."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: RandomState | None = None  # None before the first use

    @contextmanager
    def drawn(self) -> Generator[None]:
        """Draw from these streams; the caller's are restored afterwards."""
        with preserved():
            if self._state is None:
                seed_process(self._seed)
            else:
                restore(self._state)
            try:
                yield
            finally:
                self._state = capture(of_process())
