"""The driver of a parameter server: leases units to workers, counts each once, replaces lost processes.

The result of each call depends on its arguments alone, so a call whose process ended is made again.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from anybatch.core import RankError
from anybatch.parallel.on_ray import Ended, Lost, RayCluster
from anybatch.parallel.server import Array, Layout, ServerShard
from anybatch.parallel.worker import Folded, Worker
from anybatch.state import rng

_TRIES = 3  # processes that may end with one call
_SLOW = 3  # a unit that takes this many times the usual time is given to a second worker
_LEAST = 0.5  # seconds before a unit counts as slow: short times vary more
_QUEUED = 2  # units per worker: the rows of the second arrive while it computes the first


class Lease(NamedTuple):
    """A unit given to a worker."""

    worker: Any
    round: int
    unit: int
    parts: list[Any]  # references to what goes to each shard
    began: float


class Scheduler:
    """The driver of the rounds of one training."""

    def __init__(
        self,
        cluster: RayCluster,
        make: Callable[[Any], Any],
        layout: Layout,
        expected: Mapping[str, str],
        *,
        workers: int,
    ) -> None:
        self.cluster, self.layout = cluster, layout
        self._of_worker = cluster.put(make), cluster.put(layout), expected
        self.shards = [self._start_shard(index) for index in range(len(layout.pieces))]
        self.workers: list[Any] = []
        self._leases: dict[Any, Lease] = {}  # by the reference to a `Folded`
        self.snapshots: list[tuple[Any, ...]] = []  # parameters and state of each shard at this version
        self.version = self._round = 0  # updates since the parameters were loaded; folds
        self.counts: Counter[str] = Counter()  # pushes, bytes, repeated units, replacements
        self._usual: deque[float] = deque(maxlen=16)  # seconds of the last units
        self._last: dict[Any, float] = {}  # time at which each worker finished its last unit
        self._fixed: tuple[Any, ...] = ()
        for _ in range(workers):
            self.add_worker()

    def _start_shard(self, index: int) -> Any:
        return self.cluster.start(ServerShard, self._of_worker[1], index)

    def add_worker(self) -> None:
        """Add a worker, at any time."""
        worker = self.cluster.start(Worker, *self._of_worker)
        self.workers.append(worker)
        if self._fixed:
            self.cluster.call(worker, "fix", *self._fixed)

    def remove_worker(self, worker: Any = None) -> None:
        """Remove a worker, or the one that has least to do, at any time; its units go to others."""
        worker = worker or min(self.workers, key=self._held().__getitem__)
        self.cluster.kill(worker)
        self.workers.remove(worker)

    def _held(self) -> Counter[Any]:
        return Counter(one.worker for one in self._leases.values())

    def fix(self, settings: Sequence[Mapping[str, Any]], tensors: Sequence[Any]) -> None:
        """Send all workers the state that is not trained, before their next unit."""
        self._fixed = settings, *tensors
        for worker in self.workers:
            self.cluster.call(worker, "fix", *self._fixed)

    def load(self, values: Sequence[Any], states: Sequence[Any]) -> None:
        """Set the parameters of each shard, and references to its optimizer state."""
        self.snapshots = [(self.cluster.put(one), state) for one, state in zip(values, states, strict=True)]
        self.version += 1  # workers take the parameters anew

    def end(self) -> None:
        """End servers and workers."""
        for process in (*self.workers, *self.shards):
            self.cluster.kill(process)

    def fold(self, units: Sequence[Any], seed: int) -> list[Folded]:
        """Have each unit folded; its sums stay on the machine of its worker."""
        self._round += 1
        self.failed: int | None = None  # the unit in which the model or the loss raised an error
        self._units, self._seed = units, seed
        self._todo, self._tries = deque(range(len(units))), Counter[int]()
        self._done: dict[int, tuple[Folded, list[Any]]] = {}
        while len(self._done) < len(units):
            self._hand_out()
            is_idle = self._usual and len(self._held()) < len(self.workers)
            reference = self.cluster.wait([*self._leases], self._patience() if is_idle else None)
            if reference is not None:  # otherwise it is time for a back-up
                self._returned(reference)
        done = [self._done[unit] for unit in range(len(units))]
        self._sums = [parts for _, parts in done]
        return [folded for folded, _ in done]

    def _hand_out(self) -> None:
        """Give units to workers."""
        values = [values for values, _ in self.snapshots]
        for queued in range(_QUEUED):
            held = self._held()
            for worker in self.workers:
                if held[worker] > queued:
                    continue
                unit = self._todo.popleft() if self._todo else None
                if unit is None and not held[worker]:
                    unit = self._late()
                if unit is None:
                    return
                call = self.version, rng.derive_seed(self._seed, unit), self._units[unit], *values
                folded, *parts = self.cluster.call(worker, "fold", *call, returns=1 + len(self.shards))
                self._leases[folded] = Lease(worker, self._round, unit, parts, self.cluster.clock())

    def _patience(self) -> float:
        """Return the seconds after which a unit is slow."""
        return max(_LEAST, _SLOW * median(self._usual))

    def _late(self) -> int | None:
        """Return a unit that one worker has had for too long."""
        if self._usual:
            late = self.cluster.clock() - self._patience()
            held = [one for one in self._leases.values() if one.round == self._round]
            counts = Counter(one.unit for one in held)
            for one in held:
                if one.began <= late and counts[one.unit] == 1 and one.unit not in self._done:
                    self.counts["back-ups"] += 1
                    return one.unit
        return None

    def _returned(self, reference: Any) -> None:
        lease = self._leases.pop(reference)
        worker, unit = lease.worker, lease.unit
        is_wanted = lease.round == self._round and unit not in self._done
        try:
            folded: Folded = self.cluster.get(reference)
        except (Ended, Lost) as error:
            if worker in self.workers:
                self.counts["workers replaced"] += 1
                self.remove_worker(worker)
                self.add_worker()
            if is_wanted:
                self._tries[unit] += 1
                if self._tries[unit] > _TRIES:
                    raise _ended("workers", error) from None
                self._todo.appendleft(unit)
            return
        except Exception:
            if is_wanted:
                self.failed = unit
                raise
            return
        now = self.cluster.clock()
        self._usual.append(now - max(lease.began, self._last.get(worker, 0.0)))
        self._last[worker] = now
        if is_wanted:
            self._done[unit] = folded, lease.parts
            self.counts["pushes"] += len(folded.sent)
            self.counts["bytes pushed"] += sum(folded.sent)
        else:
            self.counts["units repeated"] += 1

    def merge(self, factors: Sequence[float], tries: int = _TRIES) -> float:
        """Add up the sums of all units, and divide; return the sum of squares of the whole gradient."""
        calls = [([*factors], *parts) for parts in zip(*self._sums, strict=True)]
        try:
            squares, found = self._of_all("merge", calls)
        except Lost:  # sums of a worker are gone with its machine
            if not tries:
                raise
            self.fold(self._units, self._seed)
            return self.merge(factors, tries - 1)
        self._gradients = [gradient for _, gradient in found]
        return sum(squares)

    def update(self, scale: float, used: frozenset[int], options: Any) -> list[Array]:
        """Make the update of every shard, or of none; return the new parameters of each."""
        pairs = zip(self.snapshots, self._gradients, strict=True)
        calls = [(*snapshot, gradient, scale, used, options) for snapshot, gradient in pairs]
        values, self.snapshots = self._of_all("update", calls)
        self.version += 1
        return values

    def _of_all(self, method: str, calls: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, ...]]]:
        """Call all servers at once, and those that ended again; return the first values, and references."""

        def call(index: int) -> list[Any]:
            return self.cluster.call(self.shards[index], method, *calls[index], returns=2)

        found = [call(index) for index in range(len(calls))]
        values: list[Any] = []
        for index in range(len(calls)):
            tries = 0
            while len(values) == index:
                try:
                    values.append(self.cluster.get(found[index][0]))
                except Ended as error:
                    tries += 1
                    if tries > _TRIES:
                        raise _ended("servers", error) from None
                    self.counts["servers replaced"] += 1
                    self.cluster.kill(self.shards[index])
                    self.shards[index] = self._start_shard(index)
                    found[index] = call(index)
        return values, [tuple(one) for one in found]


def _ended(what: str, error: Exception) -> RankError:
    return RankError(
        f"Expected {what} to finish, got {_TRIES + 1} that ended with one call ({error}). No update was "
        "made. Look for too little memory on the host, and read their log."
    )
