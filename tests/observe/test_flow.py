"""Gradient flow and noise: figures equal those of a plain loop in any cut; nothing is changed."""

import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.errors import NonFiniteLossError, PlanError
from anybatch.observe import GradientNoise
from anybatch.observe.flow_figures import Flow
from anybatch.observe.flow_picture import draw
from tests.options import flat
from tests.snapshots import same, same_as_before
from tests.zoo import Made, Perceptron

EXACT = 1e-12
FIGURES = ("mean", "largest", "norm", "zeros", "ratio")
CUTS = {"equal": [4] * 3, "ragged": [5, 5, 2], "late": [5, 5, 2], "window": [7, 4, 1], "scarce": [3] * 4}
LAYERS = ("(model)", "first", "again", "unused", "last")


class Net(nn.Module):
    """Its own parameter, shared weights, a frozen and an unused layer, gradients that are exactly zero."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(3, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.again = nn.Linear(3, 4)
        self.again.weight = self.first.weight
        self.unused = nn.Linear(2, 2)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        return self.last(self.frozen(self.first(x).relu() + self.again(x)))


def rows_of(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    both = torch.randn(rows, 5, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return both[:, :3], both[:, 3:]


def make_net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    net = Net().to(dtype)
    with torch.no_grad():
        net.first.bias[0] = -100  # a unit that no row switches on
    return net


def make_step(model: nn.Module, loss: object = None, **options: Any) -> ab.Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return ab.Step(model, nn.MSELoss() if loss is None else loss, optimizer, **flat(options))


def plain_figures(model: nn.Module, batch: tuple[Tensor, Tensor], update: Callable[[], object]) -> list[Any]:
    """By name of layer: what hooks see in a plain loop over the whole batch; and the weights compared."""
    found: dict[str, list[Tensor]] = {}
    weights: dict[str, list[Tensor]] = {}
    owner: dict[Tensor, str] = {}

    def note(layer: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        found.setdefault(layer, []).append(parameter.grad.flatten().clone())

    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0] or "(model)"
        owner[parameter] = layer
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(note, layer))
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    before = {p: p.detach().clone() for p in model.parameters()}
    update()
    for parameter, value in before.items():
        if parameter.grad is not None:
            weights.setdefault(owner[parameter], []).append(torch.stack([parameter.data, value]).flatten(1))
    figures: dict[str, Any] = dict.fromkeys(LAYERS, (None,) * 5)
    for layer in found:
        g, (after, was) = torch.cat(found[layer]), torch.cat(weights[layer], 1)
        ratio = (after - was).norm() / was.norm()
        figures[layer] = g.abs().mean(), g.abs().max(), g.norm(), (g == 0).double().mean(), ratio
    return [*figures.values()]


def busy() -> Any:
    """Draws from three streams, counts its calls, keeps statistics and writes to its input."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls.append(random.random())
        x += 1e-3 * torch.randn(x.shape, generator=self.generator)
        return self.body(x)

    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1))
    return Made(forward, body=body, calls=[], generator=torch.Generator().manual_seed(1))


def runs_out(most: int, module: nn.Module, inputs: tuple[Tensor]) -> None:
    if len(inputs[0]) > most:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def windowed(step: ab.Step, batch: tuple[Tensor, Tensor], cut: list[int]) -> ab.StepReport:
    window = step.window()
    for micro in zip(*[part.split(cut) for part in batch], strict=True):
        window.add(micro)
    return window.close()


