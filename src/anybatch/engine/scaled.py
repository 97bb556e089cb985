"""A micro-batch added at its loss scale; one that is not finite comes again, is left out, or refused."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.core import (
    AnybatchError,
    LossError,
    MicroBatchRedone,
    NonFinite,
    NonFiniteLossError,
    OutOfMemoryError,
    free_caches,
    ran_out_of_memory,
    refilling,
    released,
    tensors_in,
)
from anybatch.engine.plan import Plan
from anybatch.engine.run import Redone, Run
from anybatch.engine.smaller import begin_again, put_back
from anybatch.engine.task import Task
from anybatch.losses import EvaluateAgain, Loss


class Skipped(Exception):  # noqa: N818
    """No update is to be made: values were not finite, and that is what was asked for then."""


class Adder:
    """Adds one micro-batch after the other, each at the loss scale that it bears.

    Args:
        run: what they are added to.
        plan: what was decided.
        task: what it is carried out on.
        leaves: the tensors of the whole batch, as far as they are there.
    """

    def __init__(self, run: Run, plan: Plan, task: Task, leaves: Iterable[Tensor] = ()) -> None:
        self._run, self._plan, self._task = run, plan, task
        self._versions = [(leaf, _version(leaf)) for leaf in leaves]  # views share them

    def begin(self, *, draws: bool, in_window: bool) -> str:
        """Note what the next one may change; what the allocator said if there is no room for it."""
        try:
            self._run.begin(draws=draws, in_window=in_window)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return _said(error)
        return ""

    def add(
        self, take: Callable[[], tuple[Any, Loss]], *, place: int, left: Sequence[int], again: bool
    ) -> str:
        """Add it, or leave it out; what the allocator said if memory ran out.

        Args:
            take: makes its rows and gives their loss.
            place: the first of them, in the batch or the window.
            left: sizes of this micro-batch and of all that follow.
            again: some parameters have accepted it already.

        Raises:
            NonFiniteLossError: it is not finite at a loss scale of 1, and that is to be refused.
            Skipped: it is not, and the update is to be skipped.
            Smaller: the step is to begin again, cut as it is.
        """
        rows = left[0]
        scale, copies = self._task.scale, list[tuple[Tensor, Tensor, int]]()
        scale.begin()
        before: dict[str, Any] = {}
        refill: Callable[[], object] = dict  # nothing to put back
        try:
            micro, loss = take()
            copies = self._copies(micro)
            refill = refilling(micro)
            while True:
                try:
                    self._run.add(micro, loss, rows, again=again)
                    self._look()
                    return ""
                except EvaluateAgain:
                    where = ""
                except NonFinite as found:
                    where = found.where
                if not where:
                    refill()
                    self._put_rows_back(copies, "to be evaluated again", LossError)
                    if not put_back(self._run, self._task, "to be evaluated again", LossError):
                        raise begin_again(self._run, self._task, [*self._run.rows, *left])
                    continue
                refill()  # what this forward has put into its rows is not there for the next
                at, before = scale.value, before or scale.state()
                reached = self._run.at_hand.noted.streams_reached()
                said = f"the {where} overflowed at a loss scale of {at:g}"
                self._put_rows_back(copies, said, NonFiniteLossError)
                if not put_back(self._run, self._task, said, NonFiniteLossError):
                    raise begin_again(self._run, self._task, [*self._run.rows, *left])
                if not (where == "gradient" and scale.give_way()):
                    scale.load(before)  # it was not at fault, and would take many updates to come back
                    self._give_up(where, at, place, rows, is_tied=loss.tied, reached=reached)
                    return ""
                self._task.tell(MicroBatchRedone(index=len(self._run.rows), rows=rows, reason=said))
                self._run.redone.append(Redone(rows, may_be_cut=False))
                # What was accepted stays: it was finite, and is without scale.
                again = self._run.gradients.holds_part
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            said = _said(error)
        refill()
        self._put_rows_back(copies, said, OutOfMemoryError)
        return said

    def _look(self) -> None:
        streams = self._task.streams
        if streams.is_looking and not streams.are_rows_written:
            streams.are_rows_known, streams.are_rows_written = True, self._are_rows_written()

    def _copies(self, micro: Any) -> list[tuple[Tensor, Tensor, int]]:
        """Of the rows, if forwards are known to write to them, or an overflow is likely and nobody knows."""
        streams = self._task.streams
        if not (streams.are_rows_written or (self._run.is_guarded and not streams.are_rows_known)):
            return []
        return [(leaf, leaf.detach().clone(), _version(leaf)) for leaf in tensors_in(micro)]

    def _put_rows_back(
        self, copies: Sequence[tuple[Tensor, Tensor, int]], said: str, kind: type[AnybatchError]
    ) -> None:
        for leaf, value, version in copies:
            # Not all can be written to: rows may be a file, or expanded. And `.data` tells no version.
            if _version(leaf) != version or not _is_same(leaf, value):
                with torch.inference_mode(leaf.is_inference()), torch.no_grad():
                    leaf.copy_(value)
                self._task.streams.are_rows_written = True
        if copies:
            self._versions = [(leaf, _version(leaf)) for leaf, _ in self._versions]
        elif self._are_rows_written():
            self._task.streams.are_rows_written = True
            raise kind(
                f"Expected a forward that leaves its rows as they are, got one that had changed them when a "
                f"micro-batch was to be undone ({said}). No update was made, but the rows are not as before: "
                "hand them over anew. From now on they are noted before each micro-batch."
            )

    def _are_rows_written(self) -> bool:
        return any(_version(leaf) != version for leaf, version in self._versions)

    def _give_up(
        self, where: str, at: float, place: int, rows: int, *, is_tied: bool, reached: Callable[[], None]
    ) -> None:
        policy = self._plan.non_finite
        # Who goes on draws other random numbers: the same would be as bad again, and for ever.
        if policy == "skip":
            reached()
            raise Skipped
        if policy == "drop" and not is_tied:
            reached()
            self._run.leave_out(rows)
            return
        meet = ", and rows that meet in the loss cannot be left out" if policy == "drop" else ""
        raise NonFiniteLossError(
            f"Expected a finite {where}, got NaN or infinity in micro-batch {len(self._run.rows)} "
            f"(rows {place} to {place + rows - 1} of the batch) at a loss scale of {at:g}{meet}. No update "
            "was made. Look for bad data in these rows, a division by zero (a mean over no valid target), or "
            'too high a learning rate; Step(non_finite="drop") leaves such rows out, "skip" the update.'
        )


def _is_same(one: Tensor, other: Tensor) -> bool:
    """NaN is the same as NaN; of what torch cannot compare the version tells."""
    if one.is_nested or one.layout != torch.strided:
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # pyright: ignore[reportPrivateUsage]


def _said(error: Exception) -> str:
    """What the allocator said; caches are freed."""
    said = released(error)
    free_caches()
    return said
