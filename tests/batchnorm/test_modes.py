"""Where rows meet: BatchNorms are found in every state, frozen for a while, and converted for exact cuts."""

import operator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.batchnorm import (
    batch_norm_to_group_norm,
    find_batch_norms,
    frozen_batch_norms,
)
from anybatch.core.errors import PlanError
from anybatch.testing import GradientRecorder, reference_step, relative_error
from tests.zoo import Made

LIMIT = 1e-12  # relative, float64


class Scaled(nn.BatchNorm2d):
    """A subclass of a user."""


def image() -> Any:
    """Return convolutions with BatchNorm for images, and one for the vectors that come out of them."""
    body = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8, eps=1e-3), nn.Tanh())
    head = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3))
    return Made(lambda self, x: self.head(self.body(x).mean((2, 3))), body=body, head=head)


def meets(module: nn.Module, x: Tensor) -> bool:
    """Whether the first row's output changes with the others: by trying."""
    other = x.clone()
    other[1:] += torch.randn_like(x[1:])
    with torch.no_grad():
        return not torch.equal(module(x)[0], module(other)[0])


def cut_error(model: nn.Module) -> float:
    """Of the gradient of a ragged cut, against the whole batch."""
    batch = torch.randn(11, 2, 6, 5, dtype=torch.float64), torch.randint(3, (11,))
    recorder = GradientRecorder(model)
    expected = reference_step(model, nn.CrossEntropyLoss(), batch)
    ab.Step(model, nn.CrossEntropyLoss(), recorder, micro_batch=4, options=ab.Options(batch_norm="micro"))(
        batch
    )
    return relative_error(recorder.gradients, expected.gradients)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tracking", [True, False])
def test_what_is_found_is_where_rows_meet(training: bool, tracking: bool) -> None:
    late = nn.BatchNorm2d(4)  # statistics that are kept though no longer tracked are used
    late.track_running_stats = tracking
    for norm in (nn.BatchNorm2d(4, track_running_stats=tracking), nn.InstanceNorm2d(4), late):
        norm.train(training)
        assert (find_batch_norms([norm]) == [norm]) == meets(norm, torch.randn(5, 4, 3, 3))


@pytest.mark.parametrize("fails", [True, False])
def test_frozen_use_running_statistics_update_none_and_come_back(fails: bool) -> None:
    model = image()
    model.body[1].eval()  # one that its owner has frozen already stays so
    model.head[1].drop = nn.Dropout()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    with suppress(KeyError), frozen_batch_norms([model.body[1], model.head[1]]):
        assert find_batch_norms(model.modules()) == []
        assert model.head.training
        assert model.head[1].drop.training
        assert not meets(model, torch.randn(5, 2, 6, 5))
        model(torch.randn(5, 2, 6, 5)).sum().backward()
        if fails:
            raise KeyError
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(parameter.grad is not None for parameter in model.head[1].parameters())


def test_without_running_statistics_nothing_can_be_frozen() -> None:
    norms = [nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)]
    with pytest.raises(PlanError, match=r"running statistics to freeze, got BatchNorm1d\(4"):
        frozen_batch_norms(norms).__enter__()
    assert norms[0].training


def test_a_cut_is_exact_after_it_and_was_not_before() -> None:
    model = image().double()
    assert cut_error(model) > 0.01
    weights = [*model.parameters()]  # which an optimizer may hold already
    assert batch_norm_to_group_norm(model) is model
    assert all(map(operator.is_, model.parameters(), weights))
    assert cut_error(model) <= LIMIT
    model = model.float()
    outputs = model(torch.randn(5, 2, 6, 5))
    assert not meets(batch_norm_to_group_norm(nn.BatchNorm1d(4)), torch.randn(3, 4, 5))  # of sequences
    assert not meets(model, torch.randn(5, 2, 6, 5))
    assert outputs.std(0).min() > 0.01  # groups of one value each would give every row the same


@pytest.mark.parametrize(
    ("channels", "groups", "expected"),
    [(64, 32, 32), (48, 32, 24), (48, 10, 8), (6, 32, 3), (1, 32, 1), (64, 1, 1)],
)
def test_groups_are_the_largest_divisor_that_leaves_enough_channels(
    channels: int, groups: int, expected: int
) -> None:
    assert batch_norm_to_group_norm(nn.BatchNorm2d(channels), groups).num_groups == expected


def test_vectors_have_groups_of_several_channels() -> None:
    assert batch_norm_to_group_norm(nn.BatchNorm1d(64), 32).num_groups == 4


def test_what_is_kept() -> None:
    norm = nn.BatchNorm2d(8, eps=0.25, device="meta", dtype=torch.bfloat16).eval()
    norm.weight.requires_grad_(False)
    new = batch_norm_to_group_norm(norm)
    assert isinstance(new, nn.GroupNorm)
    assert (new.weight is norm.weight, new.bias is norm.bias) == (True, True)
    assert (new.eps, new.affine, new.training) == (0.25, True, False)
    bare = batch_norm_to_group_norm(nn.BatchNorm2d(8, affine=False))
    assert (bare.weight, bare.bias, bare.affine, bare.training) == (None, None, False, True)
    assert list(bare.state_dict()) == []


def test_a_module_in_several_places_is_converted_once_and_a_lazy_one_after_its_first_batch() -> None:
    norm = nn.BatchNorm1d(4)
    inner = nn.Sequential(norm, nn.Tanh())
    model = nn.Sequential(inner, norm, inner, nn.ModuleDict({"again": norm}))
    batch_norm_to_group_norm(model)
    assert isinstance(model[1], nn.GroupNorm)
    assert model[0][0] is model[1] is model[2][0] is model[3]["again"]
    assert find_batch_norms(model.modules()) == []
    model = nn.Sequential(nn.LazyBatchNorm2d(affine=False))
    with pytest.raises(PlanError, match=r"LazyBatchNorm2d at 0\. Run the model once"):
        batch_norm_to_group_norm(model)
    with pytest.raises(PlanError, match="at least 1, got 0"):
        batch_norm_to_group_norm(nn.BatchNorm2d(4), 0)
    model(torch.randn(2, 6, 3, 3))
    new = batch_norm_to_group_norm(model)[0]
    assert (new.num_groups, new.num_channels, new.weight) == (3, 6, None)


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (Scaled(4), "Scaled at 1. A class of its own"),
        (nn.BatchNorm2d(4), "BatchNorm2d at 1 with .*_forward_hooks.*remove them"),
    ],
)
def test_what_would_be_lost_is_refused_and_nothing_is_changed(norm: nn.Module, message: str) -> None:
    norm.register_forward_hook(lambda module, inputs, output: None)
    model = nn.Sequential(nn.BatchNorm2d(4), norm)
    found = list(model)
    with pytest.raises(PlanError, match=message):
        batch_norm_to_group_norm(model)
    assert list(model) == found
