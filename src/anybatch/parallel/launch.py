"""Ranks on this machine, started by torchrun's agent, and the error of the first that fails."""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from anybatch.core import PlanError, RankError


def is_launched() -> bool:
    """Return True if torchrun, or `launch`, started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def launch(count: int, arguments: Sequence[str]) -> None:
    """Run `python -m` with these arguments as so many ranks on this machine, and wait until they end.

    They use the loopback interface and share the CPU's threads. Ctrl-C and SIGTERM go to all ranks, which
    have 30 s to end; then raise KeyboardInterrupt or SystemExit. If a rank fails, end the others and raise a
    RankError with the error of the first.
    """
    if not dist.is_available():
        raise PlanError(f"Expected a torch with torch.distributed for {count} ranks, got none. Use one rank.")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    before = {*os.environ}  # the agent changes it, too
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // count)))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    agent = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(count), "--log-dir"]
    logging.disable(logging.CRITICAL)  # silences the agent; errors are raised once, below
    try:
        with tempfile.TemporaryDirectory() as folder:  # ranks record errors here
            run.run(run.parse_args([*agent, folder, "--module", *arguments]))
    except ChildFailedError as error:
        raise RankError(_why(error.failures.items())) from None
    except SignalException as stop:
        if stop.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + stop.sigval) from None
    finally:
        logging.disable(logging.NOTSET)
        for name in {*os.environ} - before:
            del os.environ[name]


def record(error: BaseException) -> None:
    """Report the error that ends this rank to its launcher."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


def _why(failures: Iterable[tuple[int, Any]]) -> str:
    """Return the first rank's own error; otherwise how a rank ended; otherwise an error about other ranks."""
    found: list[tuple[int, str]] = []
    for rank, failure in failures:
        if isinstance(failure.message, dict):  # from `record`
            name, _, text = failure.message["message"].partition(": ")
            found.append((2 if name == RankError.__name__ else 0, text))
        else:
            how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
            found.append((1, f"Expected all ranks to finish, got rank {rank} that ended with {how}."))
    return min(found, key=lambda one: one[0])[1]
