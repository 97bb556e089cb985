"""The five laws on cases drawn by hypothesis: a few in every test run, hundreds in a campaign (`make soak`).

A law is a strategy and a check. `run` tries as many examples as asked; the same seed gives the same cases.
"""

import gc
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import torch
from hypothesis import strategies as st
from torch import nn

from anybatch.core import TensorBatch
from anybatch.core.errors import LossError, NonFiniteLossError, OutOfMemoryError
from anybatch.memory import Meter, find_device
from anybatch.planner.trace import trace
from anybatch.testing import relative_error, tolerance
from tests import budgets
from tests.faults import faulty
from tests.faults.faulty import NO_MEMORY, VARIANTS, scarce_in_passes, take, weights
from tests.laws.cases import Case
from tests.laws.check import check, collated, cut, reference, windowed
from tests.laws.draw import MASKS
from tests.laws.losses import CASES
from tests.laws.test_uncut import test_uncut_is_torch_to_the_bit as uncut_is_torch_to_the_bit
from tests.laws.totals import TOTALS
from tests.snapshots import DRAWN, assert_same, changes, snapshot
from tests.train.runs import EPOCHS, KINDS, UPDATES, make_trainer, state, undisturbed

MOST_ROWS = 6


class Law(NamedTuple):
    """What holds for every case: how cases are drawn, what fails where not, and how many are tried."""

    cases: dict[str, st.SearchStrategy[Any]]
    check: Callable[..., None]
    few: int
    share: int


def run(law: Law, *, seed: int, examples: int, is_shrunk: bool = True) -> None:
    """Try the law on so many cases; one that breaks it is made smaller."""
    phases = [hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if is_shrunk else [])]
    tried = hypothesis.given(**law.cases)(law.check)
    quiet: dict[str, Any] = {"database": None, "deadline": None, "print_blob": False}
    tried = hypothesis.settings(max_examples=examples, phases=phases, **quiet)(tried)
    gc.freeze()  # where memory runs out a step collects garbage: what is there now need not be walked again
    try:
        hypothesis.seed(seed)(tried)()
    finally:
        gc.unfreeze()


SIZES = st.lists(st.integers(1, MOST_ROWS), min_size=1, max_size=MOST_ROWS).filter(
    lambda sizes: sum(sizes) <= MOST_ROWS
)


def any_cut_is_the_whole(case: Case, form: int, sizes: list[int], mask: str, number: int) -> None:
    rows = sum(sizes)
    problem = case.problem(list(case.forms)[form % len(case.forms)], rows, seed=number, mask=mask)
    whole = reference(problem)
    weights: list[Any] = []
    for micro_batch in (None, *range(1, rows + 1)):
        taken = cut(problem, micro_batch)
        check(taken, whole)
        weights.append(taken[0].weights)
        assert relative_error(weights[-1], weights[0]) <= tolerance(torch.float64, rows)
    check(windowed(problem, sizes), whole)
    check(collated(problem, sizes[0]), whole)


CUT = {
    "form": st.integers(0, 2),
    "sizes": SIZES,
    "mask": st.sampled_from(MASKS),
    "number": st.integers(0, 2**16),
}


class Planted(NamedTuple):
    """A fault, and how often its place is passed before."""

    place: str
    at: int
    what: Any


def planted(places: list[str], most: int, *faults: Any) -> st.SearchStrategy[Planted]:
    return st.builds(Planted, st.sampled_from(places), st.integers(0, most), st.sampled_from(faults))


NO = ValueError("no")
PLANTED = st.one_of(
    planted(["forward", "mid", "end"], 12, NO_MEMORY, NO_MEMORY, NO_MEMORY, NO, KeyboardInterrupt()),
    planted(["mid", "end"], 12, math.inf),
    planted(["MicroBatchDone"], 6, NO),
    planted(["row"], faulty.ROWS - 1, math.nan),
    *[planted(["allocation"], 400, NO_MEMORY)] * 2,
)
PRECISIONS = ["float32", "float32", "bf16-mixed", "bf16-true", "fp16-mixed", "fp16-true"]
FAULTED = {
    "kind": st.sampled_from(["plain", "dropout", "counting", "drawing", "tied", "frozen BatchNorm"]),
    "variant": st.sampled_from([*VARIANTS]),
    "precision": st.sampled_from(PRECISIONS),
    "way": st.sampled_from(["step", "step", "window"]),
    "micro_batch": st.sampled_from([None, 3, 4, 5, 8]),
    "non_finite": st.sampled_from(["raise", "raise", "drop", "skip"]),
    "warm": st.sampled_from([0, 1, 4]),
    "faults": st.lists(PLANTED, min_size=1, max_size=3),
}


