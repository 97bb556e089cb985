"""A plan carried out: sums in their own memory, each term divided, clipped as torch does, updated once."""

import gc
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from anybatch import Options, Step, Terms, Total
from anybatch.core.errors import NonFiniteLossError, OutOfMemoryError
from anybatch.engine import Apart, TornUpdateError, owned, step_optimizers
from anybatch.engine.gradients import InPlace, finish
from tests.options import flat
from tests.zoo import Made

X = torch.tensor([1.0, 2.0, 3.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 4.0])  # a cut of 3 has one that weighs 0


def terms(model: Any, x: Tensor) -> Mapping[str, Total]:
    valid = x > 0
    return {
        "fit": Total((model(x) * valid).sum(), valid.sum()),
        "size": Total(model.w.square() * len(x), len(x)),
        "seen": Total(7.0, 1) if x[0] == 1 else Total.zero(),  # a number, and from one micro-batch
        "odd": Total((model.w - model.w).sqrt(), (x == 1).sum()),  # its gradient is NaN
        "none": Total(model.w * 5, (x > 9).sum()),  # weighs nothing, so it counts for nothing
    }


def weights(x: Tensor) -> Mapping[str, Tensor | int]:
    return {"fit": (x > 0).sum(), "size": len(x), "seen": 1, "odd": 1, "none": (x > 9).sum()}


@pytest.mark.parametrize("options", [{}, {"accumulate": torch.float64}], ids=str)
@pytest.mark.parametrize("weight", [None, weights], ids=["late", "promised"])
@pytest.mark.parametrize("micro_batch", [1, 3, 4, 10])
def test_each_term_is_divided_by_its_own_weight(micro_batch: int, weight: Any, options: Any) -> None:
    two, one = (nn.Parameter(torch.tensor(value)) for value in (2.0, 1.0))
    model: Any = Made(lambda self, x: self.w * x, w=two, unused=one)  # gradients can be written down
    seen = list[Any]()
    optimizer = SGD(model.parameters(), lr=1.0)
    noted = lambda *_: seen.extend(p.grad and p.grad.item() for p in model.parameters())  # noqa: E731
    optimizer.register_step_pre_hook(noted)
    loss = Terms(terms, coefficients={"size": 0.5, "seen": 0.0, "odd": 0.0}, weight=weight)
    report = Step(model, loss, optimizer, micro_batch=micro_batch, **flat(options, check=False))(X)
    assert seen == [2.5 + 0.5 * 4, None]
    assert model.w.grad is None
    assert report.weights == {"fit": 4, "size": 10, "seen": 1, "odd": 1, "none": 0}
    assert report.loss == 5.0 + 0.5 * 4
    assert (report.rows, sum(report.cut), report.updated) == (10, 10, True)
    values = dict(report.terms)
    assert math.isnan(values.pop("none"))
    assert values == {"fit": 5.0, "size": 4.0, "seen": 7.0, "odd": 0.0}


# ---- sums of gradients: that they add up is a law


def apart(parameters: Sequence[nn.Parameter], **options: Any) -> Apart:
    plain = {"dtype": None, "is_looked_at": False, "is_whole": True}
    return Apart(parameters, names=("loss",), **plain | options)


# Each way to accumulate; those that are not whole take a gradient as soon as it is finished.
WAYS: dict[str, Callable[..., InPlace | Apart]] = {
    "in place": lambda parameters: InPlace(parameters, "loss"),
    "apart, one by one": lambda parameters: apart(parameters, is_whole=False),
    "apart, as a whole": apart,
    "looked at": lambda parameters: apart(parameters, is_looked_at=True),
}


@pytest.mark.parametrize("mode", [{}, {"accumulate": torch.float64}], ids=str)
def test_an_abandoned_window_leaves_parameters_as_anybody_finds_them(mode: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    batch = (torch.randn(4, 3), torch.randn(4, 2))

    make_step = lambda: Step(model, nn.MSELoss(), SGD(model.parameters(), lr=0.1), **flat(mode))  # noqa: E731
    window = make_step().window()
    window.add(batch)
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()  # somebody else's, while it is open
    expected = torch.autograd.grad(nn.functional.mse_loss(model(batch[0]), batch[1]), model.weight)[0]
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, expected)
    model.zero_grad()
    assert make_step()(batch).updated  # another step on the same parameters
    gone = weakref.ref(window)
    del window
    gc.collect()
    assert gone() is None
    assert not model.weight._post_accumulate_grad_hooks


SHARED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "with the cotangent": lambda a, b, _: a.sum() + b[0].view(()),
    "with each other": lambda a, b, _: (a.view(-1) + b.view(-1)).square().sum(),
    "parts of one": lambda a, b, _: torch.cat([a, b]).square().sum(),
    "with a leaf of nobody's": lambda a, b, leaf: ((a.view(-1) + leaf.view(-1)) * b).square().sum(),
    "with what a hook holds": lambda a, b, _: (a * b).sum(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHARED)
def test_first_gradients_that_share_memory_are_summed_apart(name: str, way: str) -> None:
    a, b, leaf = (nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(3))
    if name == "with what a hook holds":
        held = torch.zeros(2)
        a.register_hook(lambda gradient: held.copy_(gradient).detach())
    gradients = WAYS[way]([a, b])
    cotangent = torch.ones(())  # the same for all micro-batches
    for _ in range(3):
        gradients.begin()
        gradients.add({"loss": SHARED[name](a, b, leaf)}, {"loss": cotangent})
    total = finish(gradients.parted(), {})
    if isinstance(gradients, Apart):
        gradients.close()
    once = torch.autograd.grad(SHARED[name](a, b, leaf), [a, b])
    assert [total[one].tolist() for one in (a, b)] == [(3 * one).tolist() for one in once]
    assert cotangent.item() == 1.0


