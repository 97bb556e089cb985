"""A comparison is made again when rows, modes or attributes come that it does not cover."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.errors import LossError
from tests.zoo import Perceptron

CHANGE = 5  # the update at which something changes, which is none of 2, 4, 8


def rows(count: int = 40) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4), torch.randint(1, 3, (count,))


def by_step(model: nn.Module, loss: Any, micro_batch: int = 5) -> Callable[[Any], Any]:
    return ab.Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), micro_batch=micro_batch)


def by_window(model: nn.Module, loss: Any, micro_batch: int = 5) -> Callable[[Any], Any]:
    step = ab.Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.01))

    def update(batch: Any) -> Any:
        with step.window() as window:
            for micro in zip(*[one.split(micro_batch) for one in batch], strict=True):
                window.add(micro)
        return window.report

    return update


def by_batch_loss(model: nn.Module, loss: Any, micro_batch: int = 5) -> Callable[[Any], Any]:
    batch_loss = ab.BatchLoss(model, loss, micro_batch=micro_batch)

    def update(batch: Any) -> Any:
        batch_loss(batch).backward()
        model.zero_grad()
        return batch_loss.report

    return update


DOORS = (by_step, by_window, by_batch_loss)


class Changing:
    """A loss, a model and batches that are exact until `change`."""

    def __init__(self) -> None:
        self.model: nn.Module = Perceptron(4, 3)
        self.loss: Any = self
        self.share, self.is_mixed, self.calls = 0.0, False, 0

    def __call__(self, model: nn.Module, micro: Any) -> ab.Total:
        self.calls += 1
        out = model(micro[0])
        losses = F.cross_entropy(out, micro[1], reduction="sum") + len(out) * self.share * self.pull(out)
        return ab.Total(losses, len(out))

    def pull(self, out: Tensor) -> Tensor:
        return out.mean(0).square().sum()

    def batch(self, update: int) -> Any:
        return rows()

    def change(self) -> None:
        self.share = 9.0


class Flagged(Changing):
    def pull(self, out: Tensor) -> Tensor:
        return 9 * super().pull(out) if self.model.layers.training else out.sum() * 0  # pyright: ignore

    def __init__(self) -> None:
        super().__init__()
        self.share = 1.0

        class Mixed(nn.Sequential):
            pass

        self.model = Perceptron(4, 3)
        self.model.layers = Mixed(*self.model.layers).eval()

    def change(self) -> None:
        self.model.layers.train()


class Ignoring(Changing):
    """A mean over labels that count, with the weight of all."""

    ignored = -100

    def __call__(self, model: nn.Module, micro: Any) -> ab.Total:
        losses = F.cross_entropy(model(micro[0]), micro[1], ignore_index=self.ignored)
        return ab.Total(losses * len(micro[0]), len(micro[0]))

    def batch(self, update: int) -> Any:
        x, labels = rows()
        labels[::3] = self.ignored if update >= CHANGE else labels[::3]
        return x, labels

    def change(self) -> None:
        pass


class Masked(Ignoring):
    ignored = 0


class Longer(Ignoring):
    """Sequences that differ in length only later, with a mean over places."""

    def __call__(self, model: nn.Module, micro: Any) -> ab.Total:
        x = micro[0].sum(-1, keepdim=True) if micro[0].shape[1] > 4 else micro[0].sum(-1)
        errors = model(x[..., :1].expand(len(x), 4)) if x.dim() == 2 else model(micro[0])
        pull = errors.mean(0).square().sum() if x.dim() == 2 else 0
        return ab.Total(errors.square().sum() + 9 * len(x) * pull, len(x))

    def batch(self, update: int) -> Any:
        return (torch.randn(40, 6 if update >= CHANGE else 4),)


class More(Ignoring):
    """A term that is there in batches of more rows."""

    def __call__(self, model: nn.Module, micro: Any) -> ab.Total:
        out = model(micro[0])
        pull = 9 * self.pull(out) if micro[1].max() > 1e6 else 0
        return ab.Total(out.square().sum() + len(out) * pull, len(out))

    def batch(self, update: int) -> Any:
        x, labels = rows(60 if update >= CHANGE else 40)
        return x, labels + (update >= CHANGE) * 10**7


SHARES = {"share": 0.0}


def scoped(model: nn.Module, micro: Any) -> ab.Total:
    out = model(micro[0])
    return ab.Total(out.square().sum() + len(out) * SHARES["share"] * out.mean(0).square().sum(), len(out))


class Scoped(Changing):
    """A function that reads a table of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, SHARES["share"] = scoped, 0.0

    def change(self) -> None:
        SHARES["share"] = 9.0


CHANGES = {kind.__name__: kind for kind in (Changing, Flagged, Ignoring, Masked, Longer, More, Scoped)}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_later_is_refused_before_the_first_wrong_update(name: str, door: Any, seed: int) -> None:
    torch.manual_seed(seed)
    if name == "More" and door is by_window:
        pytest.skip("an `add` is of as many rows as before")
    case = CHANGES[name]()
    update = door(case.model, case.loss)
    for at in range(1, CHANGE):
        assert update(case.batch(at)).checked
    case.change()
    with pytest.raises(LossError, match="for every split"):
        update(case.batch(CHANGE))


