"""Codecs: what is sent and what waits add up to what came; same bytes, same bits; a failure loses nothing."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch.core import CheckpointError, PlanError
from anybatch.parallel import Cast, Codec, DeepGradientCompression
from anybatch.testing import relative_error, tolerance
from tests.snapshots import same

SHAPES = {"conv": (4, 3, 5, 5), "bias": (4,), "scale": (), "empty": (0, 3), "weight": (7, 9)}
LIKE = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
UPDATES, RANKS = 10, 3
CLOSE = tolerance(torch.float64, 10 * UPDATES * RANKS)

Named = dict[str, Tensor]


def drawn(seed: int, like: Named = LIKE) -> Named:
    torch.manual_seed(seed)
    return {name: torch.randn(one.shape, dtype=torch.float64).to(one.dtype) for name, one in like.items()}


def dgc(sparsity: float = 0.9, momentum: float = 0.9, **options: Any) -> DeepGradientCompression:
    return DeepGradientCompression(sparsity, momentum, **{"warmup_updates": 0} | options)


def added(shares: Sequence[Named]) -> Named:
    """The plain sum in rank order; absent is what no rank has."""
    sums: Named = {}
    for name, value in (pair for share in shares for pair in share.items()):
        sums[name] = sums[name] + value if name in sums else value
    return sums


def exchanged(codecs: Sequence[Codec], shares: Sequence[Named], like: Named = LIKE) -> Named:
    payloads = [codec.encode(share, like) for codec, share in zip(codecs, shares, strict=True)]
    return codecs[0].decode(payloads, like)


CODECS = {
    "fp16": lambda: Cast("fp16"),
    "bf16": lambda: Cast("bf16"),
    "dgc": dgc,
    "dgc, all options": lambda: dgc(clip_norm=1.0, ranks=RANKS, warmup_updates=4),
    "dgc, nothing": lambda: dgc(0.9, 0.0, masking=False),
}


@pytest.mark.parametrize("make", CODECS.values(), ids=CODECS)
def test_undo_is_as_if_never_encoded_and_a_saved_state_goes_on_to_the_bit(make: Any) -> None:
    straight, undone, loaded = make(), make(), make()
    for update in range(6):
        before = undone.state()
        undone.encode(drawn(100 + update), LIKE)
        undone.undo()
        undone.undo()
        assert same(undone.state(), before)
        for seed in (100, 200):
            loaded.encode(drawn(seed), LIKE)
        loaded.load(before)
        loaded.undo()
        wanted = straight.encode(drawn(update), LIKE)
        assert torch.equal(undone.encode(drawn(update), LIKE), wanted)
        assert torch.equal(loaded.encode(drawn(update), LIKE), wanted)
        assert same(loaded.state(), straight.state())


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("parameters", [torch.float64, torch.float32, torch.bfloat16])
def test_a_cast_rounds_each_share_once_and_adds_up_wide(name: Any, parameters: torch.dtype) -> None:
    like = {key: one.to(parameters) for key, one in LIKE.items()}
    wide, dtype = (
        torch.promote_types(parameters, torch.float32),
        {"fp16": torch.half}.get(name, torch.bfloat16),
    )
    shares = [{key: one.to(wide) for key, one in drawn(seed).items()} for seed in range(RANKS)]
    wanted = added([{key: one.to(dtype).to(wide) for key, one in share.items()} for share in shares])
    assert same(exchanged([Cast(name) for _ in shares], shares, like), wanted)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_was_sent_and_what_waits_are_the_corrected_gradients(momentum: float) -> None:
    """Without masking the method is linear: all that was sent and what waits are the sum of velocities."""
    codec, sent = dgc(0.9, momentum, masking=False, warmup_updates=4), list[Named]()
    velocity, corrected = ({name: torch.zeros_like(one) for name, one in LIKE.items()} for _ in range(2))
    for update in range(UPDATES):
        share = drawn(update) if update % 3 else {}
        for name in LIKE if update else ():
            gradient = share.get(name, torch.zeros_like(LIKE[name]))
            velocity[name] = momentum * velocity[name] + gradient
            corrected[name] += velocity[name]
        sent.append(exchanged([codec], [share]))
        if update:
            waits = {name: one.view(LIKE[name].shape) for name, one in codec.state()["residual"].items()}
            assert {*waits} == {"conv", "weight"}
            assert relative_error(added([*sent, waits]), corrected) <= CLOSE


@pytest.mark.parametrize("masking", [True, False])
def test_only_the_largest_go_and_they_leave_nothing_behind_where_masked(masking: bool) -> None:
    """A rank without rows sends what has waited."""
    codec, zeros = dgc(0.9, 0.5, masking=masking), dict.fromkeys(LIKE, torch.zeros(1).double())
    for update in range(UPDATES):
        old, share = codec.state(), drawn(update) if update % 4 != 2 else {}
        sent = exchanged([codec], [share])
        new = codec.state()
        for name in ("conv", "weight"):
            wanted = sent[name].flatten()
            velocity = (share or zeros)[name].flatten().expand(wanted.shape)
            if update:
                velocity = 0.5 * old["velocity"][name] + velocity
            waited = velocity + old["residual"][name] if update else velocity
            places = wanted.nonzero().flatten()
            assert len(places) == round(len(wanted) / 10)
            assert torch.equal(wanted[places], waited[places])
            rest = waited.index_fill(0, places, 0)
            assert rest.abs().max() <= wanted[places].abs().min()
            assert torch.equal(new["residual"][name], rest)
            kept = velocity.index_fill(0, places, 0) if masking else velocity
            assert torch.equal(new["velocity"][name], kept)


def test_a_rank_clips_by_the_norm_of_its_whole_gradient_and_the_number_of_ranks() -> None:
    share = drawn(0)
    norm = torch.cat([one.flatten() for one in share.values()]).norm()
    for ranks in (1, 4):
        clipped = exchanged([dgc(0.0, 0.0, clip_norm=1.0, ranks=ranks)], [share])
        wanted = {name: one / (norm * ranks**0.5) for name, one in share.items()}
        assert relative_error(clipped, wanted) <= CLOSE
    for options in ({"clip_norm": 2 * float(norm), "ranks": 4 - 1}, {}):
        assert same(exchanged([dgc(0.0, 0.0, **options)], [share]), share)
    assert same(exchanged([dgc(0.0, 0.0, clip_norm=1.0, ranks=1)], [LIKE]), LIKE)  # all zeros


def test_the_sparsity_rises_by_quarters_and_the_bytes_fall() -> None:
    like, codec, sent = {"weight": torch.zeros(100, 100)}, dgc(0.999, warmup_updates=8), list[int]()
    for update in range(10):
        codec.encode(drawn(update, like), like)
        sent.append((codec.sent - 4) // 8)
    assert sent == [2500, 2500, 625, 625, 156, 156, 39, 39, 10, 10]
    rises = dgc(0.9, warmup_updates=4)
    assert [rises.sparsity_at(update) for update in range(5)] == [0.75, *[0.9] * 4]
    assert dgc(0.5, warmup_updates=4).sparsity_at(0) == 0.5


def test_what_is_refused() -> None:
    """A state of another codec, what cannot be counted, and a momentum beside the codec's own."""
    with pytest.raises(CheckpointError, match=r"got one with \['scale'\]"):
        dgc().load({"scale": 1.0})
    with pytest.raises(PlanError, match=r"got one of torch\.complex64 and shape \(2,\)"):
        dgc().check([torch.optim.SGD([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1)])
    parameters = nn.Linear(2, 2).parameters
    heavy = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9, nesterov=True)
    with pytest.raises(PlanError, match=r"got SGD with {'momentum': 0\.9, 'nesterov': True}"):
        dgc().check([torch.optim.SGD(parameters(), lr=0.1), heavy])
    dgc(momentum=0.0).check([heavy])
    for momentum in (0.0, 0.9):
        with pytest.raises(PlanError, match=r"got Adam with {'betas'"):
            dgc(momentum=momentum).check([torch.optim.Adam(parameters())])
