import random

import numpy as np
import torch
from torch import Tensor, nn

from anybatch import rng
from anybatch.surroundings import Surroundings, evaluating


class Restless(nn.Module):
    """Changes one buffer in place, and puts another tensor in the place of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inside", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.inside += 1
        self.replaced = self.replaced + 1
        return x * self.weight + torch.rand(2) + random.random() + np.random.rand()


def test_buffers_and_random_state_come_back() -> None:
    model = Restless()
    before, replaced, random_state = Surroundings([model]), model.replaced, torch.get_rng_state()
    model(torch.ones(2))
    before.put_back()
    assert torch.equal(model.inside, torch.zeros(2))
    assert model.replaced is replaced
    assert torch.equal(torch.get_rng_state(), random_state)


def test_buffers_alone_come_back() -> None:
    model = Restless()
    before, random_state = Surroundings([model]), torch.get_rng_state()
    model(torch.ones(2))
    before.put_buffers_back()
    assert torch.equal(model.inside, torch.zeros(2))
    assert not torch.equal(torch.get_rng_state(), random_state)


def test_an_evaluation_leaves_no_trace() -> None:
    model = nn.Sequential(Restless(), nn.Dropout())
    model[1].training = False
    gradient = model[0].weight.grad = torch.ones(2)
    streams, replaced = rng.capture_process(), model[0].replaced
    with evaluating([*model.modules()]):
        assert not any(module.training for module in model.modules())
        assert not model(torch.ones(2)).requires_grad
        model.zero_grad()
    assert [module.training for module in model.modules()] == [True, True, False]
    assert model[0].weight.grad is gradient
    assert model[0].replaced is replaced
    assert torch.equal(model[0].inside, torch.zeros(2))
    assert not rng.has_moved(streams)


def test_an_evaluation_comes_back_after_errors() -> None:
    model = Restless()
    try:
        with evaluating([model]):
            raise RuntimeError("tripped")
    except RuntimeError:
        assert model.training
        assert torch.is_grad_enabled()


def test_weights_cast_without_graph_are_not_used_again() -> None:
    model = nn.Linear(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with evaluating([model]):
            model(torch.ones(1, 2))
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
