"""Ranks of one logical batch: the rows of each, and the points where all ranks meet."""

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from anybatch.core import Batch, BatchError, RankError, SampleBatch, TensorBatch, has_written
from anybatch.parallel import digest_of, exchange, gather_values, rank, ranks
from anybatch.state import rng
from anybatch.step import Step
from anybatch.train.interrupt import Interruption


def as_batch(given: Any, step: Step) -> Batch:
    """Return rows for a step, which can be counted and divided: samples if it has a `collate`."""
    return TensorBatch(given) if step.collate is None else SampleBatch(given, step.collate)


class Share:
    """The rows of this rank in each batch, and its messages to other ranks. A single rank has all rows."""

    def __init__(self, step: Step) -> None:
        self.is_lockstep = step.strategy.is_lockstep  # the model is sharded: no rank has all weights
        self.group = getattr(step.strategy, "group", None)
        is_many = step.strategy.is_many
        self.rank, self.ranks = (rank(self.group), ranks(self.group)) if is_many else (0, 1)
        self._step = step

    @property
    def is_writing(self) -> bool:
        """Return True if this rank takes part in checkpoints."""
        return self.is_lockstep or not self.rank

    @property
    def is_many(self) -> bool:
        """True if there are other ranks."""
        return self.ranks > 1

    def part(self, rows: int) -> slice:
        """Return this rank's slice of `rows` rows: in the order of ranks, sizes differ by at most one."""
        size, more = divmod(rows, self.ranks)
        first = self.rank * size + min(self.rank, more)
        return slice(first, first + size + (self.rank < more))

    def of(self, batch: Any) -> Any:
        """Return this rank's rows of a batch of tensors or a list of samples; None if it has none."""
        if not self.is_many:
            return batch
        rows = as_batch(batch, self._step)
        mine = range(rows.rows)[self.part(rows.rows)]
        return rows.only(mine).given if mine else None

    def has_turn(self, batch: int) -> bool:
        """Return True if this rank evaluates the batch of this index; in lockstep all evaluate all."""
        return self.is_lockstep or batch % self.ranks == self.rank

    def turns(self, parts: Sequence[Any]) -> list[tuple[Any, bool]]:
        """Return the micro-batches to evaluate here; False for one that only keeps step with other ranks."""
        if not self.is_lockstep:
            return [(one, True) for one in parts]
        mine = range(self.rank, len(parts) + self.rank, self.ranks)
        return [(parts[one], True) if one < len(parts) else (parts[0], False) for one in mine]

    def draw_apart(self, seed: int, step: int) -> None:
        """Seed the random streams of ranks after the first from seed, rank and step."""
        if self.rank:
            rng.seed_process(rng.derive_seed(seed, "rank", self.rank, step))

    @contextmanager
    def told(self, interruption: Interruption) -> Generator[None]:
        """Notify the other ranks of an error in this context; a signal of this rank has priority."""
        try:
            yield
        except BaseException as error:
            self._step.strategy.abandon(error)
            if isinstance(error, RankError):
                interruption.obey()
            raise

    def can_save(self, error: BaseException, steps: int) -> bool:
        """Return True if an error came in no update; in lockstep, if all ranks then have as many steps."""
        at = steps if isinstance(error, Exception) and not has_written(error) else 0
        if not self.is_lockstep:
            return at > 0
        self._step.strategy.abandon(error)
        is_silent = isinstance(error, RankError) and error.__cause__ is not None  # a rank gives no answer
        with suppress(RankError):
            if not (is_silent or getattr(self._step.strategy, "is_broken", False)):
                return {at} == {one["steps"] for one in self.meet("an error", steps=at)} != {0}
        return False

    def agrees(self, place: str, wish: bool) -> bool:
        """Return True if this rank wishes it; in lockstep, if any rank does."""
        if not self.is_lockstep:
            return wish
        return any(one["wish"] for one in self.meet(place, wish=wish))

    def meet(self, place: str, **values: Any) -> list[dict[str, Any]]:
        """Wait for all ranks at a named place; return their values. Raises RankError if one is elsewhere."""
        if not self.is_many:
            return [values]
        # A rank in the middle of a step reads this as a failure.
        said = exchange({"at": place, "failed": "no step", "said": f"at {place}", **values}, self.group)
        for number, one in enumerate(said):
            if "at" not in one and "failed" in one:
                raise RankError(
                    f"Expected all ranks at {place}, got {one['failed']} on rank {number}. It says: "
                    f"{one['said']!r}"
                )
            if one.get("at") != place:
                raise RankError(
                    f"Expected all ranks at {place}, got rank {number} at {one.get('at', 'a step')}. Pass "
                    "the same data on every rank: the trainer shares out each batch. Let callbacks stop by "
                    "what is the same on all ranks."
                )
        return said

    def meet_with_same(self, digest: str, place: str) -> None:
        """Meet; raise BatchError if the digests of a batch differ between ranks."""
        found = [one["digest"] for one in self.meet(place, digest=digest)]
        if len({*found}) > 1:
            odd = [number for number, one in enumerate(found) if one != found[0]]
            raise BatchError(
                f"Expected the same rows on all ranks in {place}, got others on ranks {odd} than on rank 0. "
                "Leave out samplers for ranks, such as DistributedSampler: the trainer shares out each batch."
            )

    def meet_with_buffers(self, place: str) -> None:
        """Meet; warn if buffers, which are not summed over ranks, differ between them."""
        if self.is_many:
            model = self._step.model
            digest = digest_of(dict(model.named_buffers()), "")
            if len({one["digest"] for one in self.meet(place, digest=digest)}) > 1 and not self.rank:
                warnings.warn(
                    f"Buffers of {type(model).__name__} differ between ranks: checkpoints have those of rank "
                    "0, and each rank validates with its own. Use GroupNorm or frozen BatchNorm instead.",
                    stacklevel=2,
                )

    def gather(self, place: str, value: Any) -> list[Any]:
        """Return the values of all ranks, of any type that can be pickled."""
        if not self.is_many:
            return [value]
        device = next(self._step.model.parameters()).device
        return gather_values(value, lambda size: self.meet(place, bytes=size), device, self.group)
