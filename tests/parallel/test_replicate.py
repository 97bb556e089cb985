"""Data parallelism gives the update of the whole batch in one process, however rows fall on ranks."""

import math
import os
import re
import socket
import subprocess
import sys
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import anybatch as ab
from anybatch.core.errors import RankError
from anybatch.parallel import Cast, DeepGradientCompression, Replicate
from anybatch.testing import relative_error, tolerance
from tests.faults.faulty import build, make_batch
from tests.parallel import drawn, faults
from tests.parallel.drawn import WAYS, sending
from tests.parallel.pairs import NO_MEMORY, Pair, digest, told, whole
from tests.parallel.spawned import Ranks, on_ranks
from tests.snapshots import changes, snapshot

FLOAT64 = tolerance(torch.float64, 4)


@on_ranks(2, 4)
def test_any_split_is_the_whole_batch(rank: int, size: int) -> object:
    return drawn.several(rank, size, 1000 * (size > 2), 60 if size == 2 else 40, False)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, generator=drawn).to(dtype), torch.randint(3, (rows,), generator=drawn)


OPTIONS: list[dict[str, Any]] = [
    {"clip_norm": 0.1},
    {"accumulate": torch.float64, "clip_value": 0.01},
    {"non_finite": "drop", "micro_batch": 2},
    {"precision": "bf16-true", "micro_batch": 2},
    {"precision": "fp16-mixed", "micro_batch": 2},
    {"memory": "80%"},
]


@pytest.mark.parametrize("sizes", [[7, 5], [0, 12], [3, 9]], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, options.values())))
@on_ranks(2)
def test_parameters_are_equal_to_the_bit_and_those_of_one_process(
    rank: int, size: int, sizes: list[int], options: dict[str, Any]
) -> object:
    dtype = torch.float32 if "precision" in options else torch.float64
    low = tolerance(torch.float16, 4) if "precision" in options else None
    pair = Pair(network(dtype), "torch", "adamw", both=options, bound=low or FLOAT64)
    reports = [pair.update(batch(12, dtype), sizes, rank) for _ in range(4)]
    return pair.bits, digest([*[r.loss for r in reports], *[r.grad_norm for r in reports]])


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CODECS: dict[str, tuple[Any, Any, float]] = {  # it has a momentum of its own where it keeps something back
    "all sent": (partial(DeepGradientCompression, 0.0, warmup_updates=0), "sgd", FLOAT64),
    "bf16": (partial(Cast, "bf16"), MOMENTUM, tolerance(torch.bfloat16, 4)),
    "one in twenty": (partial(DeepGradientCompression, 0.95, warmup_updates=0), "sgd", math.inf),
}


@pytest.mark.parametrize("name", CODECS)
@on_ranks(2)
def test_compression(rank: int, size: int, name: str) -> object:
    """The third update may fail after it was sent: it changes no bit of what is made then."""
    make, optimizer, bound = CODECS[name]
    bits, fails = [], list[bool]()

    def fail(gradients: Any) -> None:
        if fails and fails.pop():
            raise ValueError("no")

    callback = ab.Callback()
    callback.gradients = fail
    for is_faulty in (False, True):
        options: Any = {"strategy": Replicate(compression=make()), "callbacks": [callback]}
        pair = Pair(network(), "torch", optimizer, micro_batch=2, bound=None, **options)
        alone = Pair(network(), "torch", MOMENTUM, strategy="local", bound=None)
        for number in range(4):
            if is_faulty and number == 2:
                fails.append(True)
                assert told(lambda: pair.update(batch(10), [7, 3], rank)) == "ValueError: no"  # noqa: B023
            pair.update(batch(10), [7, 3], rank)
            alone.step(batch(10))
        assert relative_error(whole(pair.parts), whole(alone.parts)) <= bound
        dense = 8 * sum(p.numel() for p in pair.parts.parameters())
        assert (pair.step.strategy.bytes_sent < dense) == (name != "all sent")
        bits.append(pair.bits)
    assert bits[0] == bits[1]
    return bits


@on_ranks(2)
def test_code_of_the_caller_in_the_last_backward_meets_no_bucket_under_way(rank: int, size: int) -> object:
    """Collectives of a callback, for which rank 1 is late."""

    class Late(ab.Callback):
        def micro_batch(self, event: Any) -> None:
            time.sleep(0.02 * rank)
            dist.all_reduce(torch.ones(3))

    found, rows = set[str](), torch.randn(6 * size, 6).split(6)[rank]
    for way in WAYS:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)])
        pair = Pair(model, nn.MSELoss, "sgd", micro_batch=2, callbacks=[Late()], check=False)
        with sending(way):
            for _ in range(4):
                pair.step((rows, rows))
        found.add(pair.bits)
    assert len(found) == 1
    return found


