"""A forward run again from the state it began in."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from anybatch.core.errors import PlanError
from anybatch.integrations.transformers import with_empty_cache, with_own_cache
from anybatch.recompute.checkpoint import Call, Draws, State
from anybatch.state import Reachable
from tests.integrations.heads import HEADS
from tests.recompute.models import seed, streams


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def draw(generator: torch.Generator) -> list[Any]:
    return [torch.rand(2), torch.rand(2, generator=generator), random.random(), np.random.rand()]


def test_every_stream_is_drawn_again() -> None:
    own = torch.Generator().manual_seed(0)
    seed(1)
    draws, first = Draws([own]), draw(own)
    draws.restore()
    assert same(draw(own), first)


class Counts(nn.Module):
    """Writes to all a forward can write to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("written", torch.zeros(2, 2))
        self.register_buffer("left", torch.zeros(2, 2))
        self.calls = 0

    def forward(self, x: Tensor, known: list[Tensor]) -> Tensor:
        self.replaced = self.replaced + 1
        self.written += 1
        self.calls += 1
        self.last = self.norm(x) + self.replaced + self.written.sum() + self.calls + sum(known)
        return self.last + torch.rand(())


def state(module: Counts) -> list[Any]:
    values = [value.clone() for value in module.state_dict().values()]
    return [*values, module.calls, module.last.detach(), *streams()]


def test_the_second_run_is_the_first_and_leaves_nothing() -> None:
    torch.manual_seed(0)
    module, x, known = Counts(), torch.randn(3, 2), [torch.ones(2)]
    call = Call("it", module.forward, Reachable([module], is_block=True), ((x,), {"known": known}))
    tensors = list(call.tensors)
    first = call(*tensors)
    known.append(torch.ones(2))
    module(x, known)
    before, replaced = state(module), module.replaced
    for _ in range(2):
        assert torch.equal(call(*tensors), first)
        assert same(state(module), before)
        assert module.replaced is replaced


def test_a_failed_second_run_leaves_nothing() -> None:
    class Fails(Counts):
        def forward(self, x: Tensor, known: list[Tensor]) -> Tensor:
            result = super().forward(x, known)
            if fail:
                raise torch.OutOfMemoryError("no memory")
            return result

    fail = False
    module, x = Fails(), torch.randn(3, 2)
    call = Call("it", module.forward, Reachable([module], is_block=True), ((x, []), {}))
    call(x)
    before, fail = state(module), True
    with pytest.raises(torch.OutOfMemoryError):
        call(x)
    assert same(state(module), before)


def test_the_same_tensor_stays_the_same() -> None:
    x = torch.ones(2)
    call = Call(
        "it",
        lambda a, b, c: a is b is c["c"][0],
        Reachable([nn.Tanh()], is_block=True),
        ((x, x), {"c": {"c": (x,)}}),
    )
    assert len(call.tensors) == 1
    assert call(x)
    assert call(torch.ones(2))


def test_only_what_changed_is_kept() -> None:
    module = Counts()
    module.register_buffer("table", torch.zeros(3, 3))
    noted = State(Reachable([module], is_block=True))
    module(torch.randn(3, 2), [])
    noted.keep_what_changed()
    slots = {buffer: name for name, buffer in module.named_buffers()}
    kept = {slots.get(buffer, "replaced") for buffer in noted._copies}
    expected = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "replaced", "written"}
    assert kept == expected


def test_an_argument_changed_in_place_is_refused() -> None:
    x = torch.ones(2)
    call = Call("here", lambda x: x.add_(1), Reachable([nn.Tanh()], is_block=True), ((x,), {}))
    with pytest.raises(PlanError, match="'here', which changes one in place"):
        call(x)


def test_a_buffer_written_between_the_runs_is_refused() -> None:
    module, x = Counts(), torch.randn(3, 2)
    call = Call("here", module.forward, Reachable([module], is_block=True), ((x, []), {}))
    call(x)
    module.left.add_(1)
    with pytest.raises(PlanError, match=r"'here'.*shape \(2, 2\)"):
        call(x)


def test_what_other_layers_have_cached_is_there_by_its_shape_alone() -> None:
    """Else a layer that is rebuilt would hold the keys and values of all layers before it."""
    model = next(head for head in HEADS if head.name == "GPT2LMHeadModel").build()
    block, cache, states = model.get_submodule("transformer.h.0"), DynamicCache(), torch.randn(1, 2, 3, 4)
    cache.update(states, states, 1)
    (own,), _ = with_own_cache(*with_empty_cache(block, (cache,), {}))
    other: Any = own.layers[1]
    assert other.get_seq_length() == 3
    for held in (other.keys, other.values):
        assert held.shape == states.shape
        assert held.untyped_storage().nbytes() == states.element_size()
    theirs: Any = cache.layers[1]
    assert torch.equal(theirs.keys, states)  # and it is as it was