# ---- from gradient to update


class Partial(SGD):
    """Runs out of memory once, when its new state is made and nothing is updated. Torn ones: tests/faults."""

    updates, has_failed = 0, False

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = torch.tensor(1.0)
            if not self.has_failed:
                self.has_failed = True
                raise torch.OutOfMemoryError("CUDA out of memory.")
            self.updates += 1
            for parameter in group["params"]:
                parameter.detach().sub_(parameter.grad)


def partial(**group: Any) -> Partial:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (4,), ())]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return Partial([{"params": [one], **group} for one in parameters], lr=1.0)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Partial, "__module__", "torch.optim.sgd")


@pytest.mark.usefixtures("known")
def test_memory_that_runs_out_before_the_first_write_changes_nothing() -> None:
    optimizer = partial()
    StepLR(optimizer, 2)  # is no stranger, though it puts a step of its own in the place of the class's
    with pytest.raises(OutOfMemoryError, match=r"by Partial .* No update was made\."):
        step_optimizers({}, [optimizer])
    assert not optimizer.state  # the new state is dropped
    step_optimizers({}, [optimizer])  # the caller's second try
    assert optimizer.updates == 3
    parameters = owned([optimizer])
    assert all(torch.equal(p.detach(), -p.grad) for p in parameters if p.grad is not None)


@pytest.mark.parametrize("when", ["own", "pre", "post", "every pre", "every post", "instance", "fused"])
def test_nobody_knows_what_somebody_else_has_written(when: str, request: pytest.FixtureRequest) -> None:
    if when != "own":
        request.getfixturevalue("known")
    optimizer = partial(**({"fused": True} if when == "fused" else {}))
    calls: list[object] = []
    register: dict[str, Any] = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "every pre": register_optimizer_step_pre_hook,
        "every post": register_optimizer_step_post_hook,
    }
    hook = register[when](lambda *_: calls.append(when)) if when in register else None
    if when == "instance":
        own = optimizer.step
        optimizer.step = lambda closure=None: calls.append(when) or own(closure)  # type: ignore[func-returns-value, method-assign]
    with pytest.raises(TornUpdateError, match="It is unknown what has been updated"):
        step_optimizers({}, [optimizer])
    if hook is not None:
        hook.remove()
    assert calls == [when] * (when in ("pre", "every pre", "instance"))


def test_gradients_that_were_added_to_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    add, parameter = torch._foreach_add_, nn.Parameter(torch.ones(2))  # type: ignore[attr-defined]

    def lacking(values: list[Tensor], *args: Any, **kwargs: Any) -> None:
        if values[0] is parameter:  # after the momentum was added to the gradient
            raise torch.OutOfMemoryError("CUDA out of memory.")
        add(values, *args, **kwargs)

    monkeypatch.setattr(torch, "_foreach_add_", lacking)
    optimizer = SGD([parameter], lr=0.5, momentum=0.9, nesterov=True, foreach=True)
    with pytest.raises(TornUpdateError):
        step_optimizers({parameter: torch.ones(2)}, [optimizer])
    assert torch.equal(parameter.detach(), torch.ones(2))


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
def test_in_a_callers_autocast_no_weights_are_old(precision: str, enabled: bool, windowed: bool) -> None:
    """Torch casts a weight once, and knows no better before the outermost autocast is over."""
    autocast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=enabled)  # noqa: E731

    def losses(around: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        step = Step(model, nn.MSELoss(), SGD(model.parameters(), lr=0.01), precision=precision)
        rows, found = (torch.ones(8, 4), torch.ones(8, 1)), list[float]()
        for _ in range(4):
            with around(), step.window() if windowed else nullcontext(step) as door:
                found.append((door.add(rows) or door.close() if windowed else door(rows)).loss)
        return found

    with autocast():
        inside = losses(nullcontext)
    assert inside == losses(autocast)
    assert len(set(inside)) == 4


@pytest.mark.parametrize("sparse", [False, True])
def test_entries_are_clamped_where_all_of_the_gradient_is_there(sparse: bool) -> None:
    """Mutation: rows of a sparse gradient, or gradients found before, are clamped apart."""
    model = nn.Embedding(3, 2, sparse=sparse)
    before = model.weight.detach().clone()
    model(torch.tensor([0, 1])).sum().backward()  # found: 1 in the rows 0 and 1
    loss = lambda model, micro: Total(model(micro[0]).sum(), len(micro[0]) / 2)  # noqa: E731
    step = Step(model, loss, SGD(model.parameters(), lr=1.0), options=Options(clip_value=1.25))
    report = step((torch.tensor([0, 2, 2, 2]),))  # adds 1/2 in row 0 and three times 1/2 in row 2
    assert torch.allclose(before - model.weight, torch.tensor([[1.25], [1.0], [1.25]]).expand(3, 2))
    assert report.grad_norm == pytest.approx(math.sqrt(2 * (1.5**2 + 1 + 1.5**2)))


@pytest.mark.parametrize("clip_norm", [math.inf, 1.0])
def test_a_norm_that_overflows_is_refused_only_where_it_is_to_be_clipped(clip_norm: float) -> None:
    model, words = nn.Linear(2, 1), "whose norm can be clipped"
    loss = lambda model, micro: Total(1e25 * model(micro[0]).sum(), len(micro[0]))  # noqa: E731
    step = Step(model, loss, SGD(model.parameters(), lr=1e-30), clip_norm=clip_norm)
    with nullcontext() if math.isinf(clip_norm) else pytest.raises(NonFiniteLossError, match=words):
        report = step((torch.ones(4, 2),))
        assert (report.updated, report.grad_norm) == (True, math.inf)
