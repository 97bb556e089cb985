"""Steps of several ranks on drawn rows, held against the whole batch in one process. Called on every rank."""

import contextlib
import hashlib
import random
from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from operator import itemgetter
from time import sleep
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import anybatch as ab
from anybatch.core import tree
from anybatch.parallel import Replicate
from anybatch.testing import GradientRecorder
from tests.faults import faulty
from tests.laws.cases import Case
from tests.laws.check import check, reference, samples, stack
from tests.laws.draw import CLASSES, FEATURES, MASKS
from tests.laws.losses import CASES
from tests.laws.totals import TOTALS
from tests.options import flat
from tests.zoo import Perceptron

MOST_ROWS = 9
ADAMW = partial(torch.optim.AdamW, lr=0.01)
WHOLE = Case(
    name="whole batch",
    forms={
        "function": lambda: ab.WholeBatch(faulty.spread),
        "rows": lambda: ab.WholeBatch(by_rows, loss_rows=2),
    },
    options={},
    model=lambda: Perceptron(FEATURES, CLASSES),
    batch=lambda draw: (draw.normal(FEATURES), torch.arange(draw.rows)),
)
ALL = [*CASES, *TOTALS, *[WHOLE] * 10]


def by_rows(outputs: Tensor, targets: Tensor, *, rows: Tensor) -> ab.Total:
    return ab.Total(F.cross_entropy((outputs @ outputs.T)[rows], targets[rows], reduction="sum"), len(rows))


def share(batch: Any, sizes: Sequence[int], rank: int) -> Any:
    """The rows of a rank."""
    stops = [sum(sizes[:end]) for end in range(len(sizes) + 1)]
    return tree.map_leaves(itemgetter(slice(*[*pairwise(stops)][rank])), batch)


def draw_sizes(drawn: random.Random, rows: int, size: int) -> list[int]:
    """Rows of each rank, often none."""
    stops = sorted(drawn.choice([0, rows, drawn.randint(0, rows)]) for _ in range(size - 1))
    return [stop - start for start, stop in pairwise([0, *stops, rows])]


def one(rank: int, size: int, seed: int, steps: int = 1) -> str:
    """One drawn case; a hash of the gradients of this rank. Parameters stay as they are in all steps."""
    drawn = random.Random(seed)
    case, rows = drawn.choice(ALL), drawn.randint(2, MOST_ROWS)
    form = drawn.choice([*case.forms])
    mask, sizes = drawn.choice(MASKS), draw_sizes(drawn, rows, size)
    way = drawn.choice(["step", "step", "window", "collate"] if case is not WHOLE else ["step"])
    is_wrapped, micro_batch = drawn.random() < 0.3, drawn.choice([None, 1, 2, 3])
    torch.manual_seed(seed)  # of the model
    problem = case.problem(form, rows, seed=seed, mask=mask)
    whole = reference(problem)
    recorder = GradientRecorder(problem.model, problem.loss)
    has_weights = any(True for _ in problem.model.parameters())
    model = DistributedDataParallel(problem.model) if is_wrapped and has_weights else problem.model
    step = ab.Step(
        model, problem.loss, recorder, micro_batch=micro_batch, collate=stack if way == "collate" else None
    )
    mine = share(problem.batch, sizes, rank)
    if way == "window":
        with step.window() as window:
            for start in range(0, sizes[rank], micro_batch or rows):
                window.add(tree.map_leaves(itemgetter(slice(start, start + (micro_batch or rows))), mine))
            report = window.close()
    else:
        if sizes[rank]:
            mine = samples(mine) if way == "collate" else mine
        else:
            mine = None if drawn.random() < 0.5 or way == "collate" else mine
        for _ in range(steps):
            report = step(mine)
    try:
        check((report, recorder.gradients), whole)
        assert report.rows == rows
    except AssertionError as error:
        raise AssertionError(
            f"seed {seed}: {case.name} {form}, {sizes} rows, {way}, {micro_batch}"
        ) from error
    return digest([report.loss, report.grad_norm, *[v for _, v in sorted(recorder.gradients.items())]])


def several(rank: int, size: int, seed: int, count: int) -> list[str]:
    """Drawn cases, in each of the ways to send gradients."""
    found: list[str] = []
    for index in range(count):
        way = WAYS[index % len(WAYS)]
        with sending(way):  # not before the second step, as messages of the first are in full
            found.append(one(rank, size, seed + index, 1 + ("bucket" not in way)))
    return found


WAYS = "in one bucket", "in buckets", "under backward"


@contextmanager
def sending(way: str) -> Any:
    """Steps that send gradients in this way, however few; in buckets of nearly each parameter alone."""
    with (
        mock.patch("anybatch.parallel.buckets._BUCKET", 8 << 20 if way == WAYS[0] else 64),
        mock.patch("anybatch.parallel.replicate._SMALL", 0 if "backward" in way else 1 << 20),
        mock.patch("anybatch.parallel.fingerprint._of_rows", return_value=0),  # else sent in full
    ):
        yield


