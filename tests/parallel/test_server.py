"""Parameter servers in one process: exact, whoever ends when."""

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import NonFiniteLossError, RankError, tree
from anybatch.parallel import ParameterServer
from anybatch.parallel.server import ServerShard
from anybatch.testing import relative_error
from tests import zoo
from tests.options import flat
from tests.parallel.inline import Inline
from tests.snapshots import same

ROWS = 37  # uneven in every cut


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return zoo.dropout(4, 3, p=dropout).double()


def batch(seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=drawn)
    return x, torch.randint(3, (rows,), generator=drawn)


def served(servers: int = 2, workers: int = 3, *, cluster: Inline | None = None, **options: Any) -> Any:
    return ParameterServer(servers, workers, cluster=cluster or Inline(0), **options)


def step_of(
    model: nn.Module, strategy: Any = "local", *, optimizer: Any = torch.optim.SGD, lr: float = 0.1,
    loss: Any = None, scheduler: Any = None, **options: Any,
) -> ab.Step:  # fmt: skip
    made = optimizer(model.parameters(), lr=lr)
    options |= {"strategy": strategy, "scheduler": scheduler and scheduler(made)}
    return ab.Step(model, loss or nn.CrossEntropyLoss(), made, **flat(options))


class Trained(NamedTuple):
    parameters: list[Tensor]
    state: Any  # of the optimizer
    reports: list[ab.StepReport]
    drawn: Tensor  # after the updates


def updates(
    count: int = 3, *, cluster: Inline | None = None, server: Mapping[str, Any] = {}, dropout: float = 0.0,
    make_loss: Callable[[], Any] = nn.CrossEntropyLoss, edit: Callable[..., object] = lambda *_: None,
    between: Callable[..., object] = lambda *_: None, **options: Any,
) -> Trained:  # fmt: skip
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


@cache
def undisturbed(count: int) -> Trained:
    return updates(count, dropout=0.5, cluster=Inline(100), server={"workers": 1})


def assert_undisturbed(count: int, **given: Any) -> None:
    """To the bit, also of dropout, which is drawn for the unit."""
    one, other = updates(count, dropout=0.5, **given), undisturbed(count)
    told, expected = ([(r.loss, r.grad_norm, r.rows) for r in trained.reports] for trained in (one, other))
    assert told == expected
    assert all(map(torch.equal, tree.flatten(one[:2]).leaves, tree.flatten(other[:2]).leaves))


@pytest.mark.parametrize("seed", range(4))
def test_bits_depend_on_no_worker(seed: int) -> None:
    """Nor on the order in which workers get on."""
    assert_undisturbed(3, cluster=Inline(seed), server={"workers": 1 + 2 * seed})


class EndAt:
    """Ends a process at a named place, the `number`th time."""

    def __init__(self, kind: str, method: str, when: str, number: int) -> None:
        self.place, self.number, self.count = (kind, method, when), number, 0

    def __call__(self, process: Any, method: str, when: str) -> bool:
        is_it = (process.kind.__name__, method, when) == self.place
        self.count += is_it
        return is_it and self.count == self.number


class Interrupt(EndAt):
    """Ctrl-C there."""

    def __call__(self, process: Any, method: str, when: str) -> bool:
        if super().__call__(process, method, when):
            raise KeyboardInterrupt
        return False


CALLS = {"Worker": ("__init__", "fold"), "ServerShard": ("load", "push", "seal", "commit")}
COMMIT = "ServerShard", "commit", "before"
PLACES = [(kind, one, when) for kind in CALLS for one in CALLS[kind] for when in ("before", "after")]


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_a_process_that_ends_changes_nothing(place: tuple[str, str, str]) -> None:
    end = EndAt(*place, 2)
    assert_undisturbed(3, cluster=Inline(2, end))
    assert end.count >= 2, "nothing ended"


@pytest.mark.parametrize("seed", range(4))
def test_many_that_end(seed: int) -> None:
    cluster, ended = Inline(seed), list[str]()

    def end(process: Any, method: str, when: str) -> bool:
        does = len(ended) < 6 and method != "__init__" and cluster.drawn.random() < 0.05
        ended.extend([method] * does)
        return does

    cluster.end = end
    assert_undisturbed(5, cluster=cluster)
    assert ended


FOLDED = lambda process, method, when: (method, when) == ("fold", "after")  # noqa: E731