def test_a_coefficient_that_changes_is_compared_again() -> None:
    case, factors = Changing(), {"pull": 0.0}

    def terms(model: nn.Module, micro: Any) -> dict[str, ab.Total]:
        out, count = model(micro[0]), len(micro[0])
        return {"fit": ab.Total(out.square().sum(), count), "pull": ab.Total(count * case.pull(out), count)}

    step = by_step(case.model, ab.Terms(terms, coefficients=factors))
    with pytest.raises(LossError, match="'pull'"):
        step(rows())


def test_parts_that_become_smaller_are_compared_again() -> None:
    class Pairs(Changing):
        def __call__(self, model: nn.Module, micro: Any) -> ab.Total:
            out = model(micro[0])
            return ab.Total(out.square().sum() * (1 if len(out) > 1 else 0.5), len(out))

    model = Perceptron(4, 3)
    step: Any = by_step(model, Pairs())
    assert step(rows()).checked
    with pytest.raises(LossError, match=r"1\+1"):
        step(rows(41))


@pytest.mark.parametrize("door", DOORS)
def test_a_counter_makes_no_comparison_in_every_step(door: Any, capsys: Any) -> None:
    class Loud(Changing):
        def __call__(self, model: nn.Module, micro: Any) -> ab.Total:
            print(len(micro[0]))
            return super().__call__(model, micro)

    case = Loud()
    update, compared = door(case.model, case), []
    for at in range(1, 17):
        update(rows())
        if len(capsys.readouterr().out.split()) > 8:
            compared.append(at)
    assert case.calls == 16 * 8  # and the comparison put it back
    # The first `add`s of a window show the counter already.
    assert compared == [1, 2, *[3] * (door is not by_window), 4, 8, 16]


def mean_as_sum(model: nn.Module, micro: Any) -> ab.Total:
    return ab.Total(F.cross_entropy(model(micro[0]), micro[1]), 1)


@pytest.mark.parametrize("sizes", [(22, 1), (1, 22), (1, 1), (16, 16, 8), (20, 20), (6, 6, 1)])
@pytest.mark.parametrize("collate", [None, torch.utils.data.default_collate])
def test_the_first_add_of_a_window_is_compared_with_the_second(sizes: Any, collate: Any) -> None:
    def add_all(loss: Any) -> Any:
        model = Perceptron(4, 3)
        step = ab.Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), collate=collate)
        with step.window() as window:
            for size in sizes:
                window.add(rows(size) if collate is None else [*zip(*rows(size), strict=True)])
        return window.report

    assert add_all(nn.CrossEntropyLoss()).checked
    with pytest.raises(LossError, match=r"for every split|that add up"):
        add_all(mean_as_sum)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.change(gradients[0]), None


NOT_LINEAR = {
    "clamp": lambda g: g.clamp(-0.01, 0.01),
    "sign": lambda g: g.sign() / 9,
    "norm of rows": lambda g: g / g.norm(dim=1, keepdim=True),
    "eight bits": lambda g: (g * 64).round() / 64,
}
LATE = {
    "window": by_window,
    "drop": lambda model, loss: ab.Step(
        model,
        loss,
        torch.optim.SGD(model.parameters(), lr=0.1),
        micro_batch=5,
        options=ab.Options(non_finite="drop"),
    ),
}


@pytest.mark.parametrize("door", LATE)
@pytest.mark.parametrize("change", NOT_LINEAR)
def test_a_backward_that_is_not_linear_is_refused_where_the_end_divides(change: str, door: str) -> None:
    def made(change: Any) -> nn.Module:
        model = Perceptron(4, 3)
        model.register_forward_hook(lambda _, args, out: Backward.apply(out, change))
        return model

    batch, loss = rows(), nn.CrossEntropyLoss()
    assert LATE[door](made(lambda g: 3 * g), loss)(batch).checked
    with pytest.raises(LossError, match="not linear"):
        LATE[door](made(NOT_LINEAR[change]), loss)(batch)
    assert by_step(made(NOT_LINEAR["clamp"]), loss)(batch).checked  # it divides early, by the same


@pytest.mark.parametrize("door", [by_step, by_batch_loss])
def test_a_due_update_takes_one_forward_of_all_rows_and_refuses_before_it_is_made(
    door: Any, capsys: Any
) -> None:
    class Later(Changing):
        def __call__(self, model: nn.Module, micro: Any) -> ab.Total:
            print(len(micro[0]))
            found = super().__call__(model, micro)
            extra = max(0, len(micro[0]) - 16) * self.pull(model(micro[0]))  # nothing in eight rows
            return ab.Total(found.sum + extra, found.weight) if self.is_mixed else found

    case = Later()
    update = door(case.model, case)
    for _ in range(15):
        update(rows())
    capsys.readouterr()
    update(rows())
    printed = capsys.readouterr().out.split()
    assert printed.count("40") == 1
    assert printed.count("5") < 2 * 8  # the micro-batches run once
    for _ in range(15):
        update(rows())
    case.is_mixed = True
    before = [one.detach().clone() for one in case.model.parameters()]
    capsys.readouterr()
    with pytest.raises(LossError, match="same loss from 40 rows"):
        update(rows())
    assert all(map(torch.equal, before, case.model.parameters()))
