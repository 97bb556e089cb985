"""Tests of the meter: every count is exact, every byte has its owner, and nothing is left behind."""

import copy
from contextlib import nullcontext, suppress
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from anybatch import Options, Step
from anybatch.core.errors import TraceError
from anybatch.memory.fake import FakeMode, replaced_by_fakes
from anybatch.memory.ledger import OWNERS
from anybatch.memory.meter import Meter

KIB = 1024
NOTHING = nn.Identity()


def kib(count: int) -> Tensor:
    return torch.zeros(256 * count)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@given(st.lists(st.tuples(st.sampled_from(["new", "view", "drop"]), st.integers(0, 9)), max_size=30))
def test_meter_agrees_with_a_list(moves: list[tuple[str, int]]) -> None:
    tensors: list[Tensor] = []
    storages: list[tuple[int, int]] = []  # (number, bytes) of the storage of each tensor
    peak = 0
    with Meter(NOTHING) as meter:
        for number, (move, index) in enumerate(moves):
            if move == "new":
                tensors.append(torch.zeros(index))
                storages.append((number, 4 * index))
            elif tensors:
                index %= len(tensors)
                if move == "view":
                    tensors.append(tensors[index].view(-1))
                    storages.append(storages[index])
                else:
                    del tensors[index], storages[index]
            live = sum(dict(storages).values())
            peak = max(peak, live)
            assert (meter.live, meter.peak) == (live, peak)
    assert meter.ledger().peak == peak


def test_what_is_saved_for_backward_and_what_backward_makes_are_seen() -> None:
    x = kib(1).requires_grad_()
    with Meter(NOTHING, held=[x]) as meter:
        y = x.exp()  # saved for its own backward
        z = y.sin()  # saves y
        del y
        assert meter.live == 3 * KIB
        del z
        assert meter.live == 1 * KIB
        loss = (x * 2).sum()
        loss.backward()
        del loss
        assert meter.live == 2 * KIB  # x and x.grad
        x.grad = None
    assert meter.peak == 3 * KIB
    assert meter.live == KIB


def test_held_is_counted_once_and_a_storage_may_grow() -> None:
    weight = kib(2)
    with Meter(NOTHING, held=[weight, weight.view(2, 256)]) as meter:
        weight.add_(1)
        assert meter.held == meter.peak == 2 * KIB
        x = kib(1)
        x.resize_(512)
        assert meter.live == 4 * KIB
        del x
        assert meter.live == 2 * KIB
        after = kib(1)
    del after  # after its end a meter counts no more
    assert meter.live == 3 * KIB


def owned(meter: Meter, phase: str) -> dict[str, int]:
    return dict(zip(OWNERS, meter.ledger().phases()[phase].bytes, strict=True))


def test_every_byte_has_its_owner() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    step = Step(model, nn.CrossEntropyLoss(), optimizer)
    batch = torch.randn(16, 4), torch.randint(2, (16,))
    step(batch)
    with Meter(model, [optimizer], batch_leaves=batch) as meter:
        step(batch)
    size = sum(p.nbytes for p in model.parameters())
    start, backward, update = (owned(meter, phase) for phase in ("start", "backward", "update"))
    assert start["parameters"] == update["parameters"] == size
    assert start["optimizer state"] == 2 * size + 4 * len(list(model.parameters()))
    assert start["input"] == sum(leaf.nbytes for leaf in batch)
    assert start["gradients"] == start["activations"] == 0
    assert update["gradients"] == size
    assert backward["activations"] >= 16 * 8 * 4  # what Tanh keeps
    assert backward["workspace"] > 0
    assert meter.ledger().peak == meter.peak


def hooks() -> tuple[int, ...]:
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_always_called")
    return tuple(len(getattr(torch_module, name)) for name in names)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    model = mlp()
    model.register_forward_hook(lambda *_: 1 / 0 if fails else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, attributes = hooks(), copy.copy(model.__dict__)
    with suppress(ZeroDivisionError), Meter(model, [optimizer]):
        output = model(torch.randn(2, 4))
    if not fails:
        output.sum().backward()  # outside, though its graph was made inside
    assert hooks() == before
    assert model.__dict__ == attributes
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_step_is_bit_identical_under_the_meter() -> None:
    batch, found = (torch.randn(6, 4), torch.randint(2, (6,))), []
    for watched in (False, True):
        torch.manual_seed(1)
        model = mlp()
        step = Step(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), micro_batch=4)
        with Meter(model, step.optimizers, batch_leaves=batch) if watched else nullcontext():
            step(batch)
        found.append([*model.parameters()])
    assert all(map(torch.equal, *found))


def test_attention_of_the_cpu_is_counted() -> None:
    query = torch.randn(1, 2, 8, 4)
    with Meter(NOTHING) as meter:
        F.scaled_dot_product_attention(query, query, query)
    with Meter(NOTHING) as other:
        query @ query.transpose(2, 3)
    assert meter.flops == 2 * other.flops == 2 * 2 * 2 * 8 * 8 * 4


def test_a_bool_is_refused_but_for_code_of_torch() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4), 1, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    mode = FakeMode()
    with replaced_by_fakes(mode, encoder.modules(), []), mode:
        x = torch.ones(3, 2, 4)
        assert encoder(x, mask=torch.empty_like(mask)).shape == x.shape
        with pytest.raises(TraceError, match="got a bool asked of a tensor in a loss"):
            bool(x.isnan().any())
        with pytest.raises(TraceError, match=r"aten\.equal"), mode.explained():
            torch.equal(x, x)


def test_phases_micro_batches_and_modules() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(model, nn.CrossEntropyLoss(), optimizer, micro_batch=2, options=Options(check=False))
    batch = torch.randn(4, 4), torch.randint(2, (4,))
    with Meter(model, [optimizer], batch_leaves=batch) as meter:
        step(batch)
    marks = meter.recording.marks
    order = [pair for pair, _ in groupby((one.phase, one.micro_batch) for one in marks)]
    passes = [(phase, index) for index in (0, 1) for phase in ("forward", "loss", "backward")]
    assert order == [("start", -1), *passes, ("update", 1)]
    for phase, names in (("forward", ["0", "1", "2"]), ("backward", ["2", "1", "0"])):
        here = (one.module for one in marks if (one.phase, one.micro_batch) == (phase, 0))
        assert [*filter(None, here)] == names
    # Two products in forward and three in backward, as the input wants no gradient; twice 2 rows.
    assert marks[-1].flops == 2 * 2 * 2 * (2 * 4 * 8 + 3 * 8 * 2)
