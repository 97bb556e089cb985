"""What surrounds a step, and each micro-batch of it, when it begins: noted, so that it can be put back."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch.engine.task import Task
from anybatch.state import Stream, Surroundings, Untouched


class Before(Surroundings):
    """What a failed step puts back: its surroundings, and the gradients found there."""

    def __init__(self, task: Task, *, streams: Sequence[Stream] = ()) -> None:
        super().__init__(task.modules, streams=streams, tensors=task.streams.written)
        self._gradients = [(parameter, parameter.grad) for parameter in (*task.parameters, *task.others)]

    def put_gradients_back(self, only: Sequence[nn.Parameter] | None = None) -> None:
        """Put the gradients back that were there, of all parameters or only of these."""
        chosen = None if only is None else set(only)
        for parameter, gradient in self._gradients:
            if chosen is None or parameter in chosen:
                parameter.grad = gradient


class AtHand:
    """The micro-batch at hand: what it may change, as it stood when it began.

    Args:
        task: what a plan is carried out on.
        before: what stood when the step began.

    Attributes:
        noted: what is put back where the micro-batch is undone.
    """

    def __init__(self, task: Task, before: Before) -> None:
        self._task, self._before = task, before
        self._is_torchs_noted = True
        self._versions: dict[nn.Parameter, int] = {}
        self.noted: Surroundings | Untouched = before

    def begin(self, *, draws: bool = False, in_window: bool = False) -> None:
        """The next one: note what it may change, as it stands.

        Args:
            draws: whether it is made by drawing random numbers, as a `collate` may.
            in_window: whether it could not begin again with the step, so that nothing is left to chance.
        """
        streams = self._task.streams
        self.noted = Untouched()  # lets the copies go that were made before the last one
        if streams.is_looking:
            everyone = (*self._task.parameters, *self._task.others)
            self._versions = {p: _version(p) for p in everyone if not is_lazy(p)}
        self._is_torchs_noted = draws or in_window or streams.are_torchs_noted
        self.noted = self._before.renewed(
            streams=streams.to_note(draws=draws), torchs=self._is_torchs_noted, tensors=streams.written
        )

    def look(self) -> None:
        """It is done: what it has drawn from and written to is to be noted from now on."""
        streams = self._task.streams
        if streams.is_looking:
            streams.look(self.noted)
            streams.write(self.written())

    def written(self) -> list[nn.Parameter]:
        """Parameters that it has written to and that were not noted, as far as seen."""
        known = set(self._task.streams.written)
        return [p for p, version in self._versions.items() if p not in known and _version(p) != version]

    @property
    def is_random_known(self) -> bool:
        """Whether torch's stream can be put back: it was noted, or still stands where the step began."""
        return self._is_torchs_noted or isinstance(self.noted, Untouched) or not self._before.is_moved()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # pyright: ignore[reportPrivateUsage]