CELLS = {
    "out of memory in forward": (("forward", 1, NO_MEMORY), {}, "updated"),
    "out of memory in backward": (("end", 1, NO_MEMORY), {}, "updated"),
    "out of memory after something reached .grad": (("mid", 1, NO_MEMORY), {}, "updated"),
    "overflow at a loss scale": (("mid", 1, math.inf), {"precision": "fp16-mixed"}, "updated"),
    "not finite, raise": (("row", 5, math.nan), {}, "NonFiniteLossError"),
    "not finite, drop": (("row", 5, math.nan), {"non_finite": "drop"}, "dropped"),
    "not finite, skip": (("row", 5, math.nan), {"non_finite": "skip"}, "skipped"),
    "anything else": (("mid", 1, faults.NO), {}, "RankError"),
    "Ctrl-C": (("forward", 1, KeyboardInterrupt()), {}, "RankError"),
}


def faulted(rank: int, size: int, cell: str, variant: str) -> Any:
    planted, options, _ = CELLS[cell]
    return faults.faulted(rank, size, 1, planted, kind="plain", variant=variant, **options)


@pytest.mark.parametrize("variant", ["divided early", "whole batch"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_fault_on_one_rank(two: Ranks, cell: str, variant: str) -> None:
    expected = CELLS[cell][2]
    if (cell, variant) == ("not finite, drop", "whole batch"):
        expected = "NonFiniteLossError"  # rows that meet in the loss cannot be left out
    answers = two.run(faulted, cell, variant)
    faults.assert_agreed(answers)
    if expected.endswith("Error"):
        assert answers[0]["error"] == expected
        said = ["on rank 1", "No rank has made the update"]
        assert expected != "RankError" or all(one in answers[0]["said"] for one in said)
    else:
        made = expected != "skipped", expected == "dropped"
        assert (answers[0]["updated"], bool(answers[0]["dropped"])) == made


def test_drawn_faults_are_agreed_upon(two: Ranks, four: Ranks) -> None:
    for ranks, count in ((two, 24), (four, 16)):
        faults.assert_all_agreed(ranks, "drawn", 0, count)


@on_ranks(2)
def test_a_window_that_ends_on_one_rank_ends_on_all(rank: int, size: int) -> None:
    step = build("plain")
    window, before = step.window(), snapshot(step)
    window.add(make_batch(rank))
    if rank:
        window.discard()
    else:
        assert "on rank 1" in told(window.close)
    assert not changes(before, snapshot(step))
    assert step(make_batch(rank)).updated


@on_ranks(2)
def test_a_failure_in_the_update_ends_the_others_at_their_next_step(rank: int, size: int) -> None:
    fails = [rank == 1]
    step = build("plain", scheduler=lambda made: LambdaLR(made, lambda at: 1 / (1 - (at > 0 and fails[0]))))
    if rank:
        assert told(lambda: step(make_batch(rank))) == "ZeroDivisionError: division by zero"
        return
    step(make_batch(rank))
    with pytest.raises(RankError, match="ZeroDivisionError on rank 1 after update 1, which all ranks have"):
        step(make_batch(rank))


SLURM = """
import torch
import anybatch as ab
from anybatch.parallel import rank, ranks

torch.manual_seed(0)
model, x = torch.nn.Linear(3, 2).double(), torch.arange(30.0).view(10, 3).double() / 30
step = ab.Step(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
mine = slice(rank(), None, ranks())
print(ranks(), step((x[mine], x[mine, :2])).rows, model.weight.tolist())
"""


@pytest.mark.slow
def test_torchrun_starts_ranks() -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, sys.executable, "-c", SLURM]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.findall(r"2 10 \[\[[^\[]*\], \[[^\[]*\]\]", said)  # ranks share one output
    assert len(found) == 2
    assert len({*found}) == 1


def test_ranks_start_where_srun_names_them() -> None:
    """Without torchrun: a script for Slurm sets four variables."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    named = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    command, both = [sys.executable, "-c", SLURM], []
    for number in ("0", "1"):
        own = named | {"RANK": number, "WORLD_SIZE": "2", "SLURM_PROCID": number}
        both.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True))
    said, other = [one.communicate(timeout=120)[0] for one in both]
    assert said == other
    assert said.startswith("2 10 ")
