"""What a forward may change, noted and put back: buffers, modes, gradients and random streams."""

import math
import random
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch.core import ran_out_of_memory
from anybatch.state import rng

#: How to read where a stream stands, and how to set it.
Stream = tuple[Callable[[], Any], Callable[[Any], object]]

_Copy = tuple[Tensor, float]
FIRST, EVERY = 3, 64  # steps that look for streams: so many at first, then one of so many
_SMALL_BYTES = 1 << 16  # no statistics of channels reach this


class Surroundings:
    """Buffers and torch's random state, noted when it is made, so that they can be put back.

    Args:
        modules: those whose own buffers are noted; their children's are not.
        streams: random streams besides torch's, noted too.
        tensors: noted with the buffers.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> before = Surroundings([norm])
        >>> _ = norm(torch.randn(4, 2))
        >>> before.put_back()
        >>> norm.running_mean
        tensor([0., 0.])
    """

    def __init__(
        self, modules: Sequence[nn.Module], *, streams: Sequence[Stream] = (), tensors: Iterable[Tensor] = ()
    ) -> None:
        self._tables = [module._buffers for module in modules]  # pyright: ignore[reportPrivateUsage]
        self._tensors = tuple(tensors)
        self._note({}, streams, rng.capture())

    def renewed(
        self, *, streams: Sequence[Stream] = (), torchs: bool = True, tensors: Iterable[Tensor] = ()
    ) -> "Surroundings":
        """The same noted anew, as things stand now; large buffers that have not changed are not copied again.

        Args:
            streams: random streams besides torch's, noted too.
            torchs: whether torch's is; if not, it is taken to stand where it stood.
            tensors: noted with the buffers.
        """
        if not (torchs or streams or tensors or any(self._tables)):  # nothing that could change
            return self
        now = object.__new__(Surroundings)
        now._tables, now._tensors = self._tables, tuple(tensors)
        now._note(self._copies, streams, rng.capture() if torchs else self._random)
        return now

    def _note(
        self, known: Mapping[Tensor, _Copy], streams: Sequence[Stream], random: rng.RandomState
    ) -> None:
        self._random = random
        self._streams = [(stream, stream[0]()) for stream in streams]
        self._slots = [(slots, slots.copy()) for slots in self._tables if slots]
        self._copies = {
            buffer: _copied(buffer, known.get(buffer))
            for buffers in (*[slots.values() for slots, _ in self._slots], self._tensors)
            for buffer in buffers
            if buffer is not None and not is_lazy(buffer)
        }

    def put_back(self) -> None:
        """Put buffers and the random state back."""
        rng.restore(self._random)
        for (_, put), state in self._streams:
            put(state)
        self.put_buffers_back()

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all of these were noted."""
        return all(tensor in self._copies for tensor in tensors)

    def is_moved(self) -> bool:
        """Whether torch's stream stands elsewhere now."""
        return not rng.is_same(self._random, rng.capture())

    def is_process_moved(self) -> bool:
        """Whether Python's or NumPy's streams, as far as they were noted, stand elsewhere now."""
        process = of_process()
        return any(read() != state for (read, put), state in self._streams if (read, put) in process)

    def streams_reached(self) -> Callable[[], None]:
        """What sets the streams noted here to where they stand now, after they were put back."""
        torchs, others = rng.capture(), [(put, read()) for (read, put), _ in self._streams]

        def go_on() -> None:
            rng.restore(torchs)
            for put, state in others:
                put(state)

        return go_on

    def put_buffers_back(self) -> None:
        """Put the buffers back, and leave the random state where it stands."""
        for slots in self._tables:  # a forward may have put other tensors there
            slots.clear()
        for slots, found in self._slots:
            slots.update(found)
        with torch.no_grad():
            for buffer, (value, _) in self._copies.items():
                if not _is_same(buffer, value):  # what is constant may be expanded, and not writable
                    buffer.copy_(value)


def _copied(buffer: Tensor, known: _Copy | None) -> _Copy:
    """A buffer's value and its version, which tells whether it has been written to since.

    Not where it is small: BatchNorm's kernels write to running statistics without telling the version.
    """
    # What was made in inference mode has no version. NaN is never the same.
    version = math.nan if buffer.is_inference() else buffer._version  # pyright: ignore[reportPrivateUsage]
    if known is not None and known[1] == version and buffer.nbytes > _SMALL_BYTES:
        return known
    return buffer.clone(), version


