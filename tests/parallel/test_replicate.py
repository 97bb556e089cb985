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
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import anybatch as ab
from anybatch.core.errors import RankError
from anybatch.parallel import Cast, DeepGradientCompression, Replicate
from anybatch.testing import relative_error, tolerance
from tests.faults.faulty import NO_MEMORY, build, make_batch, spread
from tests.parallel import drawn, faults
from tests.parallel.drawn import WAYS, sending
from tests.parallel.pairs import Pair, digest, told, whole
from tests.parallel.spawned import Ranks, on_ranks

FLOAT64 = tolerance(torch.float64, 4)
batch = partial(make_batch, 1, dtype=torch.float64)


@on_ranks(2, 4)
def test_any_split_is_the_whole_batch(rank: int, size: int) -> object:
    return drawn.several(rank, size, 1000 * (size > 2), 60 if size == 2 else 40, False)


@pytest.mark.parametrize("name", drawn.MUTATIONS)
def test_mistakes_are_found(two: Ranks, name: str) -> None:
    assert sum(two.run(drawn.broken, name, (20, 6)))


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


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
    is_low = "precision" in options
    dtype, bound = (torch.float32, tolerance(torch.float16, 4)) if is_low else (torch.float64, FLOAT64)
    pair = Pair(network(dtype), "torch", "adamw", both=options, bound=bound)
    reports = [pair.update(batch(12, dtype=dtype), sizes, rank) for _ in range(4)]
    return pair.bits, digest([*[r.loss for r in reports], *[r.grad_norm for r in reports]])


@on_ranks(2)
def test_collectives_do_not_depend_on_the_number_of_micro_batches(rank: int, size: int) -> None:
    for micro_batch in (1, 3, None):
        pair = Pair(network(), "torch", micro_batch=micro_batch)
        wrapped = {name: mock.Mock(wraps=getattr(dist, name)) for name in ("all_gather", "all_reduce")}
        with mock.patch.multiple(dist, **wrapped):
            for _ in range(4):
                pair.update(batch(14), [8, 6], rank)
        assert [one.call_count for one in wrapped.values()] == [4, 4]  # a message and a sum in each step


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CODECS: dict[str, tuple[Any, Any, float]] = {  # it has a momentum of its own where it keeps something back
    "all sent": (partial(DeepGradientCompression, 0.0, warmup_updates=0), "sgd", FLOAT64),
    "bf16": (partial(Cast, "bf16"), MOMENTUM, tolerance(torch.bfloat16, 4)),
    "one in twenty": (partial(DeepGradientCompression, 0.95, warmup_updates=0), "sgd", math.inf),
}


class Refusing(ab.Callback):  # fails after gradients were sent, and before the update
    refuses = False

    def gradients(self, gradients: Any) -> None:
        assert not self.refuses, "no"


@pytest.mark.parametrize("name", CODECS)
@on_ranks(2)
def test_compression(rank: int, size: int, name: str) -> object:
    """The third update may fail before and after it was sent: it changes no bit of what is made then."""
    make, optimizer, bound = CODECS[name]
    bits = []
    for fails in (False, True):
        options: Any = {"strategy": Replicate(compression=make()), "callbacks": [refusing := Refusing()]}
        pair, sizes = Pair(network(), "torch", optimizer, micro_batch=2, bound=None, **options), [7, 3]
        alone = Pair(network(), "torch", MOMENTUM, strategy="local", bound=None)
        for number in range(4):
            if fails and number == 2:
                x, y = batch(10)
                said = told(lambda: pair.update((x[:, :3], y) if rank else (x, y), sizes, rank))  # noqa: B023
                assert ("RuntimeError" if rank else "RankError") in said
                refusing.refuses = True
                assert told(lambda: pair.update((x, y), sizes, rank)) == "AssertionError: no"  # noqa: B023
                refusing.refuses = False
            pair.update(batch(10), sizes, rank)
            alone.step(batch(10))
        assert relative_error(whole(pair.parts), whole(alone.parts)) <= bound
        dense = 8 * sum(p.numel() for p in pair.parts.parameters())
        assert (pair.step.strategy.bytes_sent < dense) == (name != "all sent")
        bits.append(pair.bits)
    assert bits[0] == bits[1]
    return bits


