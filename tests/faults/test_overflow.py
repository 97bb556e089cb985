"""A gradient overflows float16: only its micro-batch comes again, and no update is lost."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Precision, Step, Terms, Total
from anybatch.core.errors import NonFiniteLossError
from anybatch.core.report import Event, MicroBatchDone, MicroBatchRedone
from anybatch.testing import GradientRecorder, reference_step, relative_error, tolerance
from tests.faults.overflowing import (
    FIRST,
    MIXED,
    OPTIONS,
    PRECISIONS,
    ROWS,
    SIZE,
    Net,
    make,
    make_batch,
    moved,
    parts,
    plant,
    take,
    weights,
)
from tests.faults.scarce import scarce_in_passes
from tests.snapshots import changes, snapshot

BOUND = tolerance(torch.float16, ROWS // SIZE)
ONCE = [SIZE] * (ROWS // SIZE)


def ran(halvings: int, at: int = 2) -> list[int]:
    """Rows of each forward where one micro-batch came again."""
    return ONCE[:at] + [SIZE] * halvings + ONCE[at:]


def twins(name: str, precision: Any, halvings: int, **ways: Any) -> tuple[Step, Step, Any]:
    """A step in which the third micro-batch will overflow, and one that has gone without."""
    batch = make_batch()
    twin, step = make(name, precision=precision), make(name, precision=precision)
    assert take(twin, batch, **ways).redone == 0
    plant(step, twin.model.largest, halvings)
    return step, twin, batch


@pytest.mark.parametrize("halvings", [1, 4])
@pytest.mark.parametrize("windowed", [False, True], ids=["whole", "window"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_update_is_the_one_without_overflow(
    name: str, precision: str, windowed: bool, halvings: int
) -> None:
    step, twin, batch = twins(name, PRECISIONS[precision], halvings, windowed=windowed)
    start = weights(step)
    report = take(step, batch, windowed=windowed)
    assert relative_error(moved(step, start), moved(twin, start)) <= BOUND
    differ = changes(snapshot(twin), snapshot(step))
    assert all(
        name.startswith(("parameter", "optimizer")) for name in differ
    )  # buffers and random state do not
    assert (report.updated, report.redone, report.dropped) == (True, halvings, 0)
    assert report.cut == tuple(ONCE)
    assert step.model.ran == ran(halvings)
    is_fixed = "fixed" in precision
    assert report.scale == step.scale.value == (FIRST if is_fixed else FIRST / 2**halvings)


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-true"])
def test_the_gradient_is_that_of_the_whole_batch_in_float64(precision: str) -> None:
    step, _, batch = twins("divided early", precision, 3)
    recorder = GradientRecorder(step.model)
    power = step.model.power
    step = Step(step.model, nn.CrossEntropyLoss(), recorder, precision=precision, micro_batch=SIZE)
    step.scale.load({"value": FIRST, "clean": 0})
    step.model.power = 0
    whole = reference_step(step.model, nn.CrossEntropyLoss(), batch)
    step.model.power = power
    assert step(batch).redone == 3
    assert relative_error(recorder.gradients, whole.gradients) <= tolerance(torch.float16, ROWS)


def test_torchs_own_scaler_loses_what_we_keep() -> None:
    step, twin, batch = twins("divided early", "fp16-mixed", 1)
    theirs = make()
    theirs.model.power = step.model.power
    start = weights(theirs)
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST)
    for x, y in parts(batch, ONCE):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(theirs.model(x), y) / len(ONCE)
        scaler.scale(loss).backward()
    scaler.step(theirs.optimizers[0])
    assert relative_error(weights(theirs), start) == 0
    take(step, batch)
    assert relative_error(moved(step, start), moved(twin, start)) <= BOUND


def test_a_dynamic_scale_stays_where_it_has_come_to() -> None:
    step, _, batch = twins("divided early", "fp16-mixed", 3)
    assert take(step, batch).redone == 3
    step.model.ran.clear()
    report = take(step, batch)
    assert (report.redone, report.scale, step.model.ran) == (0, FIRST / 8, ONCE)


def test_a_fixed_scale_is_itself_again_in_the_next_micro_batch() -> None:
    step, _, _ = twins("divided early", MIXED, 2)
    scales: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, MicroBatchDone):
            scales.append(step.scale.value)

    vars(step).update(listeners=(note,))
    for redone in (2, 2):
        assert take(step, make_batch()).redone == redone
    assert scales == 2 * [FIRST, FIRST, FIRST / 4, *[FIRST] * 5]


@pytest.mark.parametrize("index", [0, 7])
def test_any_micro_batch_may_overflow(index: int) -> None:
    batch = make_batch(range(SIZE * index, SIZE * index + SIZE))
    twin, step = make(precision="fp16-true"), make(precision="fp16-true")
    take(twin, batch)
    plant(step, twin.model.largest, 2)
    start = weights(step)
    assert take(step, batch).redone == 2
    assert step.model.ran == ran(2, index)
    assert relative_error(moved(step, start), moved(twin, start)) <= BOUND


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_uncut_batch_comes_again_whole(precision: str) -> None:
    options = {"precision": PRECISIONS[precision], "micro_batch": None}
    twin, step, batch = make(**options), make(**options), make_batch()
    take(twin, batch)
    plant(step, twin.model.largest, 2)
    start = weights(step)
    report = take(step, batch)
    assert (report.redone, step.model.ran) == (2, [ROWS] * 3)
    assert relative_error(moved(step, start), moved(twin, start)) <= BOUND


def test_a_redone_micro_batch_is_told() -> None:
    step, _, batch = twins("divided early", "fp16-mixed", 2)
    told: list[Event] = []
    vars(step).update(listeners=(told.append,))
    take(step, batch)
    redone = [event for event in told if isinstance(event, MicroBatchRedone)]
    assert [(event.index, event.rows) for event in redone] == [(2, SIZE)] * 2
    assert [event.reason for event in redone] == [
        f"the gradient overflowed at a loss scale of {scale}" for scale in (1024, 512)
    ]


class Late(nn.Module):
    """Begins to draw in its third forward, without a module that would tell."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.net(x)
        return outputs if x[:, -1].any().logical_not() else outputs * (1 + torch.rand(1) / 4)