def _is_same(one: Tensor, other: Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except Exception as error:
        if not ran_out_of_memory(error):  # comparing takes some, copying none
            raise
        return False


class Untouched:
    """The note of a micro-batch before which nothing could be noted: it has not begun, so all stands.

    Example:
        >>> Untouched().put_back()
        >>> Untouched().is_moved()
        False
    """

    def put_back(self) -> None:
        """Nothing to do."""

    def is_moved(self) -> bool:
        """It is not."""
        return False

    def streams_reached(self) -> Callable[[], None]:
        """They stand where they stood."""
        return self.put_back

    is_process_moved = is_moved


class Streams:
    """Which streams a step has to note before each micro-batch, so that one that is undone draws the same.

    The generators that modules hold themselves are noted always. Torch's takes as long as a small layer,
    and Python's and NumPy's ten times that. They are noted in the first steps and in one of many later ones;
    if a forward has moved them there, in all from then on. Where torch's was not noted and has moved all the
    same, it shows, and the step begins again.

    Attributes:
        is_looking: whether this step is one of those that look.
        are_moved: whether a forward has drawn from Python's or NumPy's.
        is_torchs_moved: whether one has drawn from torch's.
        written: parameters that a forward has written to, as a momentum encoder's or an embedding's with a
            largest norm: noted from then on.
        are_rows_written: whether one has written to its own rows: they are copied from then on.
        are_rows_known: whether a forward has been seen, so that the last is known.

    Example:
        >>> streams = Streams()
        >>> streams.begin([nn.Linear(2, 1)])
        >>> streams.is_looking, streams.are_moved
        (True, False)
    """

    def __init__(self) -> None:
        self._steps = 0
        self._held: tuple[Stream, ...] = ()
        self.is_looking = self.are_moved = self.is_torchs_moved = False
        self.written: tuple[Tensor, ...] = ()
        self.are_rows_written = self.are_rows_known = False

    def __reduce__(self) -> tuple[type["Streams"], tuple[()]]:
        """A copy looks afresh: it goes with copies of the modules, which hold other generators."""
        return Streams, ()

    def begin(self, modules: Sequence[nn.Module]) -> None:
        """The next step, with these modules."""
        self.is_looking = self._steps < FIRST or self._steps % EVERY == 0
        self._steps += 1
        self._held = held(modules)
        if self._steps == 1:  # the one case of torch's own
            embeddings = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
            self.write([one.weight for one in embeddings if one.max_norm is not None])

    def to_note(self, *, draws: bool) -> tuple[Stream, ...]:
        """The streams to be noted now.

        Args:
            draws: whether Python's and NumPy's may be drawn from by somebody else than the forward.
        """
        return (*self._held, *of_process()) if draws or self.are_moved or self.is_looking else self._held

    @property
    def are_torchs_noted(self) -> bool:
        """Whether torch's is to be noted now."""
        return self.is_looking or self.is_torchs_moved

    def write(self, tensors: Iterable[Tensor]) -> None:
        """A forward writes to these."""
        self.written = tuple(dict.fromkeys((*self.written, *tensors)))

    def look(self, since: Surroundings | Untouched) -> None:
        """After a micro-batch, in a step that looks.

        Args:
            since: what was noted as it began.
        """
        self.are_moved = self.are_moved or since.is_process_moved()
        self.is_torchs_moved = self.is_torchs_moved or since.is_moved()


def of_process() -> tuple[Stream, ...]:
    """Python's and, where it is loaded, NumPy's.

    Example:
        >>> read, put = of_process()[0]
        >>> state, first = read(), random.random()
        >>> put(state)
        >>> random.random() == first
        True
    """
    return (_PYTHON, _NUMPY) if "numpy" in sys.modules else (_PYTHON,)


def held(modules: Sequence[nn.Module]) -> tuple[Stream, ...]:
    """The generators of torch, NumPy and Python that modules hold, also in lists, tuples and dicts.

    Example:
        >>> model = nn.Dropout()
        >>> model.generator = torch.Generator()
        >>> len(held([model]))
        1
    """
    found: list[Stream] = []
    for module in modules:
        for name, value in vars(module).items():
            if type(value) in _PLAIN or name in _OF_MODULES:
                continue
            if isinstance(value, dict):
                value = [*cast("dict[Any, Any]", value).values()]
            inner = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
            found += [stream for one in inner if type(one) not in _PLAIN for stream in _stream(one)]
    return tuple(found)


def _stream(value: Any) -> list[Stream]:
    """How to read and set it, if it is a generator."""
    if isinstance(value, torch.Generator):
        return [(value.get_state, value.set_state)]
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return [(value.getstate, value.setstate)]
    return _stream_of_numpy(value, sys.modules["numpy"].random) if "numpy" in sys.modules else []


def _stream_of_numpy(value: Any, numpy_random: Any) -> list[Stream]:
    if isinstance(value, numpy_random.Generator):
        bits = value.bit_generator
        return [(partial(getattr, bits, "state"), partial(setattr, bits, "state"))]
    if isinstance(value, numpy_random.RandomState):
        return [(partial(value.get_state, legacy=False), value.set_state)]
    return []


def _numpy_state() -> tuple[Any, ...]:
    """With the keys as bytes, so that two states can be compared."""
    name, keys, *rest = sys.modules["numpy"].random.get_state()
    return name, keys.tobytes(), *rest


def _set_numpy_state(state: tuple[Any, ...]) -> None:
    name, keys, *rest = state
    numpy = sys.modules["numpy"]
    numpy.random.set_state((name, numpy.frombuffer(keys, dtype="uint32"), *rest))


_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, Tensor})
_PYTHON: Stream = (random.getstate, random.setstate)
_NUMPY: Stream = (_numpy_state, _set_numpy_state)


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
    process = rng.capture_process()  # all, because collating may draw from Python's or NumPy's
    try:
        for module in modules:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        surroundings.put_buffers_back()
        rng.restore_process(process)
        for module, mode in modes:
            module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient
        # Older torch keeps what autocast cast without graph, and uses it where a gradient is wanted.
        torch.clear_autocast_cache()
