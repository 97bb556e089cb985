"""Passes over some rows: loss, gradient, the calls of modules, bare means."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch.check.copies import Copied
from anybatch.check.draws import Draws
from anybatch.check.passes import Bench, Calls, PassResult, bare_terms, observe, tensors
from anybatch.check.rows import Cut, Part
from anybatch.core.total import Total
from anybatch.losses.resolve import module_of, resolve
from anybatch.losses.terms import Terms
from anybatch.testing import Perceptron, reference_step, relative_error, tolerance

BATCH = torch.linspace(-1, 1, 40).view(8, 5), torch.linspace(0, 3, 16).view(8, 2)


def run(model: nn.Module, loss: object, cut: Cut) -> PassResult:
    return Bench(subject=Copied(model, loss, torch.float64), draws=Draws(0)).run(cut)


def cut(micro_batch: int, **more: Any) -> Cut:
    return Cut(**({"data": BATCH, "micro_batch": micro_batch, "part": Part.whole(8)} | more))


def test_pass_is_the_reference_step() -> None:
    model = Perceptron(5, 2)
    wanted = reference_step(model, nn.MSELoss(), BATCH)
    for size in (8, 3):
        result = run(model, nn.MSELoss(), cut(size))
        assert relative_error(result.gradients, wanted.gradients) <= tolerance(torch.float64, 8)
        assert relative_error(result.loss, wanted.loss) <= tolerance(torch.float64, 8)


def test_batch_of_samples_is_collated() -> None:
    samples = list(zip(*BATCH, strict=True))
    collate = lambda rows: tuple(torch.stack(column) for column in zip(*rows, strict=True))  # noqa: E731
    model = Perceptron(5, 2)
    one = run(model, nn.MSELoss(), cut(3))
    other = run(model, nn.MSELoss(), cut(3, data=samples, collate=collate))
    assert relative_error(other.gradients, one.gradients) <= tolerance(torch.float64, 8)


def test_bare_means_and_unreplayed_draws_are_reported() -> None:
    generator = torch.Generator().manual_seed(0)

    def bare(model: nn.Module, micro: Any) -> torch.Tensor:
        return model(micro[0]).mean() * torch.rand((), generator=generator)

    result = run(Perceptron(5, 2), bare, cut(8))
    assert result.bare
    assert result.unreplayed == 1
    assert not run(Perceptron(5, 2), nn.MSELoss(), cut(8)).bare


def test_errors_and_rows_without_weight_are_told() -> None:
    def weightless(model: nn.Module, micro: Any) -> Total:
        return Total(0 * model(micro[0]).sum(), 0)

    assert isinstance(run(nn.Linear(3, 2), nn.MSELoss(), cut(8)).error, RuntimeError)
    assert not run(Perceptron(5, 2), weightless, cut(8)).weighed


def test_default_dtype_comes_back() -> None:
    seen: list[torch.dtype] = []

    class States(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.zeros(1).dtype)
            return x

    run(nn.Sequential(Perceptron(5, 2), States()), nn.MSELoss(), cut(8))
    assert seen == [torch.float64]
    assert torch.get_default_dtype() == torch.float32


# ---- calls


class Twice(nn.Module):
    """Calls one layer twice, with a keyword, and writes into what came back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, x: Tensor, *, flag: bool) -> dict[str, Tensor]:
        """(rows, 2) twice through the same layer."""
        return {"out": self.inner(self.inner(x)).detach().mul_(0)}


def test_calls_are_noted_as_they_ended() -> None:
    model, calls, part = Twice(), Calls(), Part.whole(3)
    calls.watch(model)
    calls.begin(part)
    model(torch.ones(3, 2), flag=True)
    (outer,) = calls.parts[part]
    names = ["inner.0", "inner.1", "inner"] * 2 + [""]
    assert [call.key[0] for call in outer.flat()] == names
    assert [call.key[1] for call in outer.flat()] == [0, 0, 0, 1, 1, 1, 0]
    assert calls.table(part)["inner", 1].outputs[0].any()  # noted before it was written into
    assert calls.table(part)["inner", 1].inputs[0].equal(calls.table(part)["inner", 0].outputs[0])


def test_call_can_be_repeated_with_other_tensors() -> None:
    model, calls, part = Twice(), Calls(), Part.whole(3)
    calls.watch(model)
    calls.begin(part)
    model(torch.ones(3, 2), flag=True)
    call = calls.table(part)["inner", 0]
    again = call.repeat(model.inner, [torch.zeros(5, 2)])
    assert again[0].equal(model.inner(torch.zeros(5, 2)))


def test_what_is_computed_anew_in_backward_is_not_noted_twice() -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model, calls, part = Saving(), Calls(), Part.whole(3)
    calls.watch(model)
    calls.begin(part)
    model(torch.ones(3, 2)).sum().backward()
    assert list(calls.table(part)) == [("inner", 0), ("", 0)]


def test_tensors_of_any_nest() -> None:
    assert len(tensors([torch.ones(1), {"a": (torch.ones(1), "b", None)}])) == 2


# ---- observed


class Own(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, micro: Any) -> Total:
        """Sum and rows."""
        return Total((self.scale * micro).sum(), len(micro))


def weights(loss: Any) -> tuple[dict[str, float], frozenset[str]]:
    observed = observe(loss)
    terms = resolve(observed).evaluate(nn.Identity(), torch.ones(3))
    return {name: float(weight) for name, weight in terms.weigh().items()}, bare_terms(observed)


def test_bare_means_weigh_one_and_are_noted() -> None:
    assert weights(lambda model, micro: micro.mean()) == ({"loss": 1}, {"loss"})
    mixed = lambda model, micro: {"a": micro.mean(), "b": Total(micro.sum(), 3)}  # noqa: E731
    assert weights(mixed) == ({"a": 1, "b": 3}, {"a"})


def test_totals_pass_as_they_are() -> None:
    assert weights(lambda model, micro: Total(micro.sum(), 3)) == ({"loss": 3}, set())
    assert weights(Terms(lambda model, micro: {"a": Total(micro.sum(), 2)})) == ({"a": 2}, set())


def test_parameters_of_a_loss_stay_in_sight() -> None:
    own = Own()
    assert list(module_of(observe(Terms(own))).parameters()) == [own.scale]


def test_losses_of_torch_are_left_alone() -> None:
    loss = nn.MSELoss()
    assert observe(loss) is loss
