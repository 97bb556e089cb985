"""Models stored short: what is cast, stays in float32, is refused, or runs again; and the loss scale."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch import Precision, Step, Total
from anybatch.core.errors import PlanError
from anybatch.precision.apply import lower
from anybatch.precision.loss_scale import FIRST_SCALE, MOST, PATIENCE, LossScale
from anybatch.precision.policy import find_precision
from anybatch.recompute.blocks import POLICIES
from anybatch.testing import GradientRecorder, relative_error, tolerance
from tests import device
from tests.options import flat
from tests.snapshots import changes
from tests.zoo import Made, words

TRUE = {"fp16-true": torch.float16, "bf16-true": torch.bfloat16}
ALL = ["bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true"]
WAYS = [{"kind": False}, *({"recompute": {"blocks.?": policy}} for policy in POLICIES)]


class Spy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.seen.append((x.dtype, out.dtype, torch.is_autocast_enabled(device.KIND)))
        return out


def net() -> Any:
    return Made(
        lambda self, x: self.leave(self.norm(self.parts["router"](self.enter(x + self.shift)))),
        enter=nn.Linear(3, 3), parts=nn.ModuleDict({"router": Spy()}), norm=nn.BatchNorm1d(3), leave=Spy(),
        shift=torch.full((3,), 1.0001), count=torch.zeros((), dtype=torch.int64),
    )  # fmt: skip


def stepped(model: nn.Module, precision: Any, **options: Any) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Step(model, nn.MSELoss(), optimizer, precision=precision, **flat(options))


def dtypes(model: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters()}


@pytest.mark.parametrize("name", TRUE)
def test_weights_and_buffers_are_stored_short_but_for_batch_norm(name: str) -> None:
    model, dtype = net(), TRUE[name]
    found = list(model.parameters())
    lower(model, find_precision(name), model.parameters())
    assert all(one is other for one, other in zip(model.parameters(), found, strict=True))
    assert dtypes(model.enter) == dtypes(model.parts) == dtypes(model.leave) == {dtype}
    assert dtypes(model.norm) == {torch.float32}
    assert model.norm.running_mean.dtype == torch.float32
    assert (model.shift.dtype, model.count.dtype) == (dtype, torch.int64)
    assert model(torch.ones(4, 3)).dtype == torch.float32  # also for those who call it without a step
    assert model.parts["router"].seen == [(dtype, dtype, False)]


@pytest.mark.parametrize("pattern", ["parts.router", "parts.r?ut*", "Spy", "parts"])
@pytest.mark.parametrize("name", ALL)
def test_named_parts_stay_in_float32(name: str, pattern: str) -> None:
    model, known = net(), find_precision(name)
    dtype = getattr(torch, str(known.store or known.compute))
    precision = Precision(**{**known.to_dict(), "loss_scale": None, "keep_float32": (pattern,)})
    step = stepped(model, precision, batch_norm="micro")
    assert step((torch.ones(4, 3), torch.zeros(4, 3))).updated
    full = (torch.float32, torch.float32, False)
    assert model.parts["router"].seen == [full]
    if pattern == "Spy":
        assert model.leave.seen[0][1:] == full[1:]
    elif name in TRUE:
        assert model.leave.seen == [(dtype, dtype, False)]
    else:
        assert model.leave.seen[0][1:] == (dtype, True)
    assert dtypes(model.parts) == {torch.float32}
    assert dtypes(model.enter) == {dtype if name in TRUE else torch.float32}
    assert step.masters.of(model.parts["router"].weight) is None
    assert (step.masters.of(model.enter.weight) is not None) == (name in TRUE)
    assert not torch.is_autocast_enabled(device.KIND)


@pytest.mark.parametrize("name", TRUE)
def test_frequencies_of_rotary_embeddings_stay_in_float32(name: str) -> None:
    angles = torch.arange(2048)[:, None] * (found := 10_000 ** -(torch.arange(4) / 4))
    turn = Made(lambda self, x: x * self.cos[-len(x) :], inv_freq=found, cos=angles.cos())
    full, seen, dtype = copy.deepcopy(turn), [], TRUE[name]
    model = nn.Sequential(nn.Linear(4, 4), turn)
    lower(model, find_precision(name), model.parameters())
    turn.register_forward_hook(lambda _, args, output: seen.append((*args, output)))
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    assert all(b.dtype == torch.float32 for b in turn.buffers())
    assert seen[0][1].dtype == dtype
    entered, left = (one.detach().float() for one in seen[0])
    assert relative_error(left, full(entered)) <= tolerance(dtype, 8)


@pytest.mark.parametrize(("make", "keep", "message"), [
    (net, ("parts.router", "LayerNorm"), r"to name modules of the Made.*\['LayerNorm'\]"),
    (lambda: words(tied=True), ("head",), "share no weight with the others.*weight"),
    (net, (), "micro_batch to be at least 1.*got 0"),
])  # fmt: skip
def test_what_is_refused_leaves_the_model_as_it_was(make: Any, keep: tuple[str, ...], message: str) -> None:
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(PlanError, match=message):
        stepped(model, Precision(store="float16", keep_float32=keep), micro_batch=None if keep else 0)
    assert changes(before, dict(model.state_dict())) == []
    assert not any("forward" in vars(m) for m in model.modules())


# ---- blocks that run again take values that 8 bits do not tell apart

YEARS = torch.tensor([[2011.0, 17.3, 1.0], [2016.0, 1029.7, 0.1], [2017.0, 1030.1, 0.7], [2024.0, 3.0, 0.2]])
YEARS = YEARS.bfloat16().float()  # inputs are rounded at the door


def after_steps(kind: bool | None = None, **options: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if kind is None else checkpoint(block, x, use_reentrant=kind)
        return x

    torch.manual_seed(0)
    kept = nn.Sequential(Made(lambda self, x: (x - 2016.5).tanh()), nn.Linear(3, 3))
    block = nn.Sequential(kept, nn.Linear(3, 3), nn.Tanh())
    model = Made(forward, blocks=nn.ModuleList([block, copy.deepcopy(block)]))
    precision = Precision(store="bfloat16", keep_float32=("blocks.*.0",))
    step = stepped(model, precision, micro_batch=2, **options)
    for _ in range(4):
        step((YEARS, torch.ones(4, 3)))
    return dict(model.state_dict())


@pytest.mark.parametrize("options", WAYS, ids=["torch's checkpoint", *POLICIES])
def test_blocks_that_run_again_take_what_they_took(options: dict[str, Any]) -> None:
    assert changes(after_steps(), after_steps(**options)) == []


# ---- the loss scale: powers of two that give way by halves, and grow after many updates


def grown(scale: LossScale, updates: int) -> float:
    for _ in range(updates):
        scale.updated()
    return scale.value


def test_a_dynamic_one_gives_way_down_to_one_and_grows_after_many_updates() -> None:
    dynamic = lambda: LossScale(find_precision("fp16-mixed"))  # noqa: E731
    scale = dynamic()
    assert scale.value == FIRST_SCALE == 2.0**16
    assert [scale.value for _ in range(16) if scale.give_way()] == [2.0**n for n in range(15, -1, -1)]
    assert not scale.give_way()
    scale = dynamic()
    assert [grown(scale, PATIENCE - 1), grown(scale, 1)] == [FIRST_SCALE, 2 * FIRST_SCALE]
    assert grown(scale, PATIENCE - 1) == 2 * FIRST_SCALE
    scale.give_way()  # and the count begins anew
    assert grown(scale, 1) == FIRST_SCALE
    scale.begin()
    assert scale.value == FIRST_SCALE
    assert grown(dynamic(), 20 * PATIENCE) == MOST


@pytest.mark.parametrize("dtype", [{"compute": "float16"}, {"store": "float16"}], ids=["mixed", "true"])
def test_small_gradients_vanish_without_it_and_not_with_it(dtype: Any) -> None:
    small = lambda model, micro: Total(model(micro[0]).float().sum() * 2.0**-26, len(micro[0]))  # noqa: E731
    for scale in (1.0, 2.0**10, "dynamic"):
        recorder = GradientRecorder(model := nn.Linear(2, 1, bias=False))
        precise = Precision(**dtype, loss_scale=scale)
        Step(model, small, recorder, precision=precise, micro_batch=1)((torch.ones(2, 2),))
        found = recorder.gradients["weight"]
        if scale == 1.0:
            assert found.count_nonzero() == 0
        else:
            assert relative_error(found, torch.full((1, 2), 2.0**-26)) <= tolerance(torch.float16, 2)
