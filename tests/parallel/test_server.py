"""Parameter servers in one process: exact, whoever ends when; what is refused."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import NonFiniteLossError, RankError, tree
from anybatch.parallel import ParameterServer
from anybatch.parallel.server import COUNTED, NOT_FINITE, Layout, ServerShard
from anybatch.testing import reference_step, relative_error
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


def served(servers: int = 2, workers: int = 3, *, cluster: Inline | None = None, **options: Any) -> Any:
    return ParameterServer(servers, workers, cluster=cluster or Inline(0), **options)


def step_of(
    model: nn.Module,
    strategy: Any = "local",
    *,
    optimizer: Callable[..., Any] = torch.optim.SGD,
    lr: float = 0.1,
    loss: Any = None,
    scheduler: Callable[[Any], Any] | None = None,
    **options: Any,
) -> ab.Step:
    made = optimizer(model.parameters(), lr=lr)
    options |= {"strategy": strategy, "scheduler": scheduler and scheduler(made)}
    return ab.Step(model, loss or nn.CrossEntropyLoss(), made, **flat(options))


class Trained(NamedTuple):
    """Parameters, state of the optimizer and reports after some updates, and what is drawn then."""

    parameters: list[Tensor]
    state: Any
    reports: list[ab.StepReport]
    drawn: Tensor


def updates(
    count: int = 3,
    *,
    cluster: Inline | None = None,
    server: Mapping[str, Any] = {},
    dropout: float = 0.0,
    make_loss: Callable[[], Any] = nn.CrossEntropyLoss,
    edit: Callable[[ab.Step, Any], object] = lambda *_: None,
    between: Callable[[int, ParameterServer], object] = lambda *_: None,
    **options: Any,
) -> Trained:
    """Train alone without a cluster; before each update but the first the program may edit what it has."""
    strategy = "local" if cluster is None else served(cluster=cluster, **server)
    loss = make_loss()
    options = {"optimizer": torch.optim.AdamW, "lr": 0.01, "micro_batch": 4} | options
    step = step_of(network(dropout), strategy, loss=loss, **options)
    torch.manual_seed(7)
    reports = []
    for number in range(count):
        if number:
            edit(step, loss)
        if cluster is not None:
            between(number, strategy)
        rows = batch(number)
        reports.append(step([*zip(*rows, strict=True)] if step.collate else rows))
    parameters = [p.detach().clone() for p in step.model.parameters()]
    return Trained(parameters, step.optimizers[0].state_dict()["state"], reports, torch.rand(3))


def same_bits(one: Trained, other: Trained) -> bool:
    pairs = zip(tree.flatten(one[:2]).leaves, tree.flatten(other[:2]).leaves, strict=True)
    told = [[(r.loss, r.grad_norm, r.rows) for r in each.reports] for each in (one, other)]
    return told[0] == told[1] and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("loss", "servers", "workers"),
    [*[(loss, 2, 4) for loss in LOSSES], ("ignored", 1, 1), ("mean", 1, 2), ("terms", 3, 1), ("sum", 3, 4)],
)
def test_the_gradient_is_that_of_the_whole_batch(loss: str, servers: int, workers: int) -> None:
    model, made = network(), LOSSES[loss]()
    expected = reference_step(model, made, batch())
    before = copy.deepcopy(dict(model.named_parameters()))
    server = served(servers, workers, cluster=Inline(servers + workers))
    report = step_of(model, server, lr=1.0, loss=made, micro_batch=4)(batch())
    found = {name: before[name].detach() - p.detach() for name, p in model.named_parameters()}
    assert relative_error(found, expected.gradients) < EXACT
    assert abs(report.loss - expected.loss) < EXACT * abs(expected.loss)
    assert report.rows == ROWS


@pytest.mark.parametrize("seed", range(4))
def test_bits_depend_on_no_worker(seed: int) -> None:
    """Nor on the order in which workers get on; dropout is drawn for the unit."""
    expected = updates(dropout=0.5, cluster=Inline(100), server={"workers": 1})
    found = updates(dropout=0.5, cluster=Inline(seed), server={"workers": 1 + 2 * seed})
    assert same_bits(found, expected)


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


def test_more_workers_than_rows_wait() -> None:
    assert step_of(network(), served(1, 6))(batch(rows=2)).rows == 2


@pytest.mark.parametrize("error", [NonFiniteLossError, KeyboardInterrupt])
def test_a_step_that_fails_leaves_all_as_before_and_the_next_one_goes_on(error: type[BaseException]) -> None:
    """A unit that is not finite, and Ctrl-C between the updates of two shards."""

    def adam(cluster: Inline) -> ab.Step:
        return step_of(network(), served(2, 2, cluster=cluster), optimizer=torch.optim.Adam, lr=0.01)

    cluster, committed = Inline(0), list[int]()

    def stop(process: Any, method: str, when: str) -> bool:
        committed.extend([process.number] if method == "commit" else [])
        if len(committed) == 3:  # before and after the first, before the second
            committed.append(-1)
            raise KeyboardInterrupt
        return False

    step, other, (x, y) = adam(cluster), adam(Inline(0)), batch(1)
    step(batch(0))
    before, random = copy.deepcopy(step.model.state_dict()), torch.get_rng_state()
    if error is KeyboardInterrupt:
        cluster.end = stop
    else:
        x = torch.where(torch.arange(ROWS)[:, None] == 30, torch.nan, x)
    with pytest.raises(error):
        step((x, y))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in step.model.state_dict().items())
    step(batch(2))
    for number in (0, 2):
        other(batch(number))
    assert all(map(torch.equal, step.model.parameters(), other.model.parameters()))


def test_a_parameter_without_gradient_is_left_alone() -> None:
    """Weight decay and momentum are for those that the loss reaches."""
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "not": nn.Linear(4, 3)}).double()
    before = copy.deepcopy(model["not"].state_dict())

    def loss(model: Any, micro: Any) -> ab.Total:
        scores = model["used"](micro[0])
        return ab.Total(nn.functional.cross_entropy(scores, micro[1], reduction="sum"), len(micro[1]))

    step = step_of(model, served(2, 2), optimizer=torch.optim.AdamW, loss=loss)  # which decays weights
    step(batch())
    assert all(torch.equal(before[name], value) for name, value in model["not"].state_dict().items())
    assert len(step.optimizers[0].state_dict()["state"]) == 2


def test_a_run_that_is_resumed_ends_in_the_same_bits(tmp_path: Any) -> None:
    def trainer(out: str, cluster: Inline) -> ab.Trainer:
        step = step_of(network(0.5), served(2, 2, cluster=cluster), optimizer=torch.optim.AdamW, lr=0.01)
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
