"""A gradient overflows float16: only its micro-batch comes again; first passes of whole-batch losses."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Options, Precision, Step, WholeBatch
from anybatch.core.errors import LossError, NonFiniteLossError
from anybatch.core.report import MicroBatchDone
from anybatch.testing import GradientRecorder, relative_error, tolerance
from tests.faults import faulty
from tests.faults.faulty import BEGIN, ROWS, SIZE, VARIANTS, build, make_batch, parts, seed, take, windowed
from tests.losses.whole_losses import encoder, labelled, sup_con
from tests.snapshots import changes, same_as_before, snapshot
from tests.zoo import Made

FIRST = 2.0**10  # a gradient that is not divided yet overflows at the 2^16 where scales begin
PRECISIONS: dict[str, Any] = {
    "mixed": "fp16-mixed",
    "true": "fp16-true",
    "mixed, fixed": Precision(compute="float16", loss_scale=FIRST),
    "true, fixed": Precision(store="float16", loss_scale=FIRST),
}
NAMES = ("divided early", "divided late", "several terms", "float64 sums", "clipped", "sum")
KINDS: dict[str, dict[str, Any]] = {
    **{name: {"kind": "plain"} | VARIANTS[name] for name in NAMES},
    "dropout": {"kind": "dropout"},
    "counting": {"kind": "counting"},
    "BatchNorm": {"kind": "BatchNorm", "batch_norm": "micro"},
    "uncut": {"kind": "dropout", "micro_batch": None},
}
BOUND = tolerance(torch.float16, ROWS // SIZE)


def make(name: str, precision: Any) -> Step:
    step = build(precision=precision, lr=0.1, **KINDS[name])
    if step.scale.is_dynamic:
        step.scale.load({"value": FIRST, "clean": 0})
    return step


def twins(name: str, precision: Any, halvings: int, way: str, index: int = 2) -> tuple[Step, Step, Any]:
    """A step in which this micro-batch will overflow, and one that has gone without."""
    batch = make_batch(marked=range(SIZE * index, SIZE * index + SIZE))
    twin, step = make(name, precision), make(name, precision)
    assert take(twin, way, batch).redone == 0
    faulty.plant(step, twin.model.fault.largest, halvings)
    return step, twin, batch


CASES = [(name, precision, 1, 2) for name in KINDS for precision in ("mixed", "true")]
CASES += [(name, precision, 4, 0) for name in ("dropout", "several terms") for precision in PRECISIONS]


@pytest.mark.parametrize("way", ["step", "window"])
@pytest.mark.parametrize(("name", "precision", "halvings", "index"), CASES)
def test_an_overflow_costs_no_update(name: str, precision: str, way: str, halvings: int, index: int) -> None:
    step, twin, batch = twins(name, PRECISIONS[precision], halvings, way, index)
    start = faulty.weights(step)
    report = take(step, way, batch)
    assert relative_error(faulty.moved(step, start), faulty.moved(twin, start)) <= BOUND
    differ = changes(snapshot(twin), snapshot(step))  # buffers, attributes and random state do not
    assert all(one.startswith(("parameter", "float32 copy", "optimizer", "scale")) for one in differ)
    assert (report.updated, report.redone, report.dropped) == (True, halvings, 0)
    sizes = [ROWS] if name == "uncut" and way == "step" else [SIZE] * 4
    again = 0 if name == "uncut" and way == "step" else index
    assert report.cut == tuple(sizes)
    assert step.model.fault.ran == sizes[:again] + [sizes[again]] * halvings + sizes[again:]
    is_fixed = "fixed" in precision
    assert is_fixed or report.scale == step.scale.value == FIRST / 2**halvings
    if not is_fixed:  # it stays where it has come to
        assert take(step, way, batch).redone == 0
    elif halvings > 1:  # it was itself again
        assert take(step, way, batch).redone > 0


@pytest.mark.parametrize("way", ["step", "window"])
def test_a_scale_that_gave_way_is_put_back_with_all_else(way: str) -> None:
    step, _, batch = twins("dropout", "fp16-mixed", 3, way)
    seed(BEGIN)
    with same_as_before(step):
        if way == "window":
            window = step.window()
            for micro in parts(batch)[:3]:
                window.add(micro)
            assert step.scale.value == FIRST / 2**3
            window.discard()
        else:
            step.model.fault.arm(MicroBatchDone.__name__, 2, RuntimeError("callback"))
            with pytest.raises(RuntimeError, match="callback"):
                step(batch)
            assert len(step.model.fault.ran) == 3 + 3


@pytest.mark.parametrize("way", ["step", "window"])
@pytest.mark.parametrize("policy", ["raise", "drop", "skip"])
def test_a_sum_that_overflows_makes_no_update(policy: str, way: str) -> None:
    """Four gradients that float32 can hold."""
    model, options = nn.Linear(1, 1, bias=False), Options(non_finite=policy)
    nn.init.zeros_(model.weight)
    sgd, loss = torch.optim.SGD(model.parameters(), lr=1e-6), nn.SoftMarginLoss(reduction="sum")
    step = Step(model, loss, sgd, micro_batch=1, options=options)
    batch = torch.full((4, 1), 2e38), -torch.ones(4, 1)
    with same_as_before(step), nullcontext() if policy == "skip" else pytest.raises(NonFiniteLossError):
        assert not (windowed(step, batch, 1) if way == "window" else step(batch)).updated


def tiny(outputs: Tensor, target: Tensor) -> Tensor:
    """Its gradient is less than float16 can hold."""
    return 1e-9 * ((outputs - target).float() * torch.arange(1.0, 5.0)).sum()


@pytest.mark.parametrize("micro_batch", [None, 4])
def test_a_first_pass_keeps_gradients_that_float16_would_lose(micro_batch: int | None) -> None:
    model, found = nn.Linear(3, 4), []
    for precision in ("float32", "fp16-mixed"):
        recorder = GradientRecorder(model)
        step = Step(model, WholeBatch(tiny), recorder, micro_batch=micro_batch, precision=precision)
        step((torch.ones(8, 3), torch.ones(8, 4)))
        found.append(recorder.gradients)
    assert relative_error(found[1], found[0]) <= tolerance(torch.float16, 8)


def test_a_second_pass_that_differs_is_refused() -> None:
    """It draws from a generator that nobody can put back."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(encoder(), Made(lambda _, x: x * torch.rand(x.shape, generator=draw)))
    step = Step(model, WholeBatch(sup_con), torch.optim.SGD(model.parameters(), lr=1.0), micro_batch=4)
    batch = labelled(23)
    with pytest.raises(LossError, match="repeat the first"), same_as_before(step):
        step(batch)
