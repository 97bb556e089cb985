"""Tests of the meter of peak tensor bytes: every count is exact."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.peak_bytes import PeakBytes

KIB = 1024


def kib(count: int) -> Tensor:
    return torch.zeros(256 * count)


def test_peak_is_of_what_lives_at_once() -> None:
    with PeakBytes() as meter:
        a = kib(3)
        b = kib(2)
        del a
        c = kib(4)
        del b, c
        d = kib(1)
    assert meter.peak == 6 * KIB
    assert meter.live == 1 * KIB
    del d
    assert meter.live == 0


def test_views_count_once_and_keep_their_storage_alive() -> None:
    with PeakBytes() as meter:
        whole = kib(2)
        part = whole.view(2, 256)[1]
        detached = part.detach()
        del whole, part
        assert meter.live == meter.peak == 2 * KIB
        del detached
        assert meter.live == 0


@given(st.lists(st.tuples(st.sampled_from(["new", "view", "drop"]), st.integers(0, 9)), max_size=30))
def test_meter_agrees_with_a_ledger(moves: list[tuple[str, int]]) -> None:
    tensors: list[Tensor] = []
    storages: list[tuple[int, int]] = []  # the ledger: (number, bytes) of the storage of each tensor
    peak = 0
    with PeakBytes() as meter:
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


def test_saved_tensors_live_until_backward() -> None:
    x = kib(1).requires_grad_()
    with PeakBytes(held=[x]) as meter:
        y = x.exp()  # saved for its own backward
        z = y.sin()  # saves y
        del y
        assert meter.live == 3 * KIB
        del z
        assert meter.live == 1 * KIB


def test_backward_is_seen() -> None:
    x = kib(1).requires_grad_()
    with PeakBytes(held=[x]) as meter:
        loss = (x * 2).sum()
        forward = meter.peak
        assert meter.live == KIB + 4  # x and the loss: a product with a number saves nothing
        loss.backward()
    assert forward == 2 * KIB + 4
    assert meter.live == 2 * KIB + 4  # and x.grad
    assert meter.peak == 2 * KIB + 8  # x, x.grad, the loss, and its gradient, a one
    x.grad = None
    assert meter.live == KIB + 4


def test_backward_raises_the_peak() -> None:
    layer = nn.Linear(64, 64, bias=False)  # 16 KiB, and so is its gradient
    x = torch.zeros(1, 64)
    held = 16 * KIB + 256
    with PeakBytes(held=[layer.weight, x]) as meter:
        loss = layer(x).sum()
        assert meter.peak == held + 256 + 4  # the output, then the loss
        loss.backward()
    assert meter.peak >= held + 16 * KIB
    assert meter.live == held + 16 * KIB + 4


def test_what_stands_apart_is_not_counted_but_its_copies_are() -> None:
    batch = kib(8)
    with PeakBytes(apart=[batch]) as meter:
        halves = batch.split(1024)
        assert meter.peak == 0
        copy = halves[0].clone()
    assert meter.apart == 8 * KIB
    assert meter.live == meter.peak == copy.nbytes == 4 * KIB


def test_held_is_counted_once_from_the_start() -> None:
    weight = kib(2)
    with PeakBytes(held=[weight, weight.view(2, 256)]) as meter:
        weight.add_(1)
    assert meter.held == meter.peak == 2 * KIB


def test_a_storage_may_grow() -> None:
    with PeakBytes() as meter:
        x = kib(1)
        x.resize_(512)
        assert meter.live == 2 * KIB
    del x
    assert meter.live == 0
