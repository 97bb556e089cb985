"""Data parallelism gives the update of the whole batch in one process, however rows fall on ranks."""

import math
import os
import socket
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch

from anybatch.parallel import Cast, DeepGradientCompression
from anybatch.testing import relative_error, tolerance
from tests.faults.faulty import NO_MEMORY
from tests.parallel import cases, faults, refused
from tests.parallel.spawned import Ranks, spawned

FLOAT64 = tolerance(torch.float64, 4)
ROWS = [[7, 3, 0, 2], [0, 12, 0, 0], [3, 3, 3, 3]]  # of each rank; the last one of fewer ranks takes the rest


def test_any_split_over_two_ranks_is_the_whole_batch(two: Ranks) -> None:
    hashes = two.run(cases.several, 0, 60)
    assert all(one == hashes[0] for one in hashes)


def test_any_split_over_four_ranks_is_the_whole_batch(four: Ranks) -> None:
    hashes = four.run(cases.several, 1000, 40)
    assert all(one == hashes[0] for one in hashes)


@pytest.mark.parametrize("sizes", ROWS)
@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.1},
        {"accumulate": torch.float64, "clip_value": 0.01},
        {"non_finite": "drop", "micro_batch": 2},
        {"dtype": torch.float32, "precision": "bf16-true", "micro_batch": 2},
        {"dtype": torch.float32, "precision": "fp16-mixed", "micro_batch": 2},
        {"memory": "80%"},
    ],
    ids=["clipped", "clamped", "drop", "bf16", "fp16", "budget"],
)
def test_parameters_are_equal_to_the_bit_and_those_of_one_process(
    two: Ranks, options: dict[str, Any], sizes: list[int]
) -> None:
    sizes = [sizes[0], sum(sizes[1:])]
    first, second = two.run(cases.train, sizes, options)
    assert first["bits"] == second["bits"]
    alone = cases.train(0, 1, [sum(sizes)], {**options, "strategy": "local"})
    dtype = torch.float16 if "precision" in options else options.get("dtype", torch.float64)
    assert relative_error(first["parameters"], alone["parameters"]) <= tolerance(dtype, 4)
    assert [one[2] for one in first["reports"]] == [sum(sizes)] * 4


def test_collectives_do_not_depend_on_the_number_of_micro_batches(two: Ranks) -> None:
    counts = [two.run(cases.train, [8, 6], {"micro_batch": size})[0]["collectives"] for size in (1, 3, None)]
    assert counts == [8] * 3  # a message and a sum in each step


@pytest.mark.parametrize("name", cases.MUTATIONS)
def test_mistakes_are_found(two: Ranks, name: str) -> None:
    assert sum(two.run(cases.wrong, 0, 20, name))


SGD, MOMENTUM = (partial(torch.optim.SGD, lr=0.1, momentum=momentum) for momentum in (0.0, 0.9))
CODECS: dict[str, tuple[Any, Any, float]] = {  # it has a momentum of its own where it keeps something back
    "all sent": (partial(DeepGradientCompression, 0.0, warmup_updates=0), SGD, FLOAT64),
    "bf16": (partial(Cast, "bf16"), MOMENTUM, tolerance(torch.bfloat16, 4)),
    "one in twenty": (partial(DeepGradientCompression, 0.95, warmup_updates=0), SGD, math.inf),
}


@pytest.mark.parametrize("fails", [False, True], ids=["", "a failure between"])
@pytest.mark.parametrize("name", CODECS)
def test_compression(two: Ranks, name: str, fails: bool) -> None:
    make, optimizer, bound = CODECS[name]
    options: dict[str, Any] = {"compression": make, "optimizer": optimizer, "micro_batch": 2}
    first, second = two.run(cases.train, [7, 3], options, fails)
    assert all(map(torch.equal, first["parameters"], second["parameters"]))
    alone = cases.train(0, 1, [10], {"optimizer": MOMENTUM, "strategy": "local"})
    assert relative_error(first["parameters"], alone["parameters"]) <= bound
    if fails:
        again = two.run(cases.train, [7, 3], options)[0]
        assert all(map(torch.equal, first["parameters"], again["parameters"]))
    dense = 8 * sum(p.numel() for p in first["parameters"])
    assert (first["bytes"] < dense) == (name != "all sent")


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
    planted, options, expected = CELLS[cell]
    if (cell, variant) == ("not finite, drop", "whole batch"):
        expected = "NonFiniteLossError"  # rows that meet in the loss cannot be left out
    answers = two.run(faulted, planted, variant, options)
    faults.assert_agreed(answers)
    other = answers[0]
    if expected == "RankError":
        assert other["error"] == "RankError"
        assert "on rank 1" in other["said"]
        assert "No rank has made the update" in other["said"]
    elif expected.endswith("Error"):
        assert other["error"] == expected
    else:
        assert (other["updated"], bool(other["dropped"])) == (expected != "skipped", expected == "dropped")


