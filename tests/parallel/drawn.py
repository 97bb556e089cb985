"""Steps of ranks on drawn rows, and mistakes that they must notice. Called on every rank."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import anybatch as ab
from anybatch.core import local
from anybatch.engine import Part, norm_of
from anybatch.engine.sums import Division
from anybatch.parallel import Replicate, Shard
from anybatch.testing import GradientRecorder
from tests.faults.faulty import spread
from tests.laws.cases import Case
from tests.laws.check import check, reference, stack
from tests.laws.draw import CLASSES, FEATURES, MASKS
from tests.laws.losses import CASES
from tests.laws.totals import TOTALS
from tests.parallel.pairs import LOSSES, Pair, copies, digest, draw_sizes, make, rows, shard, share, take
from tests.zoo import Perceptron

FORMS = {"function": lambda: ab.WholeBatch(spread), "rows": lambda: ab.WholeBatch(by_rows, loss_rows=2)}
WHOLE = Case(
    name="whole batch", forms=FORMS, options={}, model=lambda: Perceptron(FEATURES, CLASSES),
    batch=lambda draw: (draw.normal(FEATURES), torch.arange(draw.rows)),
)  # fmt: skip
ALL = [*CASES, *TOTALS, *[WHOLE] * 10]
WAYS = "in one bucket", "in buckets", "under backward"  # to send gradients


def by_rows(outputs: Tensor, targets: Tensor, *, rows: Tensor) -> ab.Total:
    return ab.Total(F.cross_entropy((outputs @ outputs.T)[rows], targets[rows], reduction="sum"), len(rows))


@contextmanager
def sending(way: str) -> Iterator[None]:
    """Steps that send gradients in this way, however few; in buckets of nearly each parameter alone."""
    with (
        mock.patch("anybatch.parallel.buckets._BUCKET", 8 << 20 if way == WAYS[0] else 64),
        mock.patch("anybatch.parallel.replicate._SMALL", 0 if "backward" in way else 1 << 20),
        mock.patch("anybatch.parallel.fingerprint._of_rows", return_value=0),  # else sent in full
    ):
        yield


def replicated(rank: int, size: int, seed: int, way: str = "in one bucket") -> str:
    """A case of the laws; a hash of the gradients of this rank. Parameters stay as they are in all steps."""
    drawn = random.Random(seed)
    case, count = drawn.choice(ALL), drawn.randint(2, 9)
    form, mask, sizes = drawn.choice([*case.forms]), drawn.choice(MASKS), draw_sizes(drawn, count, size)
    call = drawn.choice(["step", "step", "window", "collate"] if case is not WHOLE else ["step"])
    is_wrapped, micro_batch = drawn.random() < 0.3, drawn.choice([None, 1, 2, 3])
    torch.manual_seed(seed)  # of the model
    problem = case.problem(form, count, seed=seed, mask=mask)
    expected, recorder = reference(problem), GradientRecorder(problem.model, problem.loss)
    has_weights = any(True for _ in problem.model.parameters())
    model = DistributedDataParallel(problem.model) if is_wrapped and has_weights else problem.model
    collate = stack if call == "collate" else None
    step = ab.Step(model, problem.loss, recorder, micro_batch=micro_batch, collate=collate)
    mine = share(problem.batch, sizes, rank)
    if call == "step" and not sizes[rank] and drawn.random() < 0.5:
        mine = None
    # Messages of the first step are in full: gradients go under backward from the second one on.
    for _ in range(1 if call == "window" or "bucket" in way else 2):
        report = take(step, mine, call, lambda: micro_batch or count)
    try:
        check((report, recorder.gradients), expected)
        assert report.rows == count
    except AssertionError as error:
        said = f"seed {seed}: {case.name} {form}, {sizes} rows, {call}, {micro_batch}"
        raise AssertionError(said) from error
    return digest([report.loss, report.grad_norm, *[v for _, v in sorted(recorder.gradients.items())]])


def sharded(rank: int, size: int, seed: int) -> str:
    """Three updates of a sharded model; a hash of its parameters."""
    drawn = random.Random(seed)
    loss, way = drawn.choice([*LOSSES]), drawn.choice(["step", "step", "window", "collate"])
    is_whole = loss.startswith("whole")
    way = "step" if is_whole and way == "window" else way
    mesh = copies(size) if size == 4 and drawn.random() < 0.5 else None
    model = make(drawn.choice([1, 2]), seed=seed, is_warm=is_whole)
    optimizer = drawn.choice(["momentum", "adamw"])
    parts = shard(model, mesh, reshard_after_forward=drawn.choice([True, False]))
    both, own = {"clip_norm": drawn.choice([None, 0.05])}, {"strategy": Shard(hold=drawn.random() < 0.4)}
    own |= {"micro_batch": drawn.choice([None, 1, 2, 3]), "collate": stack if way == "collate" else None}
    pair = Pair(model, loss, optimizer, parts=parts, both=both, **own)
    pieces = random.Random(1000 * seed + rank)  # ranks add in other parts
    for index in range(3):
        batch = rows(drawn.randint(2, 9), seed=100 * seed + index)
        sizes = draw_sizes(drawn, len(batch[0]), size)
        pair.update(batch, sizes, rank, way=way, pieces=lambda: pieces.randint(1, 4))
    return pair.bits


def several(rank: int, size: int, seed: int, count: int, is_sharded: bool) -> list[str]:
    """Drawn cases; of replicas in each of the ways to send gradients."""
    found: list[str] = []
    for index in range(count):
        with sending(way := WAYS[index % len(WAYS)]):
            given = rank, size, seed + index
            found.append(sharded(*given) if is_sharded else replicated(*given, way))
    return found


# ---- mistakes


def forgotten(reduce: Any, self: Any, gradients: Any) -> Any:
    mine = {*gradients}
    return {p: value for p, value in reduce(self, gradients).items() if dist.get_rank() or p in mine}


def own_loss(close: Any, self: Any, sums: Any) -> Any:
    weights, agreed = close(self, sums), sums.agreed
    sums.agreed = agreed._replace(totals=sums.totals or agreed.totals)
    return weights


def lost(accompany: Any, self: Any, rows: Any) -> None:
    before = {p: p.grad.clone() for p in self.task.network.parameters if p.grad is not None}
    accompany(self, rows)
    for p in self.task.network.parameters:
        p.grad = before.get(p)


MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {  # where, and what is done in its place
    "averaged": (Replicate, "reduce", lambda do, *of: {p: one / 2 for p, one in do(*of).items()}),
    "what rank 0 has no gradient for is left out": (Replicate, "reduce", forgotten),
    "each rank reports the loss of its own rows": (Replicate, "close", own_loss),
    "shards: own divisors": (Division, "decide", lambda do, *of, **also: do(*of, **also | {"guess": 1.0})),
    "shards: averaged": (FSDPModule, "set_gradient_divide_factor", lambda *_: None),
    "shards: what others send in a micro-batch of weight 0 is lost": (Part, "accompany", lost),
    "shards: own norms": (Shard, "norm", lambda do, self, gradients: norm_of([*map(local, gradients)])),
}


def broken(rank: int, size: int, mutation: str, counts: Sequence[int]) -> int:
    """How many cases a mistake breaks on this rank."""
    where, name, change = MUTATIONS[mutation]
    inner = getattr(where, name)

    def changed(*given: Any, **named: Any) -> Any:
        return change(inner, *given, **named)

    is_static, found = isinstance(vars(where)[name], staticmethod), 0
    is_sharded = mutation.startswith("shards")
    with mock.patch.object(where, name, staticmethod(changed) if is_static else changed):
        for seed in range(counts[is_sharded]):
            try:
                several(rank, size, seed, 1, is_sharded)
            except AssertionError:
                found += 1
    return found
