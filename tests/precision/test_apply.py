"""Models stored short: what is cast, what stays in float32, and what is refused before anything changes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Precision, Step
from anybatch.core.errors import PlanError
from anybatch.precision.apply import lower
from anybatch.precision.policy import find_precision
from anybatch.testing import relative_error, tolerance
from tests import device
from tests.options import flat
from tests.snapshots import changes
from tests.zoo import Made

TRUE = {"fp16-true": torch.float16, "bf16-true": torch.bfloat16}
ALL = ["bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true"]


class Spy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.seen.append((x.dtype, out.dtype, torch.is_autocast_enabled(device.KIND)))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.parts, self.leave = nn.Linear(3, 3), nn.ModuleDict({"router": Spy()}), Spy()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("shift", torch.full((3,), 1.0001))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(self.parts["router"](self.enter(x + self.shift))))


def stepped(model: nn.Module, precision: Any, **options: Any) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Step(model, nn.MSELoss(), optimizer, precision=precision, **flat(options))


def dtypes(model: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters()}


@pytest.mark.parametrize("name", TRUE)
def test_weights_and_buffers_are_stored_short_but_for_batch_norm(name: str) -> None:
    model, dtype = Net(), TRUE[name]
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
    model, known = Net(), find_precision(name)
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


def shared() -> Any:
    model = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    model["two"].weight = model["one"].weight
    return model


@pytest.mark.parametrize(
    ("make", "keep", "message"),
    [
        (Net, ("parts.router", "LayerNorm"), r"to name modules of the Net.*\['LayerNorm'\]"),
        (shared, ("one",), "share no weight with the others.*weight"),
        (Net, (), "micro_batch to be at least 1.*got 0"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(make: Any, keep: tuple[str, ...], message: str) -> None:
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(PlanError, match=message):
        stepped(model, Precision(store="float16", keep_float32=keep), micro_batch=None if keep else 0)
    assert changes(before, dict(model.state_dict())) == []
    assert not any("forward" in vars(m) for m in model.modules())
