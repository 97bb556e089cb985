"""Steps of ranks on drawn rows, and mistakes that they must notice. Called on every rank."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import anybatch as ab
from anybatch.parallel import Shard
from anybatch.testing import GradientRecorder
from tests.faults import faulty
from tests.laws.cases import Case
from tests.laws.check import check, reference, stack
from tests.laws.draw import CLASSES, FEATURES, MASKS
from tests.laws.losses import CASES
from tests.laws.totals import TOTALS
from tests.parallel.pairs import LOSSES, Pair, copies, digest, draw_sizes, make, rows, shard, share, take
from tests.zoo import Perceptron

SPREAD, BY_ROWS = (lambda: ab.WholeBatch(faulty.spread)), (lambda: ab.WholeBatch(by_rows, loss_rows=2))
WHOLE = Case(
    name="whole batch", forms={"function": SPREAD, "rows": BY_ROWS}, options={},
    model=lambda: Perceptron(FEATURES, CLASSES),
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
    network = DistributedDataParallel(problem.model) if is_wrapped and has_weights else problem.model
    collate = stack if call == "collate" else None
    step = ab.Step(network, problem.loss, recorder, micro_batch=micro_batch, collate=collate)
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
    optimizer, reshard = drawn.choice(["momentum", "adamw"]), drawn.choice([True, False])
    parts, both = shard(model, mesh, reshard_after_forward=reshard), {"clip_norm": drawn.choice([None, 0.05])}
    options = {"strategy": Shard(hold=drawn.random() < 0.4), "micro_batch": drawn.choice([None, 1, 2, 3])}
    collate = stack if way == "collate" else None
    pair = Pair(model, loss, optimizer, parts=parts, both=both, collate=collate, **options)
    own = random.Random(1000 * seed + rank)  # ranks add in other parts
    for index in range(3):
        batch = rows(drawn.randint(2, 9), seed=100 * seed + index)
        sizes = draw_sizes(drawn, len(batch[0]), size)
        pair.update(batch, sizes, rank, way=way, pieces=lambda: own.randint(1, 4))
    return pair.bits


def several(rank: int, size: int, seed: int, count: int, is_sharded: bool) -> list[str]:
    """Drawn cases; of replicas in each of the ways to send gradients."""
    found: list[str] = []
    for number in range(seed, seed + count):
        way = WAYS[(number - seed) % len(WAYS)]
        with sending(way):
            found.append(sharded(rank, size, number) if is_sharded else replicated(rank, size, number, way))
    return found