@pytest.mark.parametrize("hooks", [False, True])
@on_ranks(2)
def test_code_of_the_caller_meets_no_bucket_under_way(rank: int, size: int, hooks: bool) -> object:
    """In the last backward: a hook that replaces gradients, collectives of its own; rank 1 is late."""

    def halve(layer: nn.Module, *_: Any) -> None:
        for p in layer.parameters():
            p.grad = None if p.grad is None else p.grad * 0.5

    class Late(ab.Callback):
        def micro_batch(self, event: Any) -> None:
            time.sleep(0.02 * rank)
            dist.all_reduce(torch.ones(3))

    found = set[str]()
    for way in WAYS:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)])
        for layer in [*model][1:] if hooks else []:
            layer.register_full_backward_hook(halve)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: Any = {"micro_batch": None if hooks else 2, "options": ab.Options(check=False)}
        step = ab.Step(model, nn.MSELoss(), optimizer, callbacks=[Late()], **options)
        rows = torch.randn(6 * size, 6).split(6)[rank]
        with sending(way):
            for _ in range(4):
                step((rows, rows))
        found.add(digest([*model.parameters()]))
    assert len(found) == 1
    return found


@on_ranks(2)
def test_a_look_on_one_rank_gathers_nothing_of_others(rank: int, size: int) -> object:
    """All rows meet on rank 0, which cuts them: only that rank looks."""
    rows = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(9)
    pair = Pair(nn.Linear(3, 4).double(), lambda: ab.WholeBatch(spread), "sgd", micro_batch=2)
    return pair.update(rows, [9, 0], rank).loss


# ---- when a rank fails: the last column of the design's fault table

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


@pytest.mark.parametrize("variant", ["divided early", "whole batch"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_fault_on_one_rank(two: Ranks, cell: str, variant: str) -> None:
    _, _, expected = CELLS[cell]
    if (cell, variant) == ("not finite, drop", "whole batch"):
        expected = "NonFiniteLossError"  # rows that meet in the loss cannot be left out
    answers = two.run(faulted, cell, variant)
    faults.assert_agreed(answers)
    other = answers[0]
    if expected.endswith("Error"):
        assert other["error"] == expected
        for part in ("on rank 1", "No rank has made the update"):
            assert expected != "RankError" or part in other["said"]
    else:
        assert (other["updated"], bool(other["dropped"])) == (expected != "skipped", expected == "dropped")


def faulted(rank: int, size: int, cell: str, variant: str) -> Any:
    planted, options, _ = CELLS[cell]
    return faults.faulted(rank, size, 1, planted, "step", "plain", variant, **options)


def test_drawn_faults_are_agreed_upon(two: Ranks, four: Ranks) -> None:
    """In the last micro-batch while buckets are summed: one, two in a row, on both ranks; and in windows."""
    for ranks, kind, count in ((four, "drawn", 16), (two, "last", 20), (two, "window", 6)):
        faults.assert_all_agreed(ranks, kind, 0, count)


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


# ---- how a group starts and ends

LOCAL = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
ENDS = """
import atexit
import weakref
import torch
import torch.distributed as dist
from anybatch.parallel import exchange, start_under_torchrun

start_under_torchrun()
exchange({})
group = weakref.ref(dist.group.WORLD)
weight = torch.ones(2, requires_grad=True)
weight.sum().backward()
torch.optim.SGD([weight]).step()  # imports what keeps the group
atexit._run_exitfuncs()
assert group() is None
"""


def test_the_group_is_gone_before_the_interpreter() -> None:
    """Else gloo's threads abort the process at its end, now and then."""
    alone = LOCAL | {"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": "0"}
    subprocess.run([sys.executable, "-c", ENDS], check=True, env=os.environ | alone)


SLURM = """
import torch
import anybatch as ab
from anybatch.parallel import rank, ranks

torch.manual_seed(0)
model, x = torch.nn.Linear(3, 2).double(), torch.arange(30.0).view(10, 3).double() / 30
step = ab.Step(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
mine = slice(rank(), None, ranks())
print(f"{ranks()} {step((x[mine], x[mine, :2])).rows} {model.weight.tolist()}\\n", end="")
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_torchrun_starts_ranks(count: int) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node"]
    command = [sys.executable, *launch, str(count), sys.executable, "-c", SLURM]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.findall(r"\d 10 \[\[[^\[]*\], \[[^\[]*\]\]", said)  # ranks share one output
    assert found == [found[0]] * count
    assert found[0].startswith(f"{count} 10 ")


def test_ranks_start_where_srun_names_them() -> None:
    """Without torchrun: a script for Slurm sets four variables."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    named = os.environ | LOCAL | {"MASTER_PORT": port, "WORLD_SIZE": "2"}
    start = partial(subprocess.Popen[str], [sys.executable, "-c", SLURM], stdout=subprocess.PIPE, text=True)
    both = [start(env=named | {"RANK": at, "SLURM_PROCID": at}) for at in "01"]
    said, other = [one.communicate(timeout=120)[0] for one in both]
    assert said == other
    assert said.startswith("2 10 ")