@pytest.mark.parametrize(("end", "match"), [(None, "gone .* Go on from"), (FOLDED, "Expected workers to")])
def test_what_cannot_be_done_again_is_reported(end: Any, match: str) -> None:
    """A machine that is gone with the state of a server; workers that end again and again."""
    cluster = Inline(0, end or (lambda *_: False))

    def lose(number: int, _: ParameterServer) -> None:
        if number == 2:
            cluster.lose(next(one for one in cluster.processes if one.kind is ServerShard))

    with pytest.raises(ab.AnybatchError, match=match) as found:
        updates(cluster=cluster, between=lose)
    assert isinstance(found.value, RankError) or end


def test_workers_join_leave_and_get_slow() -> None:
    cluster, counts = Inline(4), list[Mapping[str, int]]()

    def between(number: int, server: ParameterServer) -> None:
        counts.append(server.counts)
        if number == 1:
            server.add_worker()
        if number == 2:
            server.remove_worker()
            server.remove_worker()
            server.add_worker()
            cluster.slow = {3}  # a worker, after two servers

    assert_undisturbed(5, cluster=cluster, server={"workers": 2}, between=between)
    assert counts[4]["back-ups"] > counts[2]["back-ups"]


@pytest.mark.parametrize("error", [NonFiniteLossError, KeyboardInterrupt])
def test_a_step_that_fails_leaves_all_as_before_and_the_next_one_goes_on(error: type[BaseException]) -> None:
    """A unit that is not finite, and Ctrl-C between the updates of two shards."""
    is_interrupt = error is KeyboardInterrupt
    cluster = Inline(0, Interrupt(*COMMIT, 4 if is_interrupt else 99))
    step, other = (
        step_of(network(), served(2, 2, cluster=one), optimizer=torch.optim.Adam, lr=0.01)
        for one in (cluster, Inline(0))
    )
    step(batch(0))
    (x, y), before, random = batch(1), copy.deepcopy(step.model.state_dict()), torch.get_rng_state()
    x[30] = x[30] if is_interrupt else torch.nan
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
    idle = nn.Linear(4, 3)
    model = zoo.Made(lambda self, x: self.used(x), used=nn.Linear(4, 3), idle=idle).double()
    before = [p.detach().clone() for p in idle.parameters()]
    step = step_of(model, served(2, 2), optimizer=torch.optim.AdamW)  # which decays weights
    step(batch())
    assert all(map(torch.equal, before, idle.parameters()))
    assert len(step.optimizers[0].state_dict()["state"]) == 2


def test_a_run_that_is_resumed_ends_in_the_same_bits(tmp_path: Any) -> None:
    """The driver dies in its eighth update; the random state is another one when it comes back."""

    def trainer(seed: int, out: str, cluster: Inline) -> ab.Trainer:
        step = step_of(network(0.5), served(2, 2, cluster=cluster), optimizer=torch.optim.AdamW, lr=0.01)
        torch.manual_seed(seed)
        options: Any = {"batch_size": 20, "out": tmp_path / out, "save_every": 2, "progress": False}
        return ab.Trainer(step, batch(rows=100), **options)

    whole = trainer(3, "whole", Inline(1))
    whole.fit(epochs=2)
    with pytest.raises(KeyboardInterrupt):
        trainer(3, "killed", Inline(2, Interrupt(*COMMIT, 15))).fit(epochs=2)
    again = trainer(11, "killed", Inline(3))
    again.resume(tmp_path / "killed")
    again.fit(epochs=2)
    assert all(map(torch.equal, whole.step.model.parameters(), again.step.model.parameters()))


def assert_close(found: Any, expected: Any, bound: float) -> None:
    """All numbers of two nests, but for rounding."""
    pairs = zip(tree.flatten(found).leaves, tree.flatten(expected).leaves, strict=True)
    assert max(relative_error({"": a.double()}, {"": b.double()}) for a, b in pairs) < bound


def test_a_slow_worker_holds_nobody_up() -> None:
    cluster = Inline(4)

    counts = []

    def between(number: int, server: ParameterServer) -> None:
        counts.append(server.counts)
        if number == 2:
            cluster.slow = {3}  # the second worker, after two servers

    found = updates(4, cluster=cluster, server={"workers": 2}, between=between)
    assert same(found[:2], updates(4, cluster=Inline(99))[:2])
    assert counts[3]["back-ups"] > counts[2]["back-ups"]