@pytest.mark.parametrize("cut", [None, 7, 3, 1, "window", "scarce"])
def test_figures_equal_those_of_a_plain_loop_on_the_whole_batch(cut: int | str | None) -> None:
    batch, other = rows_of(7), make_net()
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    expected = plain_figures(other, batch, optimizer.step)

    model = make_net()
    if cut == "scarce":
        model.register_forward_pre_hook(partial(runs_out, 2))
    flow, size = ab.GradientFlow(model), {"scarce": 5, "window": None}.get(str(cut), cut)
    step = make_step(model, micro_batch=size, callbacks=[flow], check=False)
    report = windowed(step, batch, [3, 2, 2]) if cut == "window" else step(batch)
    assert (report.redone > 0) == (cut == "scarce")
    (found,) = flow.history
    assert found.layers == LAYERS
    for index, figures in enumerate(expected):
        for name, value in zip(FIGURES, figures, strict=True):
            got = getattr(found, name)[index]
            assert (got is None) == (value is None), (found.layers[index], name)
            assert value is None or math.isclose(got, value.item(), rel_tol=EXACT), (index, name)
    assert (found.zeros[1] or 0) > 0
    assert found.marks[3] == "unused"


@pytest.mark.parametrize("options", [{}, {"micro_batch": 2}, {"memory": "1GB"}, {"micro_batch": 3}])
def test_one_call_shows_the_whole_gradient_and_touches_nothing(options: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    inputs, targets = rows_of(6, torch.float32)
    model, batch = busy(), (inputs, targets[:, :1])
    step, untouched = make_step(model), [part.clone() for part in batch]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    given = flat(options, batch_norm="micro", path=tmp_path / "a.png")
    with same_as_before(step):
        flow = ab.gradient_flow(model, nn.MSELoss(), batch, **given)
    assert same(untouched, [*batch])
    assert (flow.layers, flow.ratio, flow.update) == (("body.0", "body.1", "body.4"), (None,) * 3, 0)
    assert (tmp_path / "a.png").stat().st_size > 1000
    plain, exact = make_net(), rows_of(6)
    whole = plain_figures(plain, exact, lambda: None)
    found = ab.gradient_flow(make_net(), nn.MSELoss(), exact, micro_batch=options.get("micro_batch"))
    for norm, figures in zip(found.norm, whole, strict=True):
        assert norm is None or abs(norm - figures[2]) < EXACT * norm


def test_nan_is_marked_and_what_is_undone_is_not_kept() -> None:
    model, (inputs, targets) = make_net(), rows_of(6)
    flow = ab.GradientFlow(model, every=1)
    step = make_step(model, micro_batch=3, callbacks=[flow], check=False)
    assert flow.last is None
    assert flow.record() == {}
    with pytest.raises(NonFiniteLossError):
        step((inputs, torch.full_like(targets, torch.inf)))
    assert flow.last is not None
    assert "not finite" in flow.last.marks
    assert (flow.history, flow.updates, flow.record()) == ([], 0, {})
    step((inputs, targets))
    assert [one.update for one in flow.history] == [1]
    assert set(flow.record()) == {"layers", "classes", *FIGURES}
    assert ab.gradient_flow(model, nn.MSELoss(), (inputs * torch.nan, targets)).marks[-1] == "not finite"


def of_norms(count: int, update: int = 0) -> Flow:
    norms = tuple([None if index == 7 else 10 ** (index / 30 - 9) for index in range(count)])
    layers = tuple([f"blocks.{index // 4}.part{index % 4}" for index in range(count)])
    zeros = tuple([index / count for index in range(count)])
    return Flow(layers=layers, mean=norms, largest=norms, norm=norms, zeros=zeros, ratio=norms, update=update)


def test_pictures_are_drawn_and_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = draw([of_norms(300, 1), of_norms(300, 11)], tmp_path / "a.svg").read_text("utf-8")
    assert "matplotlib" in page
    empty = Flow(layers=(), mean=(), largest=(), norm=(), zeros=(), ratio=())
    for shown in (empty, of_norms(1), of_norms(8)):
        assert draw(shown, tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(PlanError, match=r"got \[\]"):
        draw([], tmp_path / "b.png")
    frozen = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(PlanError, match="none of which requires"):
        ab.gradient_flow(frozen, nn.MSELoss(), rows_of(2))
    with pytest.raises(PlanError, match=r"\.jpg"):
        ab.gradient_flow(make_net(), nn.MSELoss(), rows_of(2), path="a.jpg")
    with pytest.raises(PlanError, match="got 0"):
        ab.GradientFlow(frozen, every=0)


def test_flow_of_another_model_is_refused_and_no_update_made() -> None:
    model = nn.Linear(3, 2)
    step = make_step(model, callbacks=[ab.GradientFlow(make_net())])
    with same_as_before(step), pytest.raises(PlanError, match="that it does not have"):
        step(rows_of(2, torch.float32))


# ---- noise


def make(noise: GradientNoise, loss: Any = None, **options: Any) -> ab.Step:
    torch.manual_seed(0)
    return make_step(Perceptron(3, 2).double(), loss, callbacks=[noise], check=False, **options)


def slow(model: nn.Module, batch: tuple[Tensor, Tensor], cut: list[int]) -> tuple[float, float]:
    """Noise and signal by the equations of the paper, solved by least squares: gradients part by part."""

    def gradient(start: int, stop: int) -> Tensor:
        loss = nn.functional.mse_loss(model(batch[0][start:stop]), batch[1][start:stop])
        return torch.cat([one.flatten() for one in torch.autograd.grad(loss, [*model.parameters()])])

    rows, stops = sum(cut), [sum(cut[: index + 1]) for index in range(len(cut))]
    means = [gradient(stop - size, stop) for size, stop in zip(cut, stops, strict=True)]
    # E |mean of b rows|^2 = signal + noise / b; each part counts as its share of the rows, squared.
    shares = [(size / rows) ** 2 for size in cut]
    small = sum(share * float(mean.square().sum()) for share, mean in zip(shares, means, strict=True))
    large = float(gradient(0, rows).square().sum())
    left = torch.tensor([[sum(shares), 1 / rows], [1.0, 1 / rows]], dtype=torch.float64)
    signal, noise = torch.linalg.solve(left, torch.tensor([small, large], dtype=torch.float64)).tolist()
    return noise, signal


def total(model: nn.Module, micro: tuple[Tensor, Tensor]) -> ab.Total:
    return ab.Total(((model(micro[0]) - micro[1]) ** 2).sum(), torch.tensor(float(micro[1].numel())))


@pytest.mark.parametrize(("how", "cut"), CUTS.items())
def test_estimate_equals_a_slow_one(how: str, cut: list[int]) -> None:
    noise, (inputs, targets) = GradientNoise(every=1), rows_of(12)
    batch = inputs, targets + 3.0  # a signal above the noise
    size = 6 if how == "scarce" else cut[0]
    loss = total if how == "late" else None
    step = make(noise, loss, micro_batch=None if how == "window" else size)
    expected = slow(step.model, batch, cut)
    if how == "scarce":
        step.model.register_forward_pre_hook(partial(runs_out, 3))
    report = windowed(step, batch, cut) if how == "window" else step(batch)
    assert report.cut == tuple(cut)
    (found,) = noise.history
    assert math.isclose(found.noise, expected[0], rel_tol=1e-9)
    assert math.isclose(found.signal, expected[1], rel_tol=1e-9)
    assert found.rows == 12
    assert math.isclose(noise.scale or 0.0, found.noise / found.signal, rel_tol=1e-9)
    assert noise.record() == {name: getattr(found, name) for name in ("scale", "noise", "signal", "rows")}


def test_only_due_updates_hold_micro_batches_apart_and_what_tells_nothing_is_left_out() -> None:
    noise, batch = GradientNoise(every=2), rows_of(6)
    step, told = make(noise, micro_batch=2), list[bool]()
    for _ in range(5):
        step(batch)
        told.append(bool(noise.record()))
    assert told == [True, False, True, False, True]
    uncut = GradientNoise(every=1)
    make(uncut)(batch)
    assert (uncut.history, uncut.scale, uncut.record()) == ([], None, {})