def test_a_micro_batch_that_draws_unannounced_draws_the_same_again() -> None:
    made: list[Step] = []
    for _ in range(2):
        inner = make()
        model = Late(inner.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"precision": "fp16-mixed", "micro_batch": SIZE, "check": False}
        made.append(Step(model, nn.CrossEntropyLoss(), optimizer, **options))
        made[-1].scale.load({"value": FIRST, "clean": 0})
    twin, step = made
    batch = make_batch()
    take(twin, batch)
    step.model.net.power = math.floor(math.log2(65504 / twin.model.net.largest)) + 2
    start = weights(step)
    report = take(step, batch)
    assert relative_error(moved(step, start), moved(twin, start)) <= BOUND
    assert changes({"r": snapshot(twin)["random state"]}, {"r": snapshot(step)["random state"]}) == []
    assert report.scale == FIRST / 4


# ---- together with memory that runs out


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("windowed", [False, True], ids=["whole", "window"])
@pytest.mark.parametrize("name", ["divided early", "several terms", "compensated"])
def test_memory_runs_out_too(name: str, windowed: bool, precision: str) -> None:
    step, twin, batch = twins(name, PRECISIONS[precision], 2, windowed=windowed)
    power = step.model.power
    with scarce_in_passes() as counted:
        take(step, batch, windowed=windowed)
    for place in range(counted.count // 8, counted.count, counted.count // 4):
        step = make(name, precision=PRECISIONS[precision])
        step.model.power = power
        start = weights(step)
        with scarce_in_passes({place}) as memory:
            report = take(step, batch, windowed=windowed)
        assert memory.refused == 1
        assert report.redone >= 2
        assert relative_error(moved(step, start), moved(twin, start)) <= BOUND


# ---- sums that overflow though nothing in them does


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.slope


@pytest.mark.parametrize("windowed", [False, True], ids=["whole", "window"])
@pytest.mark.parametrize("policy", ["raise", "drop", "skip"])
def test_a_sum_that_overflows_makes_no_update(policy: str, windowed: bool) -> None:
    """Four gradients of 1e38, each of which float32 can hold."""
    model = Slope()
    step = Step(
        model,
        nn.SoftMarginLoss(reduction="sum"),
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        micro_batch=1,
        non_finite=policy,
    )
    torch.manual_seed(3)
    before = snapshot(step)
    batch = torch.full((4, 1), 2e38), -torch.ones(4, 1)
    if policy == "skip":
        assert not take(step, batch, windowed=windowed, size=1).updated
    else:
        with pytest.raises(NonFiniteLossError):
            take(step, batch, windowed=windowed, size=1)
    assert changes(before, snapshot(step)) == []


def test_where_an_accumulator_is_short_a_sum_may_overflow_too() -> None:
    model = Slope()
    step = Step(
        model,
        nn.SoftMarginLoss(reduction="sum"),
        torch.optim.SGD(model.parameters(), lr=1e-3),
        micro_batch=1,
        precision=Precision(compute="float16", accumulate="float16", loss_scale=1.0),
    )
    before = snapshot(step)
    with pytest.raises(NonFiniteLossError):
        step((torch.full((4, 1), 60000.0), -torch.ones(4, 1)))
    assert changes(before, snapshot(step)) == []


@pytest.mark.parametrize("windowed", [False, True], ids=["whole", "window"])
def test_a_scale_that_gave_way_is_put_back_with_all_else(windowed: bool) -> None:
    """The step fails after the overflow, the window is thrown away: nothing has happened."""
    step, _, batch = twins("divided early", "fp16-mixed", 3, windowed=windowed)
    torch.manual_seed(3)
    before, scale = snapshot(step), step.scale.state()
    if windowed:
        window = step.window()
        for micro in parts(batch, ONCE[:4]):
            window.add(micro)
        assert step.scale.value == FIRST / 2**3
        window.discard()
    else:

        def fail(event: Event) -> None:
            if isinstance(event, MicroBatchDone) and event.index == 3:
                assert step.scale.value == FIRST / 2**3
                raise RuntimeError("listener")

        vars(step).update(listeners=(fail,))
        with pytest.raises(RuntimeError, match="listener"):
            step(batch)
    assert step.scale.state() == scale
    assert changes(before, snapshot(step)) == []


def test_sums_in_float16_hold_gradients_that_their_scale_would_drive_out() -> None:
    """What arrives is 2^16 times as large, and fits only without its scale."""
    precision = Precision(compute="bfloat16", accumulate="float16", loss_scale=2.0**16)
    for options in ({}, {"compensated": True}):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        step = Step(model, nn.MSELoss(), optimizer, precision=precision, **options)
        assert step((torch.ones(4, 1), 10 * torch.ones(4, 1))).redone == 0


def test_a_scale_of_one_sends_no_more_than_a_scale_of_two() -> None:
    """Where rows may be left out the sum is divided last, and what is sent is larger by its weight."""
    found: list[tuple[bool, int]] = []
    for policy in ("raise", "drop"):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        precision = Precision(store="float16")
        step = Step(model, nn.MSELoss(), optimizer, precision=precision, micro_batch=2048, non_finite=policy)
        report = step((torch.ones(4096, 4), 30 * torch.ones(4096, 1)))
        found.append((report.updated, report.dropped))
    assert found == [(True, 0)] * 2


@pytest.mark.parametrize("options", [{"precision": "fp16-mixed"}, {"non_finite": "skip"}], ids=str)
def test_a_term_that_counts_in_whole_numbers_is_no_gradient(options: dict[str, Any]) -> None:
    def counted(model: nn.Module, micro: Any) -> dict[str, Total]:
        outputs = model(micro[0]).float()
        right = (outputs.argmax(1) == micro[1]).sum()
        losses = F.cross_entropy(outputs, micro[1], reduction="none")
        return {"loss": Total(losses.sum(), len(losses)), "right": Total(right, len(losses))}

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    loss = Terms(counted, coefficients={"right": 0.0})
    step = Step(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2, check=False, **options
    )
    assert step((torch.randn(8, 3), torch.randint(2, (8,)))).updated
