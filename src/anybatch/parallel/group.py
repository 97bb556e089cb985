"""The process group: started under torchrun; messages of fixed size from every rank to every rank."""

import atexit
import importlib
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anybatch.core import RankError, accelerator, torch_private as private

_GRACE_S = 1.0  # for others to say that they wait
_SIZE = 4096  # bytes of a message; fixed, so that all ranks send and expect the same size

Group = Any  # a torch.distributed.ProcessGroup; None for the default one


def _is_there() -> bool:
    return dist.is_available() and dist.is_initialized()


def ranks(group: Group = None) -> int:
    """Return the number of processes in the process group; 1 if there is none."""
    return dist.get_world_size(group) if _is_there() else 1


def rank(group: Group = None) -> int:
    """Return the number of this process in the process group, from 0; 0 if there is none."""
    return dist.get_rank(group) if _is_there() else 0


def start_under_torchrun() -> None:
    """Initialise the process group under torchrun: gloo for messages, the accelerator's own for gradients.

    So it is where the environment names the ranks as torchrun does, as a script for Slurm may.
    """
    is_told = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if not dist.is_available() or dist.is_initialized() or not is_told:
        return
    # This module holds the group that exists when it is imported, and torch imports it in an optimizer's
    # first step. A held group cannot end before the interpreter does, and then gloo's threads abort.
    importlib.import_module("torch.distributed.nn.functional")
    kind = accelerator.find()
    own = dist.Backend.default_device_backend_map.get(kind or "cpu", "gloo")  # NCCL, XCCL, HCCL
    is_there = own != "gloo" and dist.is_backend_available(own)
    dist.init_process_group(f"cpu:gloo,{kind}:{own}" if is_there else "gloo")
    atexit.register(lambda: _is_there() and dist.destroy_process_group())


_messages = Counter[tuple[int, ...]]()  # sent so far, by the ranks of a group


class Message:
    """A message of at most 4,096 bytes as JSON to all ranks, under way.

    Each is one collective of 4 KiB per rank, so ranks at different places of the program can still exchange
    messages. Raises RankError if it is too long, or a rank ended or did not answer in time.
    """

    def __init__(self, message: Mapping[str, Any], group: Group = None) -> None:
        said = json.dumps(message, ensure_ascii=False).encode(errors="replace")
        if len(said) > _SIZE:
            raise RankError(
                f"Expected a message to other ranks of at most {_SIZE} bytes, got {len(said)}: "
                f"{said[:80].decode(errors='replace')}... Use fewer or shorter names of loss terms."
            )
        backends = str(dist.get_backend_config(group))  # such as "cpu:gloo,cuda:nccl"
        device = torch.device("cpu" if "cpu" in backends else backends.partition(":")[0])
        mine = torch.frombuffer(bytearray(said.ljust(_SIZE, b"\0")), dtype=torch.uint8).to(device)
        self._group, self._received = group, [torch.empty_like(mine) for _ in range(ranks(group))]
        _messages[tuple(dist.get_process_group_ranks(group))] += 1
        with answered(group):
            self._work: Any = dist.all_gather(self._received, mine, group=group, async_op=True)

    def heard(self) -> list[dict[str, Any]]:
        """Return the messages of all ranks, in order."""
        with answered(self._group):
            self._work.wait()
        rows = torch.stack(self._received).cpu().numpy()
        return [json.loads(row.tobytes().partition(b"\0")[0]) for row in rows]


def exchange(message: Mapping[str, Any], group: Group = None) -> list[dict[str, Any]]:
    """Send a message to all ranks; return the messages of all ranks, in order. See `Message`."""
    return Message(message, group).heard()


@contextmanager
def answered(group: Group = None) -> Generator[None]:
    """Raise a RankError if another rank takes no part in a collective; it names ranks that fell behind."""
    try:
        yield
    except RuntimeError as error:  # each backend has errors of its own
        found: list[str] = []
        asking = Thread(target=_behind, args=(group, found), daemon=True)
        asking.start()
        asking.join(5 * _GRACE_S)  # a store whose host stands still never answers
        said = " and ".join(found) or "at least one of them"
        raise RankError(
            f"Expected an answer from all {ranks(group)} ranks, got none from {said}: it has ended "
            f"or takes longer than the group's timeout ({str(error).splitlines()[0][:200]}). No update was "
            "made. Read that rank's error, then start all ranks again from the last checkpoint."
        ) from error


def leave_error(said: str, group: Group = None) -> None:
    """Store an error for other processes, which wait in a collective of this one until their timeout."""
    store: Any = private.default_store(dist.distributed_c10d)
    members = tuple(dist.get_process_group_ranks(group))
    with suppress(RuntimeError, AttributeError):
        store.set(f"anybatch {members} {dist.get_rank()} failed at {_messages[members]}", said[:600])


def _behind(group: Group, found: list[str]) -> None:
    """Find the ranks that failed, sent fewer messages than this one, or do not say that they wait, too."""
    members = tuple(dist.get_process_group_ranks(group))
    mine, keys = _messages[members], [f"anybatch {members} {member}" for member in members]
    waits = [f"{key} waits" for key in keys]
    store: Any = private.default_store(dist.distributed_c10d)
    with suppress(RuntimeError, AttributeError):  # its host may have ended, or there is none
        store.set(waits[dist.get_rank(group)], str(mine))
        end = monotonic() + _GRACE_S
        while monotonic() < end and not store.check(waits):
            sleep(0.05)  # `store.wait` writes a warning if its time is over
        for place, key in enumerate(keys):
            if store.check([failed := f"{key} failed at {mine}"]):
                found.append(f"rank {place} (it says {store.get(failed).decode()!r})")
            elif not store.check([waits[place]]):
                found.append(f"rank {place}")
            elif (count := int(store.get(waits[place]))) < mine:
                found.append(f"rank {place} (it sent {count} of {mine} messages)")


def sending_device(device: torch.device, group: Group = None) -> torch.device:
    """Return the device itself if the group has a backend for it; else the host, as for MPS with gloo."""
    kinds = [one.partition(":")[0] for one in str(dist.get_backend_config(group)).split(",")]
    return device if device.type in kinds else torch.device("cpu")


def all_gather_rows(values: Sequence[Tensor], counts: Sequence[int], group: Group = None) -> list[Tensor]:
    """Join the rows of all ranks, in order: each value has `counts[rank]` rows on each rank."""
    joined: list[Tensor] = []
    with answered(group):
        for value in values:
            # Collectives need equal shapes.
            mine = value.new_zeros(max(counts), *value.shape[1:])
            mine[: len(value)] = value
            mine = mine.to(sending_device(value.device, group))
            parts = [torch.empty_like(mine) for _ in counts]
            dist.all_gather(parts, mine, group=group)
            whole = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
            joined.append(whole.to(value.device))
    return joined


def gather_values(
    value: Any, agree: Callable[[int], Sequence[Mapping[str, Any]]], device: torch.device, group: Group = None
) -> list[Any]:
    """Return the values of all ranks; `agree` exchanges {"bytes": size}. The only place that unpickles.

    The bytes come from the other processes of this program, through the process group.
    """
    file = io.BytesIO()
    torch.save(value, file)
    mine = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(device)
    sizes = [one["bytes"] for one in agree(len(mine))]
    (joined,) = all_gather_rows([mine], sizes, group)
    parts = [io.BytesIO(bytes(part.tolist())) for part in joined.split(sizes)]
    return [torch.load(part, map_location=device, weights_only=False) for part in parts]