class Meddling(ab.Callback):
    """A caller's code in the last backward, and a collective after it, for which rank 1 is late."""

    def __init__(self, rank: int, model: nn.Sequential) -> None:
        self.rank = rank
        for layer in [*model][1:]:
            layer.register_full_backward_hook(self.halve)

    def halve(self, layer: nn.Module, *_: Any) -> None:
        for p in layer.parameters():
            p.grad = None if p.grad is None else p.grad * 0.5

    def micro_batch(self, event: Any) -> None:
        sleep(0.02 * self.rank)
        dist.all_reduce(torch.ones(3))


def meddled(rank: int, size: int, hooks: bool) -> list[str]:
    """The same updates in each way to send gradients: their bits. Hooks depend on the split."""
    found: list[str] = []
    for way in WAYS:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)])
        callback = Meddling(rank, model if hooks else nn.Sequential())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"micro_batch": None if hooks else 2, "options": ab.Options(check=False)}
        step = ab.Step(model, nn.MSELoss(), optimizer, callbacks=[callback], **options)
        rows = torch.randn(6 * size, 6).split(6)[rank]
        with sending(way):
            for _ in range(4):
                step((rows, rows))
        found.append(digest([*model.parameters()]))
    return found


def wrong(rank: int, size: int, seed: int, count: int, mutation: str) -> int:
    """How many cases a mistake breaks on this rank."""
    found = 0
    with mutated(mutation):
        for index in range(count):
            try:
                one(rank, size, seed + index)
            except AssertionError:
                found += 1
    return found


def digest(values: Sequence[Any]) -> str:
    """The bits of values."""
    plain = [value.tolist() if isinstance(value, Tensor) else value for value in values]
    return hashlib.blake2b(repr(plain).encode()).hexdigest()


class Refusing(ab.Callback):
    """Fails after gradients were sent, and before the update."""

    refuses = False

    def gradients(self, gradients: Any) -> None:
        if self.refuses:
            raise ValueError("no")


def train(
    rank: int, size: int, sizes: Sequence[int], options: dict[str, Any], fails: bool = False
) -> dict[str, Any]:
    """Some updates of a small network; the parameters, and what was reported.

    With `compression` gradients go through what it makes. The third update may fail before and after it was
    sent, and is made then.
    """
    refusing = Refusing()
    options = {"strategy": "auto", "dtype": torch.float64, "optimizer": ADAMW} | options
    torch.manual_seed(0)
    dtype, make = options.pop("dtype"), options.pop("compression", None)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    optimizer = options.pop("optimizer")(model.parameters())
    if make is not None:
        options["strategy"] = Replicate(compression=make())
    step = ab.Step(model, nn.CrossEntropyLoss(), optimizer, **flat(options, callbacks=[refusing]))
    x, y = torch.randn(sum(sizes), 4, dtype=dtype), torch.randint(3, (sum(sizes),))
    reports, mine = [], (x, y) if options["strategy"] == "local" else share((x, y), sizes, rank)
    with counted_collectives() as count:
        for number in range(4):
            if fails and number == 2:
                with contextlib.suppress(RuntimeError):  # shapes that do not fit; on the others a RankError
                    step((x[:, :3], y) if rank == 1 else mine)
                refusing.refuses = True
                with contextlib.suppress(ValueError):
                    step(mine)
                refusing.refuses = False
            reports.append(step(mine))
    return {
        "parameters": [p.detach() for p in model.parameters()],
        "bits": digest([*model.parameters(), *[r.loss for r in reports], *[r.grad_norm for r in reports]]),
        "reports": [(r.loss, r.grad_norm, r.rows, r.dropped, r.scale, r.updated) for r in reports],
        "collectives": count[0],
        "bytes": getattr(step.strategy, "bytes_sent", 0),
    }


@contextmanager
def counted_collectives() -> Any:
    count = [0]

    def counting(inner: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            count[0] += 1
            return inner(*args, **options)

        return call

    with (
        mock.patch.object(dist, "all_gather", counting(dist.all_gather)),
        mock.patch.object(dist, "all_reduce", counting(dist.all_reduce)),
    ):
        yield count


# ---- what must be found


class Averaged(Replicate):
    """Gradients are averaged over ranks."""

    def reduce(self, gradients: Any) -> Any:
        return {p: value / dist.get_world_size() for p, value in super().reduce(gradients).items()}


class ForgottenRank(Replicate):
    """What rank 0 has no gradient for is left out."""

    def reduce(self, gradients: Any) -> Any:
        mine = {*gradients}
        return {p: value for p, value in super().reduce(gradients).items() if dist.get_rank() or p in mine}


class OwnLoss(Replicate):
    """Each rank reports the loss of its own rows."""

    def close(self, sums: Any) -> Any:
        weights, agreed = super().close(sums), sums.agreed
        sums.agreed = agreed._replace(totals=sums.totals or agreed.totals)
        return weights


MUTATIONS = {kind.__name__: kind for kind in (Averaged, ForgottenRank, OwnLoss)}


@contextmanager
def mutated(name: str) -> Any:
    if not name:
        yield
        return
    kind = MUTATIONS[name]
    with mock.patch("anybatch.parallel.wrappers.Replicate", kind):
        yield