def a_fault_changes_no_update(
    kind: str, variant: str, precision: str, way: str, warm: int, faults: list[Planted], **options: Any
) -> None:
    """It comes to what the same cut comes to without the fault, or raises or skips and changes nothing."""
    way = "step" if variant == "whole batch" else way  # no window takes it
    options |= VARIANTS[variant] | {"precision": precision}
    if kind == "frozen BatchNorm":
        options["batch_norm"] = "frozen"
    step, twin = (faulty.build(kind, warm=warm, momentum=0.5, lr=2.0**-6, **options) for _ in range(2))
    fault, batch = step.model.fault, faulty.make_batch()
    fault.planted = [(*one, 1) for one in faults]
    for one in (one for one in faults if one.place == "row"):
        batch[0][one.at, 0] = one.what
    before = snapshot(step)
    try:
        with scarce_in_passes({one.at for one in faults if one.place == "allocation"}) as memory:
            report = take(step, way, batch)
    except BaseException as error:
        met = [*fault.met, *([NO_MEMORY] if memory.refused else [])]
        if not isinstance(error, NonFiniteLossError | OutOfMemoryError | LossError) and error not in met:
            raise
        assert_same(before, snapshot(step))
    else:
        assert not any(isinstance(one, ValueError | KeyboardInterrupt) for one in fault.met)
        if not report.updated:
            assert not set(changes(before, snapshot(step))) - DRAWN - {"scale"}
        elif report.dropped:
            assert sum(report.cut) == report.rows == faulty.ROWS
            assert all(one.isfinite().all() for one in weights(step).values())
        else:
            is_exact = not precision.startswith("fp16") and not (way == "window" and report.redone)
            dtype = {"fl": torch.float32, "bf": torch.bfloat16, "fp": torch.float16}[precision[:2]]
            bound = 0.0 if is_exact else tolerance(dtype, faulty.ROWS)
            faulty.assert_as_unfaulted(step, report, twin, batch, way=way, bound=bound)
    assert step.open_window is None
    fault.planted, step.micro_batch = [], faulty.SIZE
    assert take(step, "step", faulty.make_batch(11)).rows == faulty.ROWS  # and it goes on


def a_training_stopped_is_not_interrupted(stops: list[int], kind: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stop in (*stops, 0):
            left = [stop]

            def listen(event: Any, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt

            trainer = make_trainer(folder, kind, listen=listen, save_every=1)
            if [*folder.glob("step-*")]:
                trainer.resume(folder)
            elif any(folder.iterdir()):
                trainer = make_trainer(None, kind, listen=listen)
            try:
                trainer.fit(epochs=EPOCHS)
            except KeyboardInterrupt:
                continue
            break
    assert trainer.updates == EPOCHS * UPDATES
    assert_same(undisturbed(kind).state, state(trainer))


def the_planned_peak_is_the_measured_one(
    model: str, optimizer: str, rows: int, micro_batch: int, options: dict[str, Any]
) -> None:
    build, batch = MODELS[model]
    make = getattr(budgets, optimizer)
    step = budgets.make(build, make, micro_batch=micro_batch, batch_norm="micro", **options)
    given = batch(rows)
    logical = TensorBatch(given)
    planned = trace(step.plan(rows), step.task(), logical.only(range(1)), device=find_device(given[0].device))
    step(given)
    of = {"loss_module": step.loss_module, "batch_leaves": logical.leaves}
    with Meter(step.model, step.optimizers, **of) as meter:
        step(given)
    assert planned.peak == planned.ledger.peak == meter.peak


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "blocks": (budgets.net, budgets.rows_of),
    "sequences": (budgets.net, lambda rows: budgets.rows_of(rows, 5, budgets.WIDTH)),
    "dropout": (lambda: budgets.net(0.5), budgets.rows_of),
    "images": (budgets.conv_net, budgets.images),
}
CHOICES = [{}, {"clip_norm": 1.0}, {"accumulate": torch.float64}]
PEAKS = {
    "model": st.sampled_from([*MODELS]),
    "optimizer": st.sampled_from(["sgd", "adamw", "foreach"]),
    "rows": st.integers(1, 24),
    "micro_batch": st.integers(1, 24),
    "options": st.sampled_from(CHOICES),
}


ANY = {"case": st.sampled_from([*CASES, *TOTALS])}
STOPS = {"stops": st.lists(st.integers(1, 20), min_size=1, max_size=3), "kind": st.sampled_from([*KINDS])}
LAWS = {
    "any cut is the whole": Law(ANY | CUT, any_cut_is_the_whole, few=30, share=4),
    "uncut is torch": Law({"case": st.sampled_from(CASES)}, uncut_is_torch_to_the_bit, few=5, share=1),
    "a fault changes no update": Law(FAULTED, a_fault_changes_no_update, few=120, share=12),
    "a training stopped and resumed": Law(STOPS, a_training_stopped_is_not_interrupted, few=4, share=1),
    "the planned peak": Law(PEAKS, the_planned_peak_is_the_measured_one, few=10, share=3),
}
