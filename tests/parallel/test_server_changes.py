"""Parameter servers: what a program asks, changes and sends, errors in its own code, and what is refused."""

import copy
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab
from anybatch.core import NonFiniteLossError, PlanError
from anybatch.observe import GradientNoise
from anybatch.parallel.on_ray import RayCluster
from anybatch.parallel.server import ServerShard
from anybatch.parallel.worker import Worker
from anybatch.testing import tolerance
from tests.laws.check import stack
from tests.parallel.inline import Inline
from tests.parallel.test_server import ROWS, assert_close, batch, network, served, step_of, updates

CLOSE = tolerance(torch.float64, 20 * ROWS)
StepLR = torch.optim.lr_scheduler.StepLR


def summed(model: nn.Module, rows: Any) -> ab.Total:
    return ab.Total(F.cross_entropy(model(rows[0]), rows[1], reduction="sum"), len(rows[1]))


def two_terms(model: nn.Module, micro: Any) -> dict[str, ab.Total]:
    scores = model(micro[0])
    some = micro[1] > 0
    return {"all": summed(model, micro), "some": ab.Total(scores[some].square().sum(), some.sum())}


class Weighted(nn.Module):
    """A loss with a factor that programs change while they train."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0

    def raise_beta(self) -> None:
        self.beta *= 2

    def forward(self, model: nn.Module, rows: Any) -> ab.Total:
        total = summed(model, rows)
        return ab.Total(total.sum * self.beta, total.weight)


def clamp(step: ab.Step, loss: Any) -> None:
    for p in step.model.parameters():
        p.data.clamp_(-0.1, 0.1)  # as for a Wasserstein critic; `.data` has no version


def load(step: ab.Step, loss: Any) -> None:
    step.model.load_state_dict({name: one * 0.9 for name, one in step.model.state_dict().items()})
    step.optimizers[0].load_state_dict(copy.deepcopy(step.optimizers[0].state_dict()))
    step.optimizers[0].param_groups[0]["weight_decay"] += 0.1


LONG = {"count": 20, "clip_norm": 0.3}
WEIGHTED = {"make_loss": lambda: ab.Terms(Weighted())}
# What a program asks of its step, or does between two: it comes to the same as without servers.
PROGRAMS: dict[str, dict[str, Any]] = {
    **{kind.__name__: {"optimizer": kind, **LONG} for kind in (torch.optim.SGD, torch.optim.RMSprop)},
    "AdamW": {**LONG, "server": {"servers": 3, "workers": 1}},
    "one of each": {**WEIGHTED, "server": {"servers": 1, "workers": 1}},
    "a sum": {"make_loss": lambda: nn.CrossEntropyLoss(reduction="sum")},
    "two terms": {"make_loss": lambda: ab.Terms(two_terms, {"all": 1.0, "some": 0.3})},
    "a scheduler": {"scheduler": lambda made: StepLR(made, 1, gamma=0.5)},
    "a budget": {"memory": "2GiB", "micro_batch": None},
    "collate": {"collate": stack},
    "recompute": {"recompute": ["0"]},
    "float64 sums": {"accumulate": torch.float64, "micro_batch": None},
    "weights clamped": {"edit": clamp},
    "states loaded": {"edit": load},
    "smoothing set": {"edit": lambda step, loss: setattr(loss, "label_smoothing", 0.3)},
    "a factor of the loss": {"edit": lambda step, loss: loss.function.raise_beta(), **WEIGHTED},
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


def scaled(model: nn.Module, rows: Any, factor: float) -> ab.Total:
    return ab.Total(summed(model, rows).sum * factor, len(rows[1]))


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
    monkeypatch.setattr("tests.parallel.test_server_changes.BETA", 2.0)
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


def test_a_worker_names_rows_of_the_batch() -> None:
    x, y = batch(0)
    x[ROWS - 1] = torch.nan
    with pytest.raises(NonFiniteLossError, match=rf"within rows {ROWS - 5} to {ROWS - 1} of the batch"):
        step_of(network(), served(), micro_batch=1)((x, y))


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


NORM, SPECTRAL = nn.BatchNorm1d(3), nn.utils.spectral_norm(nn.Linear(4, 3)).double()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": ab.WholeBatch(lambda o, y: o.sum())}, "got WholeBatch"),
    ({"optimizer": torch.optim.Adafactor}, "updates each element by itself, got Adafactor"),
    ({"model": network().bfloat16()}, "got \\['bfloat16'\\]"),
    ({"non_finite": "skip"}, "non_finite='skip'"),
    ({"clip_value": 1.0}, "got clip_value=, .* Leave it out"),
    ({"precision": "fp16-mixed"}, "a loss scale"),
    ({"callbacks": [GradientNoise()]}, "got callbacks of gradients .* only workers have. Leave it out"),
    ({"model": nn.Sequential(nn.Linear(4, 3), NORM).double()}, r"BatchNorm .*Pass Options\(b"),
    ({"model": SPECTRAL, "check": False}, "writes to no buffer or"),
]


@pytest.mark.parametrize(("change", "match"), REFUSED)
def test_what_workers_cannot_do(change: dict[str, Any], match: str) -> None:
    model = change.get("model") or network()
    before = [p.detach().clone() for p in model.parameters()]
    step = step_of(model, served(), **{name: one for name, one in change.items() if name != "model"})
    with pytest.raises(ab.AnybatchError, match=match):
        step(batch())
    assert all(map(torch.equal, before, model.parameters()))


def test_a_window_is_refused() -> None:
    with pytest.raises(ab.AnybatchError, match="Expected whole batches with a ParameterServer"):
        step_of(network(), served()).window()
