"""Gloo ranks in child processes: one group runs many cases, and a watchdog ends only its own children."""

import importlib
import inspect
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = timedelta(seconds=20)  # after which a collective gives up


class HangError(Exception):
    """A rank has not answered in time."""


def _serve(rank: int, size: int, store: str, calls: Connection) -> None:
    """Carry out what comes: a function's module and name, and arguments; until None."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    where = f"file://{store}"
    dist.init_process_group("gloo", where, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    while (call := calls.recv()) is not None:
        try:
            module, name, args = pickle.loads(call)
            function = getattr(importlib.import_module(module), name)
            answer = "value", getattr(function, "on_rank", function)(rank, size, *args)
        except BaseException:
            answer = "error", traceback.format_exc()
        calls.send(answer)
    dist.destroy_process_group()


class Ranks:
    """Child processes that are the ranks of one group."""

    def __init__(self, size: int, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.size, self._calls = size, list[Connection]()
        self.children = list[Any]()
        for rank in range(size):
            mine, theirs = context.Pipe()
            child = context.Process(target=_serve, args=(rank, size, f"{folder}/store", theirs), daemon=True)
            child.start()
            theirs.close()  # so that the pipe ends with the child
            self._calls.append(mine)
            self.children.append(child)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(rank, size, *args)`, which is at the top of a module, on all ranks."""
        call = pickle.dumps((function.__module__, function.__name__, args))
        for calls in self._calls:
            calls.send(call)

    def answers(self, seconds: float = 60.0, *, silent: int = -1) -> list[tuple[str, Any]]:
        """("value", it), ("error", traceback) or ("ended", exit code) of each; `silent` is ended last."""
        got: dict[int, tuple[str, Any]] = {}
        end = time.monotonic() + seconds
        while len(got) < self.size:
            left = [calls for rank, calls in enumerate(self._calls) if rank not in got]
            if silent >= 0 and left == [self._calls[silent]]:
                self.children[silent].kill()
            ready = wait(left, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                late = sorted({*range(self.size)} - got.keys())
                raise HangError(f"ranks {late} gave nothing in {seconds:g} s")
            for calls in ready:
                rank = self._calls.index(calls)
                try:
                    got[rank] = calls.recv()
                except EOFError:
                    self.children[rank].join()
                    got[rank] = "ended", self.children[rank].exitcode
        return [got[rank] for rank in range(self.size)]

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 60.0) -> list[Any]:
        """What `function(rank, size, *args)` returned on each rank; AssertionError if one failed."""
        self.start(function, *args)
        answers = self.answers(seconds)
        for rank, (kind, value) in enumerate(answers):
            assert kind == "value", f"rank {rank} {kind}: {value}"
        return [value for _, value in answers]


@contextmanager
def spawned(size: int) -> Iterator[Ranks]:
    """Ranks of one group; at the end they are asked to end, or ended."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(size, folder)
        try:
            yield ranks
        finally:
            for calls in ranks._calls:
                with suppress(OSError):  # it has ended
                    calls.send(None)
            for child in ranks.children:
                child.join(3.0)
                if child.is_alive():
                    child.kill()
                    child.join()


def on_ranks(*sizes: int, seconds: float = 60.0) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of `test(rank, size, ...)`, whose result is to be the same on all ranks, to the bit."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        groups = {2: "two", 4: "four"}  # fixtures
        names = [*inspect.signature(test).parameters][2:]

        def run(**given: Any) -> None:
            for size in sizes:
                group = given[groups[size]]
                found = group.run(test, *(given[name] for name in names), seconds=seconds)
                assert all(one == found[0] for one in found), found

        kind = inspect.Parameter.KEYWORD_ONLY
        wanted = [inspect.Parameter(name, kind) for name in (*(groups[size] for size in sizes), *names)]
        run.__name__, run.__module__, run.__doc__ = test.__name__, test.__module__, test.__doc__
        vars(run).update(__signature__=inspect.Signature(wanted), on_rank=test)
        return run

    return decorate