def faulted(rank: int, size: int, planted: Any, variant: str, options: dict[str, Any]) -> Any:
    return faults.faulted(rank, size, 1, planted, kind="plain", variant=variant, **options)


def test_faults_in_the_last_micro_batch_while_buckets_are_under_way(two: Ranks) -> None:
    """One, two in a row, and on both ranks: the update without the fault to the bit, or none on any rank."""
    for one in zip(*two.run(faults.in_the_last, 0, 20), strict=True):
        faults.assert_agreed([*one])


@pytest.mark.parametrize("hooks", [False, True])
def test_code_of_the_caller_in_the_last_backward_meets_no_bucket_under_way(two: Ranks, hooks: bool) -> None:
    """Neither a hook that replaces gradients, nor collectives of its own."""
    assert len({one for found in two.run(cases.meddled, hooks) for one in found}) == 1


def test_drawn_faults_are_agreed_upon(four: Ranks) -> None:
    for one in zip(*four.run(faults.several, 0, 16), strict=True):
        faults.assert_agreed([*one])


def test_a_failure_in_the_update_ends_the_others_at_their_next_step(two: Ranks) -> None:
    first, second = two.run(faults.in_the_update)
    assert first[0] == ""
    assert "ValueError on rank 1 after update 1, which all ranks have made" in first[1]
    assert second == ["no"]


def test_a_fault_in_a_window_ends_it_on_all_ranks_at_once(two: Ranks) -> None:
    faults.assert_windows_ended(two.run(faults.in_windows, 0, 6))
    assert all("Leave the add out" in said for said in two.run(faults.left_alone))


def test_whole_batch_losses_have_budgets_on_ranks(two: Ranks) -> None:
    for error, micro_batches in two.run(faults.whole_batch_in_a_budget):
        assert error < tolerance(torch.float64, 100)
        assert micro_batches > 1


def test_a_look_on_one_rank_gathers_nothing_of_others(two: Ranks) -> None:
    assert len({*two.run(faults.one_rank_has_rows)}) == 1


def test_a_rank_that_dies_ends_all() -> None:
    with spawned(2) as ranks:
        ranks.start(faults.ended, 1)
        (kind, said), (end, _) = ranks.answers()
    assert (kind, end) == ("value", "ended")
    assert "got none from rank 1: it has ended" in said


# ---- what is refused


def test_ranks_that_differ_are_told_in_what(two: Ranks) -> None:
    for told in two.run(refused.different):
        for part, said in told.items():
            assert said.startswith(
                f"PlanError: Expected the same {part} on all 2 ranks, got another on ranks [1]"
            )


def test_what_cannot_be_done_on_several_ranks(two: Ranks) -> None:
    for told in two.run(refused.others):
        assert "fp16_compress_hook" in told["hook"]
        assert "ignored parameters" in told["ignoring"]
        assert "buffer hook" in told["buffer hook"]
        assert "hooks of its own" in told["forward hook"]
        assert "DataParallel" in told["DataParallel"]
        assert "weight" in told["found"]
        assert "BatchNorm" in told["BatchNorm"]
        assert "sparse" in told["sparse"]
        assert "as many updates" in told["missed"]
        assert "SyncBatchNorm" in told["sync"]
        assert "lazy" in told["lazy"]
        assert "no gradients before a step" in told["window"] or "on rank 0" in told["window"]
        assert "\u6570" in told["foreign"]
        assert "no update" in told["nothing"]
        assert told["after"] == "no error"


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
    alone = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**os.environ, **alone, "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, "-c", ENDS], check=True, env=environment)


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


def test_ranks_start_where_srun_names_them() -> None:
    """Without torchrun: a script for Slurm sets four variables."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    named = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SLURM],
            env=named | {"RANK": str(number), "WORLD_SIZE": "2", "SLURM_PROCID": str(number)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    said, other = [one.communicate(timeout=120)[0] for one in both]
    assert said == other
    assert said.startswith("2 10 ")
