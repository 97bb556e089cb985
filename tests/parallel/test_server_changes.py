"""Parameter servers: what a program asks and changes, errors in its own code, and what is refused."""

import copy
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import NonFiniteLossError, PlanError, tree
from anybatch.observe import GradientNoise
from anybatch.parallel import ParameterServer
from anybatch.testing import relative_error, tolerance
from tests.parallel.inline import Inline
from tests.parallel.test_server import EXACT, ROWS, batch, network, served, step_of, updates


def by_samples(samples: Any) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


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
        losses = nn.functional.cross_entropy(model(rows[0]), rows[1], reduction="none")
        return ab.Total((losses * self.beta * self.frozen).sum(), len(losses))


def weighted() -> ab.Terms:
    return ab.Terms(Weighted())


def clamp(step: ab.Step, loss: Any) -> None:
    for p in step.model.parameters():
        p.data.clamp_(-0.1, 0.1)  # as for a Wasserstein critic; `.data` has no version


def halve(step: ab.Step, loss: Any) -> None:
    for p in step.model.parameters():
        p.data = p.data * 0.5


def load(step: ab.Step, loss: Any) -> None:
    step.model.load_state_dict({name: one * 0.9 for name, one in step.model.state_dict().items()})
    step.optimizers[0].load_state_dict(copy.deepcopy(step.optimizers[0].state_dict()))
    step.optimizers[0].param_groups[0]["weight_decay"] += 0.1


def slow_down(step: ab.Step, loss: Any) -> None:
    loss.function.groups = step.optimizers[0].param_groups
    loss.function.slow_down()


def set_class_weights(step: ab.Step, loss: Any) -> None:
    loss.weight = torch.tensor([0.1, 1.0, 3.0]).double()


LONG = {"count": 20, "clip_norm": 0.3}
# What a program asks of its step, or does between two: it comes to the same as without servers.
PROGRAMS: dict[str, dict[str, Any]] = {
    **{kind.__name__: {"optimizer": kind, **LONG} for kind in (torch.optim.SGD, torch.optim.RMSprop)},
    "AdamW": LONG,
    "a scheduler": {"scheduler": lambda made: torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)},
    "a budget": {"memory": "2GiB", "micro_batch": None},
    "collate": {"collate": by_samples},
    "recompute": {"recompute": ["0"]},
    "float64 sums": {"accumulate": torch.float64, "micro_batch": None},
    "weights clamped": {"edit": clamp},
    "weights replaced": {"edit": halve},
    "states loaded": {"edit": load},
    "smoothing set": {"edit": lambda step, loss: setattr(loss, "label_smoothing", 0.3)},
    "class weights set": {
        "edit": set_class_weights,
        "make_loss": lambda: nn.CrossEntropyLoss(weight=torch.ones(3).double()),
    },
    "a factor of the loss": {
        "edit": lambda step, loss: setattr(loss.function, "beta", loss.function.beta * 2),
        "make_loss": weighted,
    },
    "a frozen part written beside": {
        "edit": lambda step, loss: loss.function.frozen.data.mul_(1.5),
        "make_loss": weighted,
    },
    "rates set by the loss": {"edit": slow_down, "make_loss": weighted},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_served_is_what_one_process_does(name: str) -> None:
    cluster, told = Inline(1), list[Any]()
    alone = updates(**PROGRAMS[name])
    found = updates(**PROGRAMS[name], cluster=cluster, callbacks=[told.append])
    assert told == found.reports
    for field in ("update", "learning_rate"):
        assert [getattr(r, field) for r in found.reports] == [getattr(r, field) for r in alone.reports]
    for one, other in zip(tree.flatten(alone[:2]).leaves, tree.flatten(found[:2]).leaves, strict=True):
        assert relative_error(other.double(), one.double()) < tolerance(torch.float64, 20 * ROWS)
    assert torch.equal(found.drawn, alone.drawn)  # the program's own random numbers stay what they were
    assert cluster.calls.count(("Worker", "__init__")) <= 3  # nothing was started again


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
        options: Any = {"lr": 0.01, "micro_batch": 5}
        judge = step_of(critic, strategies[0], optimizer=torch.optim.Adam, **options)
        of_generator = lambda _, lr: torch.optim.Adam(generator.parameters(), lr=lr)  # noqa: E731
        make = step_of(Both(generator, critic), strategies[1], optimizer=of_generator, **options)
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
    model, server = network(), served()
    step = step_of(model, server, loss=loss)
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
    step = step_of(model, served(), check=False)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(PlanError, match="writes to no buffer or parameter"):
        step((x, y))
    assert all(map(torch.equal, before, model.parameters()))


def test_a_worker_names_rows_of_the_batch() -> None:
    step = step_of(network(), served(), micro_batch=1)
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

    server = served()
    step = step_of(network(), server, loss=loss)
    with pytest.raises(kind, match=r"label|OddError: this and that") as found:
        step(batch(0))
    assert "in loss\n    raise error" in "".join(found.value.__notes__)
    assert not server.counts["workers replaced"]


def test_the_last_worker_stays() -> None:
    with pytest.raises(PlanError, match=r"got 1 in all. Call stop\(\)"):
        ParameterServer(workers=1, cluster=Inline(0)).remove_worker()


# ---- what is refused


def test_workers_that_have_nothing_to_do_are_told_of() -> None:
    with pytest.warns(UserWarning, match="got workers=3 and units=2"):
        ParameterServer(workers=3, units=2)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"loss": ab.WholeBatch(lambda o, y: o.sum())}, "got WholeBatch"),
        ({"optimizer": torch.optim.Adafactor}, "updates each element by itself, got Adafactor"),
        ({"model": network().bfloat16()}, "got \\['bfloat16'\\]"),
        ({"non_finite": "skip"}, "non_finite='skip'"),
        ({"clip_value": 1.0}, "got clip_value=, .* Leave it out"),
        ({"precision": "fp16-mixed"}, "a loss scale"),
        ({"callbacks": [GradientNoise()]}, "got callbacks of gradients .* only workers have. Leave it out"),
        (
            {"model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()},
            r"BatchNorm .*Pass Options\(batch",
        ),
    ],
)
def test_what_workers_cannot_do(change: dict[str, Any], match: str) -> None:
    step = step_of(change.pop("model", None) or network(), served(), **change)
    with pytest.raises(ab.AnybatchError, match=match):
        step(batch())


def test_a_window_is_refused() -> None:
    with pytest.raises(ab.AnybatchError, match="Expected whole batches with a ParameterServer"):
        step_of(network(), served()).window()


def test_a_worker_with_another_model_is_refused() -> None:
    """Its code is another one where it is copied to."""

    class Changed(nn.Linear):
        def __deepcopy__(self, memo: Any) -> nn.Module:
            other = nn.Linear(4, 3).double()
            memo |= {id(self.weight): other.weight, id(self.bias): other.bias}
            return nn.Sequential(other)

    with pytest.raises(ab.AnybatchError, match="same model on all workers"):
        step_of(Changed(4, 3).double(), served())(batch())
