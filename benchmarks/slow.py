"""A slow network in a box: a process group whose collectives take as long as bytes and hops say.

Gloo moves the data over loopback. A thread then waits for as long as a network of this speed would take, one
collective after the other, so that what overlaps with computation is measured and not believed.
"""

import queue
import threading
import time
from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.futures import Future

BYTES_PER_S = 10e9 / 8
LATENCY_S = 100e-6


def seconds(op: str, nbytes: int, ranks: int, *, is_tree: bool = False) -> float:
    """Return the time of a collective over rings or trees, with `nbytes` sent by each rank."""
    hops = max(ranks - 1, 0).bit_length() if is_tree else ranks - 1
    if op == "allreduce":
        volume = 2 * nbytes * (1 if is_tree else (ranks - 1) / ranks)
        return 2 * hops * LATENCY_S + volume / BYTES_PER_S
    return hops * LATENCY_S + (ranks - 1) * nbytes / BYTES_PER_S


class _Slow(dist._Work):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value, self.future, self.over = value, Future[Any](), threading.Event()

    def finish(self) -> None:
        self.over.set()
        self.future.set_result(self.value)

    def wait(self, timeout: Any = None) -> bool:
        return self.over.wait()

    def is_completed(self) -> bool:
        return self.over.is_set()

    def get_future(self) -> Any:
        return self.future


class SlowGroup(dist.ProcessGroup):
    """Gloo over a network of 10 Gbit/s and 100 us.

    Attributes:
        sent: how many collectives, and bytes of this rank in them, by kind.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._inner, self._size = dist.ProcessGroupGloo(store, rank, size, timeout), size
        self._queue: queue.Queue[Any] = queue.Queue()
        self.sent: Counter[str] = Counter()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            inner, took, work = self._queue.get()
            inner.wait()
            time.sleep(took)
            work.finish()

    def _send(self, op: str, inner: Any, tensors: Any) -> _Slow:
        nbytes = sum(one.nbytes for one in tensors)
        self.sent[op] += 1
        self.sent[f"bytes of {op}"] += nbytes
        work = _Slow(tensors)
        self._queue.put((inner, seconds(op, nbytes, self._size), work))
        return work

    def allreduce(self, tensors: Any, options: Any = None, *, opts: Any = None) -> Any:
        return self._send("allreduce", self._inner.allreduce(tensors, *_given(options or opts)), tensors)

    def allgather(self, outputs: Any, tensors: Any, options: Any = None, *, opts: Any = None) -> Any:
        return self._send(
            "allgather", self._inner.allgather(outputs, tensors, *_given(options or opts)), tensors
        )

    def broadcast(self, tensors: Any, options: Any = None, *, opts: Any = None) -> Any:
        return self._inner.broadcast(tensors, *_given(options or opts))

    def barrier(self, options: Any = None, *, opts: Any = None) -> Any:
        return self._inner.barrier(*_given(options or opts))

    def getBackendName(self) -> str:  # noqa: N802 - torch asks for it
        return "slow"


def _given(options: Any) -> tuple[Any, ...]:
    if options is None:
        return ()
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return (options,)


def start(store: str, rank: int, size: int) -> SlowGroup:
    """Make it the default group."""
    made: list[SlowGroup] = []

    def make(*args: Any) -> SlowGroup:
        made.append(SlowGroup(*args))
        return made[0]

    dist.Backend.register_backend("slow", make, devices=["cpu"])
    dist.init_process_group("slow", init_method=f"file://{store}", rank=rank, world_size=size)
    return made[0]
