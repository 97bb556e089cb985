"""Models stored short: what is cast, what stays in float32, and what is refused before anything changes."""

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Precision, Step
from anybatch.errors import PlanError
from anybatch.lower import lower
from anybatch.masters import Masters
from anybatch.precision import find
from anybatch.testing import Transformer, relative_error, tolerance
from tests.snapshots import changes, make_batch, make_model, make_step, snapshot

TRUE = {"fp16-true": torch.float16, "bf16-true": torch.bfloat16}
ALL = ["bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true"]
Pair = namedtuple("Pair", ["left", "right"])


class Spy(nn.Module):
    """Notes the dtype of what reaches it, and of its weights, and whether autocast is on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.seen.append((x.dtype, out.dtype, torch.is_autocast_enabled("cpu")))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.router, self.leave = nn.Linear(3, 3), Spy(), Spy()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("shift", torch.full((3,), 1.0001))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(self.router(self.enter(x + self.shift))))


def dtypes(model: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters()}


@pytest.mark.parametrize("name", TRUE)
def test_weights_and_buffers_are_stored_short_but_for_batch_norm(name: str) -> None:
    model, dtype = Net(), TRUE[name]
    found = list(model.parameters())
    lower(model, find(name), model.parameters())
    assert all(one is other for one, other in zip(model.parameters(), found, strict=True))
    assert dtypes(model.enter) == dtypes(model.router) == dtypes(model.leave) == {dtype}
    assert dtypes(model.norm) == {torch.float32}
    assert model.norm.running_mean.dtype == torch.float32
    assert (model.shift.dtype, model.count.dtype) == (dtype, torch.int64)
    assert model(torch.ones(4, 3)).dtype == torch.float32  # also for those who call it without a step
    assert model.router.seen == [(dtype, dtype, False)]


@pytest.mark.parametrize("pattern", ["router", "rout*", "Spy"])
@pytest.mark.parametrize("name", TRUE)
def test_named_parts_stay_in_float32_where_weights_are_short(name: str, pattern: str) -> None:
    model, dtype = Net(), TRUE[name]
    precision = Precision(store=find(name).store, keep_float32=(pattern,))
    masters = lower(model, precision, model.parameters())
    model(torch.ones(4, 3))
    full = (torch.float32, torch.float32, False)
    assert dtypes(model.router) == {torch.float32}
    assert model.router.seen == [full]
    assert model.leave.seen == [full if pattern == "Spy" else (dtype, dtype, False)]
    assert masters.of(model.router.linear.weight) is None
    assert masters.of(model.enter.weight) is not None


@pytest.mark.parametrize("pattern", ["router", "r?uter", "Spy"])
@pytest.mark.parametrize("name", ["bf16-mixed", "fp16-mixed"])
def test_named_parts_stay_in_float32_under_autocast(name: str, pattern: str) -> None:
    model = Net()
    dtype = getattr(torch, str(find(name).compute))
    precision = Precision(compute=find(name).compute, keep_float32=(pattern,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(model, nn.MSELoss(), optimizer, precision=precision, batch_norm="micro")
    assert step((torch.ones(4, 3), torch.zeros(4, 3))).updated
    full = (torch.float32, torch.float32, False)
    assert model.router.seen == [full]
    assert model.leave.seen[0][1:] == (full[1:] if pattern == "Spy" else (dtype, True))
    assert dtypes(model) == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


class Routed(nn.Module):
    """Holds parts in containers that nobody calls."""

    def __init__(self, *, is_named: bool) -> None:
        super().__init__()
        inner = nn.ModuleList([Spy(), nn.ModuleList([Spy()])])
        self.enter, self.parts = nn.Linear(3, 3), nn.ModuleDict({"inner": inner}) if is_named else inner

    def forward(self, x: Tensor) -> Tensor:
        inner = self.parts["inner"] if isinstance(self.parts, nn.ModuleDict) else self.parts
        return inner[1][0](inner[0](self.enter(x)))


@pytest.mark.parametrize("is_named", [True, False], ids=["ModuleDict", "ModuleList"])
@pytest.mark.parametrize("name", ALL)
def test_all_that_a_container_holds_may_be_named(name: str, is_named: bool) -> None:
    model = Routed(is_named=is_named)
    precision = Precision(**{**find(name).to_dict(), "keep_float32": ("parts",)})
    lower(model, precision, [])
    with precision.computing(["cpu"]):
        model(torch.ones(4, 3))
    spies = [module for module in model.modules() if isinstance(module, Spy)]
    assert [one.seen for one in spies] == [[(torch.float32, torch.float32, False)]] * 2
    assert dtypes(model.parts) == {torch.float32}


@pytest.mark.parametrize("name", TRUE)
@pytest.mark.parametrize("tracks", [True, False])
def test_running_statistics_of_instance_norm_stay_in_float32(name: str, tracks: bool) -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 1), nn.InstanceNorm1d(2, affine=True, track_running_stats=tracks))
    lower(model, find(name), [])
    assert dtypes(model[1]) == {torch.float32 if tracks else TRUE[name]}
    assert model[1].running_mean is None or model[1].running_mean.dtype == torch.float32
    assert model(torch.ones(2, 1, 4)).dtype == torch.float32


@pytest.mark.parametrize("name", ["bf16-mixed", "fp16-mixed"])
def test_instance_norm_is_left_to_autocast(name: str) -> None:
    model = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True))
    lower(model, find(name), [])
    assert not model[0]._forward_pre_hooks


@pytest.mark.parametrize("name", TRUE)
def test_weights_without_a_shape_are_refused_before_anything_changes(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match=r"whose shapes are known .* got \['1'\], .* Run one forward first"):
        Step(model, nn.MSELoss(), optimizer, precision=name)
    assert model[0].weight.dtype == torch.float32
    assert not any(module._forward_hooks for module in model)
    model(torch.ones(1, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert Step(model, nn.MSELoss(), optimizer, precision=name)((torch.ones(4, 3), torch.zeros(4, 2))).updated


@pytest.mark.parametrize("name", ["float32", "bf16-mixed", "fp16-mixed"])
def test_weights_without_a_shape_may_wait_where_none_is_stored_short(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
    step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), precision=name)
    assert step((torch.ones(4, 3), torch.zeros(4, 2))).updated


def test_autocast_is_as_before_where_a_part_fails() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 3))  # shapes do not match
    lower(model, Precision(compute="bfloat16", keep_float32=("1",)), [])
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.ones(2, 3))
        assert torch.is_autocast_enabled("cpu")
        assert model[0](torch.ones(2, 3)).dtype == torch.bfloat16
    assert not model[1]._forward_pre_hooks[next(iter(model[1]._forward_pre_hooks))].__self__._open


@pytest.mark.parametrize("name", ["float32", "tf32", "bf16-mixed", "fp16-mixed"])
def test_what_is_not_stored_short_is_left_as_it_is(name: str) -> None:
    model = Net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    masters = lower(model, find(name), model.parameters())
    assert changes(before, dict(model.state_dict())) == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert masters.tensors == []


def test_float32_is_the_plain_loop() -> None:
    model = make_model()
    twin, batch = copy.deepcopy(model), make_batch()
    step = Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        torch.manual_seed(5)
        step(batch)
        torch.manual_seed(5)
        F.cross_entropy(twin(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert changes(dict(twin.state_dict()), dict(model.state_dict())) == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters())


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight


@pytest.mark.parametrize(
    ("model", "keep", "expected", "got"),
    [
        (Net(), ("nothing.*",), "to name modules of the Net", "nothing.*"),
        (Net(), ("router", "LayerNorm"), "to name modules of the Net", "['LayerNorm']"),
        (Net(), ("spy",), "to name modules of the Net", "spy"),  # classes as they are written
        (Shared(), ("one",), "share no weight with the others", "weight"),
    ],
    ids=["no such module", "no such class", "another case", "shared weight"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_refused_leaves_the_model_as_it_was(
    model: nn.Module, keep: tuple[str, ...], expected: str, got: str, dtype: str
) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    precision = Precision(store=dtype, keep_float32=keep)
    with pytest.raises(PlanError, match=r"^Expected ") as caught:
        Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), precision=precision)
    assert expected in str(caught.value)
    assert got in str(caught.value)
    assert changes(before, dict(model.state_dict())) == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_step_that_is_refused_for_another_reason_leaves_the_model_as_it_was() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError):
        Step(model, nn.MSELoss(), optimizer, precision="fp16-true", micro_batch=0)
    assert dtypes(model) == {torch.float32}


def test_shared_weights_may_be_kept_together() -> None:
    model = Shared()
    lower(model, Precision(store="bfloat16", keep_float32=("one", "two")), model.parameters())
    assert dtypes(model) == {torch.float32}


def test_all_may_be_kept() -> None:
    model = Net()
    masters = lower(model, Precision(store="bfloat16", keep_float32=("*",)), model.parameters())
    assert dtypes(model) == {torch.float32}
    assert masters.tensors == []
    assert model(torch.ones(4, 3)).dtype == torch.float32


@pytest.mark.parametrize("name", ALL)
def test_two_steps_on_one_model_cast_once(name: str) -> None:
    model = Net()
    precision = Precision(**{**find(name).to_dict(), "keep_float32": ("router",)})
    for _ in range(2):
        lower(model, precision, model.parameters())
    assert len(model.router._forward_pre_hooks) == len(model.router._forward_hooks) == 1
    assert len(model._forward_hooks) == (1 if name.endswith("true") else 0)


def test_a_short_model_of_the_callers_gets_its_own_digits_as_backup() -> None:
    model = nn.Linear(3, 2).bfloat16()
    masters = lower(model, find("bf16-true"), model.parameters())
    assert torch.equal(masters.of(model.weight), model.weight.float())
    assert masters.of(model.weight).dtype == torch.float32


def test_weights_that_nobody_trains_have_no_backup() -> None:
    model = Net()
    masters = lower(model, find("fp16-true"), model.leave.parameters())
    assert model.enter.weight.dtype == torch.float16
    assert len(masters.tensors) == 2


@dataclass
class Record:
    x: Tensor


class Nested(nn.Module):
    """Gives back what it was given, in every nest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: Any = None

    def forward(self, value: Any, *, more: Any = None) -> Any:
        self.seen = value, more
        return value, more


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        (torch.ones(2), [torch.zeros(1)]),
        {"a": torch.ones(2), "b": {"c": torch.ones(1)}},
        OrderedDict(a=torch.ones(2)),
        Pair(torch.ones(2), torch.zeros(3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_nest_is_cast_and_keeps_its_class(value: Any) -> None:
    model = Nested()
    lower(model, find("bf16-true"), [])
    back = model(value, more=value)
    assert changes({"value": (value, value)}, {"value": back}) == []  # ones and zeros survive

    def leaves(one: Any) -> list[Tensor]:
        parts = one.values() if isinstance(one, dict) else one
        return [one] if isinstance(one, Tensor) else [leaf for part in parts for leaf in leaves(part)]

    assert {leaf.dtype for leaf in leaves(model.seen)} == {torch.bfloat16}
    assert {leaf.dtype for leaf in leaves(back)} == {torch.float32}


def test_what_is_no_float_goes_through() -> None:
    model = Nested()
    lower(model, find("fp16-true"), [])
    tokens, mask, record = torch.arange(3), torch.tensor([True]), Record(torch.ones(1))
    for value in (tokens, mask, record, "word", 3, None):
        assert model(value)[0] is value


def test_callers_mappings_are_not_written_to() -> None:
    model = Nested()
    lower(model, find("fp16-true"), [])
    given = OrderedDict(a=torch.ones(2))
    model(given)
    assert given["a"].dtype == torch.float32


@pytest.mark.parametrize("name", ALL)
def test_a_transformer_with_tied_embeddings_trains(name: str) -> None:
    torch.manual_seed(0)
    model = Transformer(11)
    full = copy.deepcopy(model)
    tokens = torch.randint(1, 11, (8, 5))
    losses = []
    for one, precision in ((model, name), (full, "float32")):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        options = {"precision": precision, "micro_batch": 4}
        step = Step(one, nn.CrossEntropyLoss(ignore_index=0), optimizer, **options)
        losses.append([step((tokens, tokens)).loss for _ in range(3)])
    dtype = torch.float16 if "fp16" in name else torch.bfloat16
    assert losses[0][2] < losses[0][0]
    assert relative_error(*losses) <= tolerance(dtype, 8)


@pytest.mark.parametrize("name", ALL)
def test_a_recurrent_network_trains(name: str) -> None:
    torch.manual_seed(0)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.leave = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.leave(self.cell(x)[0][:, -1])

    model = Recurrent()
    step = Step(
        model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), precision=name, micro_batch=2
    )
    batch = torch.randn(4, 5, 3), torch.randn(4, 2)
    assert step(batch).loss > step(batch).loss


@pytest.mark.parametrize("name", ALL)
def test_modes_and_buffers_of_a_refused_batch_are_as_before(name: str) -> None:
    step = make_step(precision=name, micro_batch=3)
    before = snapshot(step)
    x, y = make_batch()
    with pytest.raises(Exception, match="Target 99 is out of bounds"):
        step((x, torch.full_like(y, 99)))
    assert changes(before, snapshot(step)) == []
    assert not torch.is_autocast_enabled("cpu")


def test_nothing_is_held_of_a_model_in_float32() -> None:
    assert isinstance(lower(Net(), find("float32"), []), Masters)
