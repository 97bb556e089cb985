"""Sharded models make the update of the whole batch in one process, whatever falls on which rank."""

import copy
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import anybatch as ab
from anybatch.parallel import Shard
from tests.parallel import drawn, faults, pairs
from tests.parallel.pairs import CLOSE, WORDS, Pair, copies, make, rows, shard, share, told
from tests.parallel.spawned import Ranks, on_ranks, spawned


@on_ranks(2, 4, seconds=120.0)
def test_any_split_is_the_whole_batch(rank: int, size: int) -> object:
    return drawn.several(rank, size, 100 * (size - 2), 14 if size == 2 else 8, True)


# ---- faults


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


@pytest.mark.parametrize(
    ("end", "size", "seed"),
    [(signal.SIGKILL, 2, 0), (signal.SIGSTOP, 2, 0), (signal.SIGSTOP, 3, 1), (signal.SIGSTOP, 3, 2)],
)
def test_a_rank_that_ends_or_stands_still_ends_all(end: signal.Signals, size: int, seed: int) -> None:
    with spawned(size) as ranks:
        faults.assert_ended(ranks, end, seed)


@on_ranks(2)
def test_a_whole_batch_loss_that_fails_on_one_rank_ends_its_first_step_on_all(rank: int, size: int) -> None:
    model, fault = make(is_warm=True), pairs.Fault()

    def function(*given: Any) -> Any:
        fault("function")
        return pairs.contrast(*given)

    outputs = lambda model, micro: (*model(micro[0]), micro[1])  # noqa: E731
    pair = Pair(model, lambda: ab.WholeBatch(function, outputs=outputs), parts=shard(model))
    if rank:
        fault.arm("function", 0, ValueError("no"))
    said = told(lambda: pair.update(rows(6), [0, 6], rank))
    assert said == "ValueError: no" if rank else "on rank 1, which says 'no" in said
    pair.update(rows(6), [0, 6], rank)


