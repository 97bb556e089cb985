"""Parameter servers: what a program changes between steps, and errors in its own code."""

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import NonFiniteLossError, PlanError
from anybatch.parallel import ParameterServer
from anybatch.step.remote import Remote
from tests.parallel.inline import Inline
from tests.parallel.test_server import EXACT, ROWS, batch, network

Edit = Callable[[nn.Module, Any], object]


class Weighted(nn.Module):
    """A loss with a factor that programs change while they train."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[Any] = []
        self.beta, self.frozen = 1.0, nn.Parameter(torch.ones(()).double(), requires_grad=False)

    def slow_down(self) -> None:
        for group in self.groups:
            group["lr"] *= 0.5

    def forward(self, model: nn.Module, rows: Any) -> ab.Total:
        losses = F.cross_entropy(model(rows[0]), rows[1], reduction="none")
        return ab.Total((losses * self.beta * self.frozen).sum(), len(losses))


def served() -> ParameterServer:
    return ParameterServer(2, 3, cluster=Inline(0))


def trained(edit: Edit, make_loss: Callable[[], Any], strategy: Any) -> tuple[list[Tensor], Tensor]:
    """Parameters after updates with an edit before each but the first; and what is drawn then."""
    torch.manual_seed(5)
    model, loss = network(), make_loss()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    made = loss
    if isinstance(loss, Weighted):
        made, loss.groups = ab.Terms(loss), adam.param_groups
    step = ab.Step(model, made, adam, micro_batch=4, options=ab.Options(strategy=strategy))
    for number in range(4):
        if number:
            edit(model, loss)
        step(batch(number))
    return [p.detach().clone() for p in model.parameters()], torch.rand(3)


def clamp(model: nn.Module, loss: Any) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)  # as for a Wasserstein critic; `.data` has no version


def halve(model: nn.Module, loss: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def write_beside(model: nn.Module, loss: Any) -> None:
    loss.frozen.data.mul_(1.5)


def slow_down(model: nn.Module, loss: Any) -> None:
    loss.slow_down()


@pytest.mark.parametrize(
    ("edit", "make_loss"),
    [
        (clamp, nn.CrossEntropyLoss),
        (halve, nn.CrossEntropyLoss),
        (lambda model, loss: setattr(loss, "label_smoothing", 0.3), nn.CrossEntropyLoss),
        (
            lambda model, loss: setattr(loss, "weight", torch.tensor([0.1, 1.0, 3.0]).double()),
            lambda: nn.CrossEntropyLoss(weight=torch.ones(3).double()),
        ),
        (lambda model, loss: setattr(loss, "beta", loss.beta * 2), Weighted),
        (write_beside, Weighted),
        (slow_down, Weighted),
    ],
)
def test_workers_follow_what_changes_between_steps(edit: Edit, make_loss: Callable[[], Any]) -> None:
    expected, drawn = trained(edit, make_loss, "local")
    server = served()
    found, drawn_too = trained(edit, make_loss, server)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)
    assert torch.equal(drawn, drawn_too)  # the program's own random numbers stay what they were
    kinds = [kind for kind, method in server._cluster.calls if method == "__init__"]  # type: ignore[union-attr]
    assert kinds.count("Worker") <= 3  # nothing was started again


def test_modes_of_modules_reach_workers() -> None:
    def losses(strategy: Any) -> list[float]:
        model = network(0.5).eval()
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        step = ab.Step(model, nn.CrossEntropyLoss(), sgd, options=ab.Options(strategy=strategy))
        found = [step(batch(0)).loss]
        model.train()
        return [*found, step(batch(0)).loss]

    first, second = losses(served())
    assert first == pytest.approx(losses("local")[0])
    assert second != pytest.approx(first)


class Both(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_two_networks_that_train_each_other() -> None:
    """A GAN: each step has a server of its own, and reads parameters that the other updates."""

    def train(strategies: list[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        generator, critic = nn.Linear(4, 4).double(), network()
        loss = nn.CrossEntropyLoss()
        adams = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (critic, generator)]
        judge = ab.Step(critic, loss, adams[0], micro_batch=5, options=ab.Options(strategy=strategies[0]))
        make = ab.Step(
            Both(generator, critic), loss, adams[1], micro_batch=5, options=ab.Options(strategy=strategies[1])
        )
        for number in range(4):
            x, y = batch(number)
            x = x + torch.randn_like(x)
            with torch.no_grad():
                judged = generator(x)
            judge((judged, y))
            make((x, y))
        return [*generator.parameters(), *critic.parameters()]

    expected = train(["local", "local"])
    with pytest.warns(UserWarning, match="give each Step a ParameterServer of its own"):
        slowly = train([served()] * 2)
    for found in (train([served(), served()]), slowly):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


settings = types.SimpleNamespace(beta=1.0)
BETA = 1.0


def by_global(model: nn.Module, rows: Any) -> ab.Total:
    return ab.Total(F.cross_entropy(model(rows[0]), rows[1], reduction="sum") * BETA, len(rows[1]))


def by_object(model: nn.Module, rows: Any) -> ab.Total:
    return ab.Total(F.cross_entropy(model(rows[0]), rows[1], reduction="sum") * settings.beta, len(rows[1]))


class Program:
    def __init__(self) -> None:
        self.beta, self.steps = 1.0, 0

    def loss(self, model: nn.Module, rows: Any) -> ab.Total:
        return ab.Total(F.cross_entropy(model(rows[0]), rows[1], reduction="sum") * self.beta, len(rows[1]))


@pytest.mark.parametrize("where", ["global", "object", "closure", "method"])
def test_what_a_loss_reads_elsewhere_must_not_change(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held, program = {"beta": 1.0}, Program()

    def by_closure(model: nn.Module, rows: Any) -> ab.Total:
        loss = F.cross_entropy(model(rows[0]), rows[1], reduction="sum")
        return ab.Total(loss * held["beta"], len(rows[1]))

    loss = {"global": by_global, "object": by_object, "closure": by_closure, "method": program.loss}[where]
    model = network()
    server = served()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ab.Step(model, loss, sgd, options=ab.Options(strategy=server))
    step(batch(0))
    program.steps += 1  # nothing reads it
    step(batch(1))
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr("tests.parallel.test_server_changes.BETA", 2.0)
    monkeypatch.setattr(settings, "beta", 2.0)
    program.beta = held["beta"] = 2.0
    with pytest.raises(PlanError, match=r"another value of (BETA|beta): 2\.0"):
        step(batch(2))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    server.stop()
    step(batch(2))


@pytest.mark.parametrize(
    "layer",
    [
        nn.utils.spectral_norm(nn.Linear(4, 3)).double(),
        nn.Sequential(nn.Flatten(0), nn.Embedding(5, 3, max_norm=0.1).double(), nn.Unflatten(0, (-1, 4))),
    ],
)
def test_forwards_that_write_to_buffers_or_parameters_are_refused(layer: nn.Module) -> None:
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3).double())
    x, y = batch(0)
    x = x.long().clamp(0, 4) if isinstance(layer, nn.Sequential) else x
    with torch.no_grad():
        model(x)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ab.Step(model, nn.CrossEntropyLoss(), sgd, options=ab.Options(check=False, strategy=served()))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(PlanError, match="writes to no buffer or parameter"):
        step((x, y))
    assert all(map(torch.equal, before, model.parameters()))


def test_a_worker_names_rows_of_the_batch() -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ab.Step(model, nn.CrossEntropyLoss(), sgd, micro_batch=1, options=ab.Options(strategy=served()))
    x, y = batch(0)
    with pytest.raises(NonFiniteLossError, match=rf"within rows {ROWS - 5} to {ROWS - 1} of the batch"):
        step((torch.where(torch.arange(ROWS)[:, None] == ROWS - 1, torch.nan, x), y))


class OddError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("error", "kind"), [(KeyError("label"), KeyError), (OddError("this", "that"), RuntimeError)]
)
def test_an_error_in_a_loss_says_where(error: Exception, kind: type[Exception]) -> None:
    """Also one that cannot be made anew from its arguments, so that it cannot be sent."""

    def loss(model: nn.Module, rows: Any) -> ab.Total:
        raise error

    model = network()
    server = served()
    step = ab.Step(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.1), options=ab.Options(strategy=server)
    )
    with pytest.raises(kind, match=r"label|OddError: this and that") as found:
        step(batch(0))
    assert "in loss\n    raise error" in "".join(found.value.__notes__)
    assert not server.counts["workers replaced"]


def test_workers_compute_in_the_default_dtype_of_the_driver() -> None:
    model = network()
    made = Remote.of(ab.Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)))
    torch.set_default_dtype(torch.float64)
    try:
        made("local")
        assert torch.get_default_dtype() is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_last_worker_stays() -> None:
    with pytest.raises(PlanError, match=r"got 1 in all. Call stop\(\)"):
        ParameterServer(workers=1, cluster=Inline(0)).remove_worker()
