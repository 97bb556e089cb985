"""Private names of torch: each agrees with the public way; so does the substitute where torch lacks it."""

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from anybatch.core import torch_private as private

LACKING = [
    (torch.autograd.Variable, "_execution_engine"),
    (torch._C, "_storage_Use_Count"),
    (torch._C, "_current_graph_task_id"),
    (torch._C._autograd, "_get_current_graph_task_keep_graph"),
    (sys.modules["torch.optim.optimizer"], "_global_optimizer_pre_hooks"),
    (_python_dispatch, "_disable_current_modes"),
]


def load_where_torch_lacks_names() -> ModuleType:
    """The file, as it is where torch has none of the names that have a substitute."""
    spec = importlib.util.spec_from_file_location("lacking", str(private.__file__))
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in LACKING:
            patch.delattr(owner, name)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["torch as it is", "torch without the names"])
def names(request: pytest.FixtureRequest) -> Any:
    return private if request.param == "torch as it is" else load_where_torch_lacks_names()


# ---- the engine of autograd


def gradients(backward: Callable[..., Any]) -> list[Tensor | None]:
    """Of two values, twice, through a model with a tied weight and an unused one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 5))
    unused = nn.Parameter(torch.ones(2))
    for factor in (0.3, 7.0):
        hidden = model(torch.randn(6, 5))
        values = hidden.square().sum(), (hidden @ model[0].weight.t()).exp()
        backward(values, (torch.tensor(factor), torch.randn(6, 7)))
    return [parameter.grad for parameter in [*model.parameters(), unused]]


def test_backward_is_the_public_one(names: Any) -> None:
    ours, public = gradients(names.run_backward), gradients(torch.autograd.backward)
    assert all(a is b or torch.equal(a, b) for a, b in zip(ours, public, strict=True))
    leaf, one = torch.ones(2, requires_grad=True), torch.ones(())
    value = leaf.exp().sum()
    names.run_backward([value], [one], retain_graph=True)
    names.run_backward([value], [one])
    assert torch.equal(leaf.grad, 2 * leaf.detach().exp())
    with pytest.raises(RuntimeError, match="second time"):
        names.run_backward([value], [one])
    leaf.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        names.run_backward((leaf.sum(),), (one,))


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_backward_under_way_is_known(is_kept: bool) -> None:
    leaf, found = torch.ones(2, requires_grad=True), []
    leaf.register_hook(lambda _: found.append((private.is_in_backward(), private.is_graph_kept())))
    leaf.sum().backward(retain_graph=is_kept)
    assert found == [(True, is_kept)]
    assert not private.is_in_backward()
    lacking = load_where_torch_lacks_names()
    assert (lacking.is_in_backward(), lacking.is_graph_kept()) == (False, True)
    assert private.saved(leaf.sum().grad_fn, "no_such_thing") is None


# ---- dispatch modes and tensors


def test_no_mode_sees_what_runs_without_modes(names: Any) -> None:
    class Seen(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append((private.operator_of(func), [one.name for one in private.arguments_of(func)]))
            return func(*args, **(kwargs or {}))

    value, aten, calls = torch.ones(2), torch.ops.aten, list[Any]()
    with Seen():
        value.neg()
        with names.disable_current_modes():
            value.exp()
    assert calls == [(aten.neg, ["self"])] + ([(aten.exp, ["self"])] if names is not private else [])


# ---- modules and optimizers
