"""Parameter servers in one process: exact, whoever ends when; what is refused."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch import Options
from anybatch.core import RankError, tree
from anybatch.parallel import ParameterServer
from anybatch.parallel.server import COUNTED, NOT_FINITE, Layout, ServerShard
from anybatch.testing import reference_step, relative_error, tolerance
from tests.options import flat
from tests.parallel.inline import Inline

EXACT = 1e-12  # relative, of a gradient in float64
ROWS = 37  # uneven in every cut


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def batch(seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=drawn)
    return x, torch.randint(3, (rows,), generator=drawn)


def two_terms(model: nn.Module, micro: Any) -> dict[str, ab.Total]:
    x, y = micro
    scores = model(x)
    some = y > 0
    return {
        "all": ab.Total(nn.functional.cross_entropy(scores, y, reduction="sum"), len(y)),
        "some": ab.Total(scores[some].square().sum(), some.sum()),
    }


LOSSES: dict[str, Callable[[], Any]] = {
    "mean": nn.CrossEntropyLoss,
    "ignored": lambda: nn.CrossEntropyLoss(ignore_index=1, weight=torch.tensor([0.3, 1.0, 2.0]).double()),
    "sum": lambda: nn.CrossEntropyLoss(reduction="sum"),
    "terms": lambda: ab.Terms(two_terms, {"all": 1.0, "some": 0.3}),
}


def updates(
    count: int = 3,
    *,
    cluster: Inline | None = None,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
    dropout: float = 0.0,
    loss: Any = None,
    servers: int = 2,
    workers: int = 3,
    between: Callable[[int, ParameterServer], object] = lambda *_: None,
    scheduler: Callable[[Any], Any] = lambda _: None,
    **options: Any,
) -> tuple[list[Tensor], Any, Any]:
    """Parameters, state of the optimizer, and reports after some updates; alone without a cluster."""
    model = network(dropout)
    made = optimizer(model.parameters(), lr=0.01)
    strategy: Any = "local" if cluster is None else ParameterServer(servers, workers, cluster=cluster)
    options = {"micro_batch": 4, "scheduler": scheduler(made), **options}
    step = ab.Step(model, loss or nn.CrossEntropyLoss(), made, **flat(options, strategy=strategy))
    torch.manual_seed(7)
    reports = []
    for number in range(count):
        if cluster is not None:
            between(number, strategy)
        reports.append(step(batch(number)))
    return [p.detach().clone() for p in model.parameters()], made.state_dict()["state"], reports


def same_bits(one: Any, other: Any) -> bool:
    pairs = zip(tree.flatten(one[:2]).leaves, tree.flatten(other[:2]).leaves, strict=True)
    same = [(r.loss, r.grad_norm, r.rows) for r in one[2]] == [
        (r.loss, r.grad_norm, r.rows) for r in other[2]
    ]
    return same and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("loss", "servers", "workers"),
    [*[(loss, 2, 4) for loss in LOSSES], ("ignored", 1, 1), ("mean", 1, 2), ("terms", 3, 1), ("sum", 3, 4)],
)
def test_the_gradient_is_that_of_the_whole_batch(loss: str, servers: int, workers: int) -> None:
    model, made = network(), LOSSES[loss]()
    expected = reference_step(model, made, batch())
    before = copy.deepcopy(dict(model.named_parameters()))
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    server = ParameterServer(servers, workers, cluster=Inline(servers + workers))
    report = ab.Step(model, made, sgd, micro_batch=4, options=Options(strategy=server))(batch())
    found = {name: before[name].detach() - p.detach() for name, p in model.named_parameters()}
    assert relative_error(found, expected.gradients) < EXACT
    assert abs(report.loss - expected.loss) < EXACT * abs(expected.loss)
    assert report.rows == ROWS


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_many_updates_are_those_of_one_process(optimizer: Any) -> None:
    alone = updates(20, optimizer=optimizer, clip_norm=0.3)
    told = list[Any]()
    served = updates(20, optimizer=optimizer, clip_norm=0.3, cluster=Inline(1), callbacks=[told.append])
    assert told == served[2]
    allowed = tolerance(torch.float64, 20 * ROWS)
    for one, other in zip(tree.flatten(alone[:2]).leaves, tree.flatten(served[:2]).leaves, strict=True):
        assert relative_error({"": other.double()}, {"": one.double()}) < allowed
    assert [r.update for r in served[2]] == [*range(1, 21)]


def test_a_scheduler_sees_each_update() -> None:
    def half(made: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)

    alone, served = updates(scheduler=half), updates(scheduler=half, cluster=Inline(1))
    assert [r.learning_rate for r in served[2]] == [r.learning_rate for r in alone[2]] == [0.01, 5e-3, 2.5e-3]


@pytest.mark.parametrize("seed", range(4))
def test_bits_depend_on_no_worker(seed: int) -> None:
    """Nor on the order in which workers get on; dropout is drawn for the unit."""
    expected = updates(dropout=0.5, cluster=Inline(100), workers=1)
    assert same_bits(updates(dropout=0.5, cluster=Inline(seed), workers=1 + 2 * seed), expected)


def by_samples(samples: Any) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "2GiB"},
        {"micro_batch": 4, "collate": by_samples},
        {"micro_batch": 4, "recompute": ["0"]},
        {"accumulate": torch.float64},
    ],
    ids=lambda options: [*options][-1],
)
def test_workers_have_the_options_of_the_step(options: dict[str, Any]) -> None:
    def train(strategy: Any) -> dict[str, Tensor]:
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        step = ab.Step(model, nn.CrossEntropyLoss(), sgd, **flat(options, strategy=strategy))
        rows = batch()
        for _ in range(3):
            step([*zip(*rows, strict=True)] if "collate" in options else rows)
        return {name: p.detach() for name, p in model.named_parameters()}

    assert relative_error(train(ParameterServer(2, 2, cluster=Inline(0))), train("local")) < EXACT


class EndAt:
    """Ends processes at drawn or named places, each once."""

    def __init__(self, kind: str, method: str, when: str, number: int) -> None:
        self.place, self.number, self.count = (kind, method, when), number, 0

    def __call__(self, process: Any, method: str, when: str) -> bool:
        if (process.kind.__name__, method, when) != self.place:
            return False
        self.count += 1
        return self.count == self.number


PLACES = [
    *[("Worker", method, when) for method in ("__init__", "fold") for when in ("before", "after")],
    *[
        ("ServerShard", method, when)
        for method in ("load", "push", "seal", "commit")
        for when in ("before", "after")
    ],
]


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_a_process_that_ends_changes_nothing(place: tuple[str, str, str]) -> None:
    end = EndAt(*place, 2)
    found = updates(dropout=0.5, cluster=Inline(2, end))
    assert end.count >= 2, "nothing ended"
    assert same_bits(found, updates(dropout=0.5, cluster=Inline(99)))


@pytest.mark.parametrize("seed", range(4))
def test_many_that_end(seed: int) -> None:
    cluster = Inline(seed)
    ended = []

    def end(process: Any, method: str, when: str) -> bool:
        if len(ended) < 6 and method != "__init__" and cluster.drawn.random() < 0.05:
            ended.append((process.kind.__name__, method, when))
            return True
        return False

    cluster.end = end
    assert same_bits(updates(5, cluster=cluster), updates(5, cluster=Inline(99))), ended
    assert ended


def test_a_machine_that_is_lost_with_the_state_of_a_server_is_reported() -> None:
    cluster = Inline()

    def lose(number: int, _: ParameterServer) -> None:
        if number == 2:
            cluster.lose(next(one for one in cluster.processes if one.kind is ServerShard))

    with pytest.raises(RankError, match=r"gone .* Go on from the last checkpoint"):
        updates(cluster=cluster, between=lose)


def test_a_worker_that_ends_again_and_again_is_reported() -> None:
    cluster = Inline(0, lambda process, method, when: method == "fold" and when == "after")
    with pytest.raises(ab.AnybatchError, match="Expected workers to finish unit"):
        updates(cluster=cluster)


def test_workers_join_and_leave() -> None:
    def between(number: int, server: ParameterServer) -> None:
        if number == 1:
            server.add_worker()
        if number == 2:
            server.remove_worker()
            server.remove_worker()

    expected = updates(4, cluster=Inline(99))
    assert same_bits(updates(4, cluster=Inline(1), between=between), expected)


def test_a_slow_worker_holds_nobody_up() -> None:
    cluster = Inline(4)

    counts = []

    def between(number: int, server: ParameterServer) -> None:
        counts.append(server.counts)
        if number == 2:
            cluster.slow = {3}  # the second worker, after two servers

    found = updates(4, cluster=cluster, workers=2, between=between)
    assert same_bits(found, updates(4, cluster=Inline(99)))
    assert counts[3]["back-ups"] > counts[2]["back-ups"]


def test_what_happens_in_each_step_adds_up() -> None:
    """Mutation: a step tells what earlier ones did as well."""
    end = EndAt("Worker", "fold", "after", 10)
    model, server = network(), ParameterServer(2, 3, cluster=Inline(1, end))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ab.Step(model, nn.CrossEntropyLoss(), sgd, options=Options(strategy=server))
    told = [step(batch(number)).counts for number in range(3)]
    server.stop()
    assert [one["pushes"] for one in told] == [16] * 3
    assert sum(one.get("workers replaced", 0) for one in told) == 1
    assert server.counts["pushes"] == 48
    elements = sum(p.numel() for p in model.parameters())
    assert server.counts["bytes pushed"] == sum(one["bytes pushed"] for one in told) == 24 * 8 * elements
    assert server.counts["workers replaced"] == 1


def test_more_workers_than_rows_wait() -> None:
    model = network()
    server = ParameterServer(1, 6, cluster=Inline(0))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ab.Step(model, nn.CrossEntropyLoss(), sgd, options=Options(strategy=server))
    assert step(batch(rows=2)).rows == 2


def test_a_failed_unit_leaves_all_as_before_and_the_next_step_goes_on() -> None:
    def step_and_model() -> Any:
        model = network()
        server = ParameterServer(2, 2, cluster=Inline(0))
        adam = torch.optim.Adam(model.parameters())
        return ab.Step(model, nn.CrossEntropyLoss(), adam, options=Options(strategy=server)), model

    step, model = step_and_model()
    step(batch(0))
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x, y = batch(1)
    with pytest.raises(ab.AnybatchError, match="Expected a finite loss"):
        step((torch.where(torch.arange(ROWS)[:, None] == 30, torch.nan, x), y))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    step(batch(2))
    other, expected = step_and_model()
    other(batch(0))
    other(batch(2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_ctrl_c_between_the_updates_of_two_shards_leaves_all_as_before() -> None:
    model, cluster = network(), Inline(0)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    server = ParameterServer(2, 2, cluster=cluster)
    step = ab.Step(model, nn.CrossEntropyLoss(), adam, options=Options(strategy=server))
    step(batch(0))
    before = copy.deepcopy(model.state_dict())
    committed = []

    def stop(process: Any, method: str, when: str) -> bool:
        committed.extend([process.number] if method == "commit" else [])
        if len(committed) == 3:  # before and after the first, before the second
            committed.append(-1)
            raise KeyboardInterrupt
        return False

    cluster.end = stop
    with pytest.raises(KeyboardInterrupt):
        step(batch(1))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    step(batch(2))
    other = network()
    adam = torch.optim.Adam(other.parameters(), lr=0.01)
    step = ab.Step(
        other, nn.CrossEntropyLoss(), adam, options=Options(strategy=ParameterServer(2, 2, cluster=Inline(0)))
    )
    step(batch(0))
    step(batch(2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_parameter_without_gradient_is_left_alone() -> None:
    """Weight decay and momentum are for those that the loss reaches."""
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "not": nn.Linear(4, 3)}).double()
    adam = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = copy.deepcopy(model["not"].state_dict())

    def loss(model: Any, micro: Any) -> ab.Total:
        scores = model["used"](micro[0])
        return ab.Total(nn.functional.cross_entropy(scores, micro[1], reduction="sum"), len(micro[1]))

    ab.Step(model, loss, adam, options=Options(strategy=ParameterServer(2, 2, cluster=Inline(0))))(batch())
    assert all(torch.equal(before[name], value) for name, value in model["not"].state_dict().items())
    assert len(adam.state_dict()["state"]) == 2


def test_what_the_driver_changes_reaches_the_servers() -> None:
    def train(strategy: Any) -> list[Tensor]:
        model = network()
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        step = ab.Step(
            model,
            nn.CrossEntropyLoss(),
            adam,
            options=Options(strategy=strategy, scheduler=torch.optim.lr_scheduler.StepLR(adam, 2, 0.5)),
        )
        step(batch(0))
        kept, values = copy.deepcopy(adam.state_dict()), copy.deepcopy(model.state_dict())
        step(batch(1))
        model.load_state_dict(values)
        step(batch(2))
        adam.load_state_dict(kept)
        adam.param_groups[0]["weight_decay"] = 0.1
        step(batch(3))
        return [p.detach() for p in model.parameters()]

    pairs = zip(train(ParameterServer(2, 2, cluster=Inline(0))), train("local"), strict=True)
    for one, other in pairs:
        assert relative_error({"": one}, {"": other}) < tolerance(torch.float64, 4 * ROWS)


def test_a_run_that_is_resumed_ends_in_the_same_bits(tmp_path: Any) -> None:
    def trainer(out: str, cluster: Inline) -> ab.Trainer:
        model = network(0.5)
        adam = torch.optim.AdamW(model.parameters(), lr=0.01)
        server = ParameterServer(2, 2, cluster=cluster)
        step = ab.Step(model, nn.CrossEntropyLoss(), adam, options=Options(strategy=server))
        return ab.Trainer(
            step, batch(rows=100), batch_size=20, out=tmp_path / out, save_every=2, progress=False
        )

    torch.manual_seed(3)
    whole = trainer("whole", Inline(1))
    whole.fit(epochs=2)
    torch.manual_seed(3)
    count = 0

    def stop(process: Any, method: str, when: str) -> bool:  # the driver dies in its eighth update
        nonlocal count
        count += method == "commit"
        if count > 2 * 7:
            raise KeyboardInterrupt
        return False

    killed = trainer("killed", Inline(2, stop))
    with pytest.raises(KeyboardInterrupt):
        killed.fit(epochs=2)
    torch.manual_seed(11)
    again = trainer("killed", Inline(3))
    again.resume(tmp_path / "killed")
    again.fit(epochs=2)
    pairs = zip(whole.step.model.parameters(), again.step.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


# ---- pushes


def shard() -> ServerShard:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    layout = Layout.of([*model.parameters()], [sgd], 1, None)
    made = ServerShard(layout, 0)
    made.load(3, layout.flat([*model.parameters()], 0, "float64"), layout.split({}, [*model.parameters()], 0))
    return made


def test_pushes_that_do_not_fit_are_refused_with_a_reason() -> None:
    made = shard()
    size = sum(p.numel() for p in network().parameters())
    good = np.ones((1, size))
    assert "version 2 of the parameters, where 3 is" in made.push(2, 0, good)
    assert "of shape" in made.push(3, 0, good[:, 1:])
    assert "float32 of shape" in made.push(3, 0, good.astype("float32"))
    assert made.push(3, 0, np.where(np.arange(size) == 5, np.nan, good)) == NOT_FINITE
    assert made.push(3, 0, good) == ""
    assert made.push(3, 0, good) == COUNTED
    assert "2 terms, where other units have 1" in made.push(3, 1, np.ones((2, size)))
    assert made.push(3, 2, good) == ""
    assert made.push(3, 2, good) == COUNTED
    with pytest.raises(RuntimeError, match="1 of 3 units"):
        made.seal(3, 3, [1.0])
    assert made.push(3, 1, 2 * good) == ""
    assert made.seal(3, 3, [0.25]) == pytest.approx(size)