@on_ranks(2)
def test_rows_that_made_no_update_are_not_kept_for_micro_batches_of_weight_0(rank: int, size: int) -> None:
    """A first batch of NaN: on rank 1, and on rank 0, from which rank 1 has its rows."""
    for bad, split in ((1, [5, 2]), (0, [7, 0])):
        parts = fully_shard(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
        options = ab.Options(non_finite="skip")
        step = ab.Step(parts, nn.MSELoss(), optimizer, micro_batch=2, options=options)
        x, y = share((torch.randn(7, 3), torch.randn(7, 2)), split, rank)
        assert not step((x * torch.nan if rank == bad else x, y)).updated
        assert step((x, y)).updated


@on_ranks(4)
def test_a_rank_that_fails_is_named_to_its_copies_but_not_later(rank: int, size: int) -> None:
    """Rank 1 fails in its first forward; then all wait."""
    mesh, said = copies(size), list[str]()

    def fails(*args: Any, **options: Any) -> Any:
        if rank == 1 and not said:
            raise ValueError("no")
        time.sleep(1.0)  # as long as rank 1 needs to leave its error
        raise RuntimeError("Timed out")

    for _ in range(2):
        pair = Pair(model := make(), parts=shard(model, mesh))
        with mock.patch.object(dist, "all_gather_single", side_effect=fails):
            said.append(told(lambda: pair.update(rows(size), [1] * size, rank)))  # noqa: B023
    assert rank == 1 or "rank 1 (it says 'ValueError: no')" in said[0]
    assert "ValueError" not in said[1]


# ---- options and ways to shard


class Watcher(ab.Callback):
    """A callback that takes the norm of each gradient."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def gradients(self, gradients: Any) -> None:
        self.norms += [float(one.norm()) for one in gradients.values()]


def grouped(model: Any) -> Any:
    model = copy.deepcopy(model)
    fully_shard([model.inner[0], model.inner[1]])
    return fully_shard([model.embedding, model.head]) and fully_shard(model)


def unsynced(parts: Any) -> None:
    parts.set_requires_gradient_sync(False)
    parts.inner[0].set_gradient_divide_factor(2.0)
    parts.set_is_last_backward(False)


def only_root(parts: Any) -> None:
    parts.set_requires_gradient_sync(False, recurse=False)
    parts.set_requires_all_reduce(False)


def of(**sharding: Any) -> Callable[[Any], Any]:
    return lambda model: shard(model, **sharding)


POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HELD = {"strategy": Shard(hold=True)}
RANKS = "strategy", "recompute", "order"  # options of the sharded step alone
# How it is sharded, the options of the step, and what the caller does before each update.
WAYS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], Callable[[Any], object]]] = {
    "blocks": (shard, {}, id),
    "root only": (lambda model: fully_shard(copy.deepcopy(model)), {}, id),
    "modules in one group": (grouped, HELD, id),
    "gathered once per micro-batch": (of(reshard_after_forward=False), HELD, id),
    "gathered again from fewer ranks": (of(reshard_after_forward=2), {}, id),
    "copies": (lambda model: shard(model, copies(4)), {}, id),
    "copies, held": (lambda model: shard(model, copies(4)), HELD, id),
    "flags of the caller": (shard, {}, unsynced),
    "flags of the caller, held": (shard, HELD, unsynced),
    "flags of the caller, copies": (lambda model: shard(model, copies(4)), {}, only_root),
    "recompute": (shard, {"recompute": "all"}, id),
    "bf16-mixed": (shard, {"precision": "bf16-mixed"}, id),
    "bf16 in a policy": (of(mp_policy=POLICY), {}, id),
    "bf16 in a policy, held": (of(mp_policy=POLICY), HELD, id),
    "clipped by value": (shard, {"clip_value": 1e-3}, id),
    "by length": (shard, {"order": "length"}, id),
}


@pytest.mark.parametrize("name", WAYS)
@on_ranks(4)
def test_laws_of_accumulation(rank: int, size: int, name: str) -> None:
    """After the tests of gradient accumulation of PyTorch (fully_shard), torchtitan and accelerate.

    Callbacks, too, are shown whole gradients.
    """
    make_parts, options, before = WAYS[name]
    is_low = "bf16" in name
    model = make().to(torch.float32 if is_low else torch.float64)
    model.embedding.padding_idx = 0 if name == "by length" else None
    pair = Pair(
        model,
        parts=make_parts(model),
        both={"micro_batch": 2, **{name: one for name, one in options.items() if name not in RANKS}},
        bound=0.02 if is_low else CLOSE,
        **copy.deepcopy({name: one for name, one in options.items() if name in RANKS}),
    )
    watchers, flows = [Watcher(), Watcher()], [ab.GradientFlow(one, every=1) for one in (pair.parts, model)]
    for step, *callbacks in zip((pair.step, pair.twin), watchers, flows, strict=True):
        step.attach(callbacks)
    for number in range(3):
        x, y = rows(9, seed=number)
        x = x.remainder(WORDS - 1).add(1).masked_fill(y == -100, 0) if name == "by length" else x
        before(pair.parts)
        with torch.no_grad():  # a forward alone leaves the root unsharded
            pair.parts(x)
        pair.update((x, y), [5, 3, 1, 0], rank)
    seen = [(*watcher.norms, *flow.last.ratio) for watcher, flow in zip(watchers, flows, strict=True)]
    assert is_low or max(abs(one - other) for one, other in zip(*seen, strict=True)) < CLOSE


@on_ranks(2)
def test_a_batch_loss_makes_the_gradient_of_shards(rank: int, size: int) -> None:
    pair = Pair(model := make(), parts=shard(model))
    ab.BatchLoss(pair.parts, pairs.tokens, micro_batch=2)(share(rows(7), [5, 2], rank)).backward()
    pair.step.optimizers[0].step()
    pair.twin(rows(7))
    assert pair.error < CLOSE


@on_ranks(4)
def test_shards_over_half_of_the_ranks(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("halves", "shards"))["shards"]
    pair = Pair(model := make(), parts=shard(model, mesh), micro_batch=2)
    pair.update(rows(7, seed=rank // 2), [5, 2], rank % 2)


# ---- collectives

NAMES = "all_gather", "all_gather_single", "reduce_scatter_single", "all_reduce"


@pytest.mark.parametrize("hold", [False, True], ids=["reduced", "held"])
@on_ranks(2, 4)
def test_collectives_of_a_step(rank: int, size: int, hold: bool) -> None:
    """Two blocks and the root: five gathers for each micro-batch; three sums each, or three in all.

    Of four ranks two are copies of the others, with which each sum is made once, beside that of the norm.
    """
    mesh = copies(size) if size == 4 else None
    pair = Pair(model := make(), parts=shard(model, mesh), micro_batch=1, strategy=Shard(hold=hold))
    for index, count in enumerate((1, 2, 3, 4, 4)):
        with ExitStack() as patches:
            made = [mock.patch.object(dist, one, wraps=getattr(dist, one)) for one in NAMES]
            counts = [patches.enter_context(one) for one in made]
            report = pair.step(share(rows(size * count, seed=count), [count] * size, rank))
        assert report.held == (hold and index > 0)
        found = [one.call_count for one in counts]
        assert found == [2, 5 * count, 3 if hold else 3 * count, 1 if size == 2 else 4], found


# ---- ranks that differ


def only_in_words(model: Any, mesh: Any) -> Any:
    model.inner[0].requires_grad_(requires_grad=False)
    return shard(model, mesh)


REDUCED = MixedPrecisionPolicy(reduce_dtype=torch.float32)
# What rank 1 does otherwise: how it shards, the options of its step; and in what ranks are told to be alike.
ODD: dict[str, tuple[Callable[[Any, Any], Any], dict[str, Any], str]] = {
    "micro_batch": (shard, {"micro_batch": 1}, ""),
    "no micro_batch": (shard, {"micro_batch": None}, ""),
    "recompute": (shard, {"recompute": "all"}, ""),
    "clip_norm": (shard, {"clip_norm": 0.1}, "options"),
    "precision": (shard, {"precision": "bf16-mixed"}, "options"),
    "non_finite": (shard, {"non_finite": "skip"}, "options"),
    "accumulate": (shard, {"accumulate": torch.float64}, "options"),
    "resharding": (lambda model, mesh: shard(model, mesh, reshard_after_forward=False), {}, "sharding"),
    "policy": (lambda model, mesh: shard(model, mesh, mp_policy=REDUCED), {}, "sharding"),
    "modules": (lambda model, mesh: fully_shard(copy.deepcopy(model), mesh=mesh), {}, "sharding"),
    "trained": (only_in_words, {}, "model"),
}


@pytest.mark.parametrize("name", ODD)
@on_ranks(2)
def test_ranks_may_differ_in_how_they_cut_but_in_nothing_that_changes_collectives(
    rank: int, size: int, name: str
) -> None:
    make_parts, options, part = ODD[name]
    model, mesh = make(), init_device_mesh("cpu", (size,))
    parts = (make_parts if rank else shard)(model, mesh)
    pair = Pair(model, parts=parts, **{"micro_batch": 2} | (options if rank else {}))
    if part:
        said = told(lambda: pair.update(rows(7), [4, 3], rank))
        assert f"Expected the same {part} on all 2 ranks" in said
    else:
        pair.update(rows(7), [4, 3], rank)


@on_ranks(4)
def test_a_mesh_that_leaves_ranks_out_is_refused(rank: int, size: int) -> None:
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("copies", "shards"))
    said = told(lambda: Pair(model := make(), parts=shard(model, mesh))) if rank < 2 else ""
    assert ("over all 4 ranks" in said) == (rank < 2)
