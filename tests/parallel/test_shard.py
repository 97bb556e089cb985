"""Sharded models make the update of the whole batch in one process, whatever falls on which rank."""

import copy
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import anybatch as ab
from anybatch.parallel import Shard
from tests.parallel import drawn, faults, pairs
from tests.parallel.pairs import CLOSE, WORDS, Pair, copies, make, rows, shard, share, told
from tests.parallel.spawned import Ranks, on_ranks, spawned


@on_ranks(2, 4, seconds=120.0)
def test_any_split_is_the_whole_batch(rank: int, size: int) -> object:
    return drawn.several(rank, size, 100 * (size - 2), 14 if size == 2 else 8, True)


def test_a_fault_is_recovered_from_together_or_ends_the_step_on_all_ranks(two: Ranks, four: Ranks) -> None:
    cases = (two, 0, 12, "tokens"), (four, 70, 6, "tokens"), (two, 2, 9, "whole"), (four, 100, 4, "whole")
    for ranks, *case in cases:
        faults.assert_all_agreed(ranks, "sharded", *case)


def test_a_fault_before_the_collectives_are_known_ends_all_ranks() -> None:
    with spawned(2) as ranks:
        ranks.start(faults.sharded, 62, "tokens", True)
        told = [value for _, value in ranks.answers()]
    assert [one["error"] for one in told] == ["RankError", "ValueError"], told
    assert "rank 1 (it says 'ValueError" in told[0]["said"]


KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.parametrize(
    ("end", "size", "seed", "is_sharded"),
    [(KILL, 2, 0, True), (STOP, 2, 0, True), (STOP, 3, 1, True), (STOP, 3, 2, True), (KILL, 2, 0, False)],
)
def test_a_rank_that_ends_or_stands_still_ends_all(end: Any, size: int, seed: int, is_sharded: bool) -> None:
    with spawned(size) as ranks:
        faults.assert_ended(ranks, end, seed, is_sharded)


POLICY = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
# How it is sharded, the options of both steps, and those of the rank's.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "recompute": ({}, {}, {"recompute": "all"}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}, {}),
    "held in a policy": (POLICY, {}, {"strategy": Shard(hold=True)}),
    "clipped by value": ({}, {"clip_value": 1e-3}, {}),
    "by length": ({}, {}, {"order": "length"}),
}


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2)
def test_options(rank: int, size: int, name: str) -> None:
    """Callbacks, too, are shown whole gradients."""
    sharding, both, own = OPTIONS[name]
    is_low = "bf16" in name or "policy" in name
    model = make().to(torch.float32 if is_low else torch.float64)
    model.embedding.padding_idx = 0 if name == "by length" else None
    both, bound = {"micro_batch": 2, **both}, 0.02 if is_low else CLOSE
    pair = Pair(model, parts=shard(model, **sharding), both=both, bound=bound, **copy.deepcopy(own))
    flows = [ab.GradientFlow(one, every=1) for one in (pair.parts, model)]
    pair.step.attach(flows[:1])
    pair.twin.attach(flows[1:])
    for number in range(3):
        x, y = rows(7, seed=number)
        x = x.remainder(WORDS - 1).add(1).masked_fill(y == -100, 0) if name == "by length" else x
        torch.no_grad()(pair.parts)(x)  # a forward alone leaves the root unsharded
        pair.update((x, y), [5, 2], rank)
    if not is_low:
        ratios = zip(*(flow.last.ratio for flow in flows), strict=True)
        assert max(abs(one - other) for one, other in ratios) < CLOSE


@on_ranks(2)
def test_a_batch_loss_makes_the_gradient_of_shards(rank: int, size: int) -> None:
    pair = Pair(model := make(), parts=shard(model))
    ab.BatchLoss(pair.parts, pairs.tokens, micro_batch=2)(share(rows(7), [5, 2], rank)).backward()
    pair.step.optimizers[0].step()
    pair.twin(rows(7))
    assert pair.error < CLOSE


def unsynced(parts: Any) -> None:
    parts.set_requires_gradient_sync(False)
    parts.inner[0].set_gradient_divide_factor(2.0)
    parts.set_is_last_backward(False)


# How it is sharded, whether gradients are held, and what the caller does before each update.
WAYS: dict[str, tuple[Callable[[Any], Any], bool, Callable[[Any], object]]] = {
    "blocks": (shard, False, id),
    "root only": (lambda model: fully_shard(copy.deepcopy(model)), False, id),
    "gathered once per micro-batch": (lambda model: shard(model, reshard_after_forward=False), True, id),
    "gathered again from fewer ranks": (lambda model: shard(model, reshard_after_forward=2), False, id),
    "copies": (lambda model: shard(model, copies(4)), False, id),
    "copies, held": (lambda model: shard(model, copies(4)), True, id),
    "flags of the caller": (shard, False, unsynced),
    "flags of the caller, held": (shard, True, unsynced),
}


@pytest.mark.parametrize("name", WAYS)
@on_ranks(4)
def test_laws_of_accumulation(rank: int, size: int, name: str) -> None:
    make_parts, hold, before = WAYS[name]
    model = make()
    pair = Pair(model, parts=make_parts(model), both={"micro_batch": 2}, strategy=Shard(hold=hold))
    for number in range(3):
        before(pair.parts)
        pair.update(rows(9, seed=number), [5, 3, 1, 0], rank)


@on_ranks(4)
def test_shards_over_half_of_the_ranks(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("halves", "shards"))["shards"]
    pair = Pair(model := make(), parts=shard(model, mesh), micro_batch=2)
    pair.update(rows(7, seed=rank // 2), [5, 2], rank % 2)


# What rank 1 does otherwise: how it shards, the options of its step; and in what ranks are told to be alike.
ODD: dict[str, tuple[Callable[[Any, Any], Any], dict[str, Any], str]] = {
    "micro_batch": (shard, {"micro_batch": 1}, ""),
    "no micro_batch": (shard, {"micro_batch": None}, ""),
    "recompute": (shard, {"recompute": "all"}, ""),
    "clip_norm": (shard, {"clip_norm": 0.1}, "options"),
    "precision": (shard, {"precision": "bf16-mixed"}, "options"),
    "resharding": (lambda model, mesh: shard(model, mesh, reshard_after_forward=False), {}, "sharding"),
    "modules": (lambda model, mesh: fully_shard(copy.deepcopy(model), mesh=mesh), {}, "sharding"),
}


@pytest.mark.parametrize("name", ODD)
@on_ranks(2)
def test_ranks_may_differ_in_how_they_cut_but_in_no_collective(rank: int, size: int, name: str) -> None:
    make_parts, options, part = ODD[name]
    model, mesh = make(), init_device_mesh("cpu", (size,))
    parts = (make_parts if rank else shard)(model, mesh)
    pair = Pair(model, parts=parts, **{"micro_batch": 2} | (options if rank else {}))
    said = told(lambda: pair.update(rows(7), [4, 3], rank))
    assert said == "no error" if not part else f"Expected the same {part} on all 2 ranks" in said, said
