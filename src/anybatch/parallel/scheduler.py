"""The driver of a parameter server: leases units to workers, counts each once, replaces lost processes."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

from anybatch.core import NonFiniteLossError, RankError
from anybatch.parallel.server import COUNTED, NOT_FINITE, Array, Layout, ServerShard
from anybatch.parallel.worker import Folded, Worker
from anybatch.state import rng

_TRIES = 3  # workers that may end with one unit
_SLOW = 3  # a unit that takes this many times the usual time is given to a second worker
_LEAST = 0.5  # seconds before a unit counts as slow: short times vary more
_QUEUED = 2  # units per worker: the rows of the second arrive while it computes the first
_REVIVED = 20  # servers that may end in one update


class Ended(Exception):  # noqa: N818
    """The called process has ended."""


class Lost(RankError):  # noqa: N818
    """A value is lost with the machine that held it."""

    def __init__(self, said: str) -> None:
        super().__init__(
            f"Expected a cluster that keeps what it is given, got a value that is gone ({said}). No update "
            "was made. Go on from the last checkpoint."
        )


class Cluster(Protocol):
    """Processes that the driver calls. Values stay on their processes; references are passed on."""

    def put(self, value: Any) -> Any:
        """Store a value; return a reference."""
        ...

    def start(self, kind: type, *args: Any) -> Any:
        """Start a process with an object of this class; arguments may be references."""
        ...

    def call(self, process: Any, method: str, *args: Any, returns: int = 1) -> list[Any]:
        """Call a method without waiting, in the order of calls; return references to its results."""
        ...

    def wait(self, references: Sequence[Any], seconds: float | None = None) -> Any:
        """Return the first reference that is finished or failed; None after so many seconds."""
        ...

    def clock(self) -> float:
        """Return seconds."""
        ...

    def get(self, reference: Any) -> Any:
        """Return the value. Raise the call's error, `Ended` or `Lost`."""
        ...

    def kill(self, process: Any) -> None:
        """End a process."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...


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
        cluster: Cluster,
        make: Callable[[Any], Any],
        layout: Layout,
        expected: Mapping[str, str],
        *,
        workers: int,
    ) -> None:
        self.cluster, self.layout = cluster, layout
        self._of_worker = cluster.put(make), cluster.put(layout), expected
        self._layout = self._of_worker[1]
        self.shards = [cluster.start(ServerShard, self._layout, index) for index in range(len(layout.pieces))]
        self.workers: list[Any] = []
        self._leases: dict[Any, Lease] = {}  # by the reference to a `Folded`
        self.version = 0  # updates since the parameters were loaded
        self._round = self._revived = 0
        self.snapshots: list[tuple[Any, ...]] = []  # parameters and state of each shard at this version
        self._is_torn = False
        self.counts: Counter[str] = Counter()  # pushes, bytes, repeated units, replacements
        self._usual: deque[float] = deque(maxlen=16)  # seconds of the last units
        self._last: dict[Any, float] = {}  # time at which each worker finished its last unit
        self._fixed: tuple[Any, ...] = ()
        for _ in range(workers):
            self.add_worker()

    # ---- workers

    def add_worker(self) -> None:
        """Add a worker, at any time."""
        worker = self.cluster.start(Worker, *self._of_worker)
        self.workers.append(worker)
        if self._fixed:
            self.cluster.call(worker, "fix", *self._fixed)

    def fix(self, settings: Sequence[Mapping[str, Any]], tensors: Sequence[Any]) -> None:
        """Send all workers the state that is not trained, before their next unit."""
        self._fixed = settings, *tensors
        for worker in self.workers:
            self.cluster.call(worker, "fix", *self._fixed)

    def end(self) -> None:
        """End servers and workers."""
        for process in (*self.workers, *self.shards):
            self.cluster.kill(process)

    def remove_worker(self) -> None:
        """Remove a worker, at any time; its units go to others."""
        worker = min(self.workers, key=self._held().__getitem__)
        self.cluster.kill(worker)
        self.workers.remove(worker)

    def _held(self) -> Counter[Any]:
        return Counter(one.worker for one in self._leases.values())

    # ---- servers

    def load(self, values: Sequence[Any], states: Sequence[Any]) -> None:
        """Set parameters and optimizer state (or a reference to it) of each shard."""
        put = self.cluster.put
        self.snapshots = [
            (put(value), put(state) if isinstance(state, list) else state)
            for value, state in zip(values, states, strict=True)
        ]
        self.version += 1  # invalidates cached parameters
        self.reload()

    def reload(self) -> None:
        """Reset every shard to the snapshots."""
        for index in range(len(self.shards)):
            self._load(index)
        self._is_torn = False

    def _load(self, index: int) -> Any:
        return self.cluster.call(self.shards[index], "load", self.version, *self.snapshots[index])[0]

    def _revive(self, index: int, done: Sequence[tuple[Any, ...]]) -> None:
        """Replace a server that ended: load the snapshot, and repeat the calls done since."""
        self.counts["servers replaced"] += 1
        self._revived += 1
        if self._revived > _REVIVED:
            raise RankError(
                f"Expected servers that stay, got {self._revived} that ended in one update. No update was "
                "made. Look for too little memory on the host, and read their log."
            )
        self.cluster.kill(self.shards[index])
        self.shards[index] = self.cluster.start(ServerShard, self._layout, index)
        try:
            self.cluster.get(self._load(index))
        except Ended:
            return  # the next call revives it again
        for call in done:
            self.cluster.call(self.shards[index], *call)

    def _answered(
        self, index: int, done: Sequence[tuple[Any, ...]], call: tuple[Any, ...], references: list[Any]
    ) -> list[Any]:
        """Return references to the results of a call of a shard, repeated until it answers."""
        while True:
            try:
                self.cluster.get(references[0])
            except Ended:
                self._revive(index, done)
                references = self.cluster.call(self.shards[index], *call, returns=len(references))
            else:
                return references

    # ---- an update

    def fold(self, units: Sequence[Any], seed: int) -> list[Folded]:
        """Have each unit folded once, and its sums pushed to every shard."""
        if self._is_torn:
            self.reload()
        self._begin(len(units))
        for shard in self.shards:
            self.cluster.call(shard, "begin", self.version)
        values = [values for values, _ in self.snapshots]
        pushes: dict[Any, tuple[int, int]] = {}  # shard and unit
        while len(self._done) < len(units) or pushes:
            self._hand_out(
                lambda unit: ("fold", self.version, rng.derive_seed(seed, unit), units[unit], *values)
            )
            is_idle = self._usual and len(self._held()) < len(self.workers)
            seconds = self._patience() if is_idle else None
            reference = self.cluster.wait([*self._leases, *pushes], seconds)
            if reference is None:  # time for a back-up
                continue
            if reference in pushes:
                pushes = self._pushed(reference, pushes)
            elif (lease := self._returned(reference)) is not None:
                pushes |= {
                    self._push(index, lease.unit): (index, lease.unit) for index in range(len(self.shards))
                }
        return [self._done[unit][0] for unit in range(len(units))]

    def _begin(self, units: int) -> None:
        self._round += 1
        self._revived = 0
        self.failed: int | None = None  # the unit in which the model or the loss raised an error
        self._todo: deque[int] = deque(range(units))
        self._done: dict[int, tuple[Folded, list[Any]]] = {}
        self._tries: Counter[int] = Counter()

    def _hand_out(self, call: Callable[[int], tuple[Any, ...]]) -> None:
        """Give units to workers."""
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
                folded, *parts = self.cluster.call(worker, *call(unit), returns=1 + len(self.shards))
                self._leases[folded] = Lease(worker, self._round, unit, parts, self.cluster.clock())

    def _patience(self) -> float:
        return max(_LEAST, _SLOW * median(self._usual))

    def _late(self) -> int | None:
        if self._usual:
            late = self.cluster.clock() - self._patience()
            held = [one for one in self._leases.values() if one.round == self._round]
            counts = Counter(one.unit for one in held)
            for one in held:
                if one.began <= late and counts[one.unit] == 1 and one.unit not in self._done:
                    self.counts["back-ups"] += 1
                    return one.unit
        return None

    def _returned(self, reference: Any) -> Lease | None:
        lease = self._leases.pop(reference)
        is_current = lease.round == self._round
        try:
            folded = self.cluster.get(reference)
        except (Ended, Lost) as error:
            if lease.worker in self.workers:
                self.counts["workers replaced"] += 1
                self.cluster.kill(lease.worker)
                self.workers.remove(lease.worker)
                self.add_worker()
            if is_current:
                self._again(lease.unit, str(error))
            return None
        except BaseException as error:
            folded = error
        if isinstance(folded, BaseException):
            if not is_current:
                return None
            self.failed = lease.unit
            raise folded
        now = self.cluster.clock()
        self._usual.append(now - max(lease.began, self._last.get(lease.worker, 0.0)))
        self._last[lease.worker] = now
        if not is_current or lease.unit in self._done:
            self.counts["units repeated"] += 1
            return None
        self._done[lease.unit] = folded, lease.parts
        return lease

    def _again(self, unit: int, said: str) -> None:
        held = any(one.unit == unit and one.round == self._round for one in self._leases.values())
        if unit in self._done or unit in self._todo or held:
            return
        self._tries[unit] += 1
        if self._tries[unit] > _TRIES:
            raise RankError(
                f"Expected workers to finish unit {unit} of {len(self._done) + len(self._todo) + 1}, got "
                f"{self._tries[unit]} that ended with it ({said}). No update was made. Look for too little "
                "memory on the host, and read their log."
            )
        self._todo.appendleft(unit)

    def _push(self, index: int, unit: int) -> Any:
        folded, parts = self._done[unit]
        self.counts["pushes"] += 1
        self.counts["bytes pushed"] += folded.sent[index]
        return self.cluster.call(self.shards[index], "push", self.version, unit, parts[index])[0]

    def _pushed(self, reference: Any, pushes: dict[Any, tuple[int, int]]) -> dict[Any, tuple[int, int]]:
        index, unit = pushes.pop(reference)
        try:
            refused = self.cluster.get(reference)
        except Lost:
            self._done.pop(unit, None)
            self._again(unit, "its sums were lost")
            return {one: at for one, at in pushes.items() if at[1] != unit}
        except Ended:
            self._revive(index, ())
            again = {self._push(index, other): (index, other) for other in self._done}
            return {one: at for one, at in pushes.items() if at[0] != index} | again
        if refused and refused != COUNTED:
            self.counts["pushes refused"] += 1
            if refused == NOT_FINITE:
                raise NonFiniteLossError(
                    f"Expected finite gradients, got NaN or infinity from unit {unit}. No update was made. "
                    "Look for bad data in its rows, or too high a learning rate."
                )
            raise RankError(
                f"Expected a push that fits, got one that shard {index} refuses: {refused}. No update was "
                "made. Start workers and servers with the same model and version of anybatch."
            )
        return pushes

    def seal(self, factors: Sequence[float]) -> float:
        """Divide the sums; return the sum of squares of the whole gradient."""
        units = len(self._done)
        call = "seal", self.version, units, [*factors]
        return sum(self._of_all(call, returns=1)[0])

    def commit(
        self, factors: Sequence[float], scale: float, used: frozenset[int], options: Any
    ) -> list[Array]:
        """Make the update on every shard, or on none; return the new parameters of each."""
        call = "commit", self.version, len(self._done), [*factors], scale, used, options
        self._is_torn = True  # until all shards have made it
        values, snapshots = self._of_all(call, returns=2)
        self.snapshots, self._is_torn = snapshots, False
        self.version += 1
        return values

    def _of_all(self, call: tuple[Any, ...], returns: int) -> tuple[list[Any], list[Any]]:
        """Call all shards at once; repeat the call for those that ended, after their accepted pushes."""
        asked = [self.cluster.call(shard, *call, returns=returns) for shard in self.shards]
        found: list[Any] = []
        for index, one in enumerate(asked):
            done = [
                ("push", self.version, unit, parts[index]) for unit, (_, parts) in sorted(self._done.items())
            ]
            found.append(tuple(self._answered(index, done, call, one)))
        return [self.cluster.get(one[0]) for one in found], found
