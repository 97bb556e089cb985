"""Parameter servers in one process: exact, whoever ends when; what a program asks and changes, and errors."""

import copy
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import NonFiniteLossError, PlanError, RankError, tree
from anybatch.observe import GradientNoise
from anybatch.parallel import ParameterServer
from anybatch.parallel.on_ray import RayCluster
from anybatch.parallel.server import ServerShard
from anybatch.parallel.worker import Worker
from anybatch.testing import relative_error, tolerance
from tests import zoo
from tests.faults.faulty import make_batch
from tests.laws.check import stack
from tests.options import flat
from tests.parallel.inline import Inline

ROWS = 37  # uneven in every cut


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return zoo.dropout(9, 4, p=dropout).double()


def batch(seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return make_batch(seed, rows, torch.float64)


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
    """Ends a process at a named place, the `number`th time; or there is a Ctrl-C."""

    def __init__(self, kind: str, method: str, when: str, number: int, interrupts: bool = False) -> None:
        self.place, self.number, self.count, self.interrupts = (kind, method, when), number, 0, interrupts

    def __call__(self, process: Any, method: str, when: str) -> bool:
        is_it = (process.kind.__name__, method, when) == self.place
        self.count += is_it
        does = is_it and self.count == self.number
        if does and self.interrupts:
            raise KeyboardInterrupt
        return does


CALLS = {"Worker": ("__init__", "fold"), "ServerShard": ("__init__", "merge", "update")}
UPDATE = "ServerShard", "update", "before"
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


@pytest.mark.parametrize(("ends", "match"), [(False, "gone .* Go on from"), (True, "Expected workers to")])
def test_what_cannot_be_done_again_is_reported(ends: bool, match: str) -> None:
    """A machine that is gone with the state of a server; workers that end again and again."""
    cluster = Inline(0, lambda _, *at: ends and at == ("fold", "after"))

    def lose(number: int, _: ParameterServer) -> None:
        if number == 2:
            cluster.lose(next(one for one in cluster.processes if one.kind is ServerShard))

    with pytest.raises(ab.AnybatchError, match=match) as found:
        updates(cluster=cluster, between=lose)
    assert isinstance(found.value, RankError) or ends


def test_sums_that_are_gone_with_a_machine_are_computed_again() -> None:
    """A worker's machine ends when its units are done, and nothing is merged yet."""
    ended = list[int]()

    def end(process: Any, method: str, when: str) -> bool:
        if (method, when) == ("merge", "before") and not ended:
            ended.append(cluster.calls.count(("Worker", "fold")))
            cluster.lose(next(one for one in cluster.processes if one.kind is Worker))
        return False

    cluster = Inline(0, end)
    assert_undisturbed(3, cluster=cluster)
    assert cluster.calls.count(("Worker", "fold")) >= 2 * ended[0] + 2 * 8


def test_workers_join_leave_and_get_slow() -> None:
    cluster, counts = Inline(4), list[Mapping[str, int]]()

    def between(number: int, server: ParameterServer) -> None:
        counts.append(server.counts)
        if number == 2:
            server.remove_worker()
            server.remove_worker()
            cluster.slow = {cluster.processes.index(server._scheduler.workers[0])}
        if number in (1, 2):
            server.add_worker()

    assert_undisturbed(5, cluster=cluster, server={"workers": 2}, between=between)
    assert counts[4]["back-ups"] > counts[2]["back-ups"]


@pytest.mark.parametrize("error", [NonFiniteLossError, KeyboardInterrupt])
def test_a_step_that_fails_leaves_all_as_before_and_the_next_one_goes_on(error: type[BaseException]) -> None:
    """A unit that is not finite, and Ctrl-C between the updates of two shards."""
    is_interrupt = error is KeyboardInterrupt
    cluster = Inline(0, EndAt(*UPDATE, 4 if is_interrupt else 99, True))
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
    idle = nn.Linear(9, 4)
    model = zoo.Made(lambda self, x: self.used(x), used=nn.Linear(9, 4), idle=idle).double()
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
        trainer(3, "killed", Inline(2, EndAt(*UPDATE, 15, True))).fit(epochs=2)
    again = trainer(11, "killed", Inline(3))
    again.resume(tmp_path / "killed")
    again.fit(epochs=2)
    assert all(map(torch.equal, whole.step.model.parameters(), again.step.model.parameters()))


def assert_close(found: Any, expected: Any, bound: float) -> None:
    """All numbers of two nests, but for rounding."""
    pairs = zip(tree.flatten(found).leaves, tree.flatten(expected).leaves, strict=True)
    assert max(relative_error({"": a.double()}, {"": b.double()}) for a, b in pairs) < bound


# ---- what a program asks, changes and sends

CLOSE = tolerance(torch.float64, 20 * ROWS)
StepLR = torch.optim.lr_scheduler.StepLR


def summed(model: nn.Module, rows: Any) -> ab.Total:
    return ab.Total(F.cross_entropy(model(rows[0]), rows[1], reduction="sum"), len(rows[1]))


def two_terms(model: nn.Module, micro: Any) -> dict[str, ab.Total]:
    scores = model(micro[0])
    some = micro[1] > 0
    return {"all": summed(model, micro), "some": ab.Total(scores[some].square().sum(), some.sum())}


def scaled(model: nn.Module, rows: Any, factor: float) -> ab.Total:
    return ab.Total(summed(model, rows).sum * factor, len(rows[1]))


def load(step: ab.Step, loss: Any) -> None:
    step.model.load_state_dict({name: one * 0.9 for name, one in step.model.state_dict().items()})
    step.optimizers[0].load_state_dict(copy.deepcopy(step.optimizers[0].state_dict()))
    step.optimizers[0].param_groups[0]["weight_decay"] += 0.1


LONG = {"count": 20, "clip_norm": 0.3}
# A loss with a factor that programs change while they train.
FACTOR = {"make_loss": lambda: ab.Terms(zoo.Made(lambda self, *of: scaled(*of, self.beta), beta=1.0))}
# What a program asks of its step, or does between two: it comes to the same as without servers.
PROGRAMS: dict[str, dict[str, Any]] = {
    **{kind.__name__: {"optimizer": kind, **LONG} for kind in (torch.optim.SGD, torch.optim.RMSprop)},
    "AdamW": {**LONG, "server": {"servers": 3, "workers": 1}},
    "one of each": {**FACTOR, "server": {"servers": 1, "workers": 1}},
    "a sum": {"make_loss": lambda: nn.CrossEntropyLoss(reduction="sum")},
    "two terms": {"make_loss": lambda: ab.Terms(two_terms, {"all": 1.0, "some": 0.3})},
    "a scheduler": {"scheduler": lambda made: StepLR(made, 1, gamma=0.5)},
    "a budget": {"memory": "2GiB", "micro_batch": None},
    "collate": {"collate": stack},
    "recompute": {"recompute": ["0"]},
    "float64 sums": {"accumulate": torch.float64, "micro_batch": None},
    # As for a Wasserstein critic; `.data` has no version.
    "weights clamped": {
        "edit": lambda step, loss: [p.data.clamp_(-0.1, 0.1) for p in step.model.parameters()]
    },
    "states loaded": {"edit": load},
    "smoothing set": {"edit": lambda step, loss: setattr(loss, "label_smoothing", 0.3)},
    "a factor of the loss": {"edit": lambda step, loss: setattr(loss.function, "beta", 2.0), **FACTOR},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_served_is_what_one_process_does(name: str) -> None:
    cluster, told = Inline(1), list[Any]()
    alone = updates(**PROGRAMS[name])
    found = updates(**PROGRAMS[name], cluster=cluster, callbacks=[told.append])
    assert told == found.reports
    for field in ("update", "learning_rate", "rows"):
        assert [getattr(r, field) for r in found.reports] == [getattr(r, field) for r in alone.reports]
    assert [r.loss for r in found.reports] == pytest.approx([r.loss for r in alone.reports], rel=CLOSE)
    assert_close(found[:2], alone[:2], CLOSE)
    assert torch.equal(found.drawn, alone.drawn)  # the program's own random numbers stay what they were
    assert cluster.calls.count(("Worker", "__init__")) <= 4  # nothing was started again


BETA = 1.0


@pytest.mark.parametrize("where", ["global", "closure", "method"])
def test_what_a_loss_reads_elsewhere_must_not_change(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held, program = {"beta": 1.0}, types.SimpleNamespace(beta=1.0, steps=0)
    loss = {
        "global": lambda model, rows: scaled(model, rows, BETA),
        "closure": lambda model, rows: scaled(model, rows, held["beta"]),
        "method": types.MethodType(lambda self, model, rows: scaled(model, rows, self.beta), program),
    }[where]
    model, server = network(), served()
    step = step_of(model, server, loss=loss)
    step(batch(0))
    program.steps += 1  # nothing reads it
    step(batch(1))
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr("tests.parallel.test_server.BETA", 2.0)
    program.beta = held["beta"] = 2.0
    with pytest.raises(PlanError, match=r"another value of (BETA|beta): 2\.0"):
        step(batch(2))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    server.stop()
    step(batch(2))


def test_the_state_of_the_optimizer_is_where_the_next_update_is_made() -> None:
    """Also after `stop`, and where another step makes it: here, or on other servers."""

    def moved(*strategies: Any) -> list[Any]:
        model = network()
        made = torch.optim.Adam(model.parameters(), lr=0.01)
        steps = [step_of(model, one, optimizer=lambda *_, **__: made) for one in strategies]
        for number in range(8):
            steps[number % len(steps)](batch(number))
            if number == 5 and strategies[0] != "local":
                strategies[0].stop()
        return [*model.parameters(), made.state_dict()["state"]]

    for others in ([], ["local"], [served(2, 2, cluster=Inline(2)), "local"]):
        assert_close(moved(served(1, 2), *others), moved("local"), CLOSE)


def test_modes_of_modules_reach_workers() -> None:
    model = network(0.5).eval()
    step = step_of(model, served(), lr=0.0)
    first = step(batch(0)).loss
    assert first == pytest.approx(step_of(model, lr=0.0)(batch(0)).loss)
    model.train()
    assert step(batch(0)).loss != pytest.approx(first)


def test_two_steps_of_one_server_are_right_but_start_it_again() -> None:
    server = served()
    first, second = (step_of(network(), server) for _ in range(2))
    first(batch())
    with pytest.warns(UserWarning, match="give each Step a ParameterServer of its own"):
        second(batch())
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))


def test_each_worker_asks_ray_for_a_gpu_and_is_refused_where_there_is_none() -> None:
    """Ray waits for ever."""
    asked: list[int] = []

    def options(**given: Any) -> Any:
        asked.append(given["num_gpus"])
        return types.SimpleNamespace(options=options, remote=lambda *_: object())

    cluster = RayCluster.__new__(RayCluster)
    remote = lambda kind: types.SimpleNamespace(options=options)  # noqa: E731
    ray = types.SimpleNamespace(remote=remote, kill=id, cluster_resources=lambda: {"GPU": 2})
    vars(cluster).update(_ray=ray, _gpus=1, _actors={})
    _, first, _ = (cluster.start(kind) for kind in (ServerShard, Worker, Worker))
    assert asked == [0, 1, 1]
    with pytest.raises(PlanError, match=r"got 2 for 3 workers\. .*device=.cpu"):
        cluster.start(Worker)
    cluster.kill(first)
    cluster.start(Worker)


def test_a_worker_names_rows_of_the_batch_and_a_window_is_refused() -> None:
    x, y = batch(0)
    x[ROWS - 1] = torch.nan
    with pytest.raises(NonFiniteLossError, match=rf"within rows {ROWS - 5} to {ROWS - 1} of the batch"):
        step_of(network(), served(), micro_batch=1)((x, y))
    with pytest.raises(ab.AnybatchError, match="Expected whole batches with a ParameterServer"):
        step_of(network(), served()).window()


def test_an_error_in_a_loss_says_where() -> None:
    """Also one that cannot be made anew from its arguments, so that it cannot be sent."""

    class OddError(Exception):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(f"{one} and {two}")

    def loss(model: nn.Module, rows: Any) -> ab.Total:
        raise error

    for error, kind in ((KeyError("label"), KeyError), (OddError("this", "that"), RuntimeError)):  # noqa: B007
        server = served()
        with pytest.raises(kind, match=r"label|OddError: this and that") as found:
            step_of(network(), server, loss=loss)(batch(0))
        assert "in loss\n    raise error" in "".join(found.value.__notes__)
        assert not server.counts["workers replaced"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": ab.WholeBatch(lambda o, y: o.sum())}, "got WholeBatch"),
    ({"optimizer": torch.optim.Adafactor}, "updates each element by itself, got Adafactor"),
    ({"model": network().bfloat16()}, "got \\['bfloat16'\\]"),
    ({"non_finite": "skip"}, "non_finite='skip'"),
    ({"clip_value": 1.0}, "got clip_value=, .* Leave it out"),
    ({"precision": "fp16-mixed"}, "a loss scale"),
    ({"callbacks": [GradientNoise()]}, "got callbacks of gradients .* only workers have. Leave it out"),
    ({"model": nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4)).double()}, r"BatchNorm .*Pass Options\(b"),
    ({"model": nn.utils.spectral_norm(nn.Linear(9, 4)).double(), "check": False}, "writes to no buffer or"),
]


@pytest.mark.parametrize(("change", "match"), REFUSED)
def test_what_workers_cannot_do(change: dict[str, Any], match: str) -> None:
    step = step_of(**{"model": network(), "strategy": served()} | change)
    before = [p.detach().clone() for p in step.model.parameters()]
    with pytest.raises(ab.AnybatchError, match=match):
        step(batch())
    assert all(map(torch.equal, before, step.model.parameters()))
