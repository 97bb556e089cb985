"""The sections of the device benchmark: each yields figures, ratios within the run or bytes."""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.cli.selftest import selftest
from anybatch.core import OutOfMemoryError, accelerator, tree
from anybatch.testing import relative_error
from benchmarks.gpu.models import FAMILIES, Case, sized

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure; it holds if it is at most its limit, or if it has none."""

    table: str
    row: str
    what: str
    value: float | str
    limit: float | None = None

    @property
    def holds(self) -> bool:
        """True unless a limit is exceeded."""
        return self.limit is None or (isinstance(self.value, float | int) and self.value <= self.limit)


Figures = Iterator[Figure]


class NeedsPackage(Exception):  # noqa: N818
    """A section, or a part of it, needs a package that is not installed."""


class Bench:
    """A device and a scale: "card", or "rehearse" for sizes a hundred times smaller."""

    def __init__(self, device: str, scale: str) -> None:
        if device == "sim":
            from tests.accelerator.simulated import load

            load()
        self.device, self.scale = torch.device(device), scale
        self.is_full = scale == "card"
        self.cases = sized(scale)
        self.module = accelerator.module_of(self.device)
        self.is_card = self.device.type != "cpu"

    def case(self, name: str) -> Case:
        """Return a case; raise NeedsPackage if its package is missing."""
        case = {**FAMILIES, **self.cases}[name]
        if case.needs:
            try:
                __import__(case.needs)
            except ImportError:
                raise NeedsPackage(case.needs) from None
        return case

    def wait(self) -> None:
        """Wait for the device."""
        if self.is_card:
            torch.accelerator.synchronize()

    def seconds(self, run: Callable[..., object], *arguments: Any, times: int = 1) -> float:
        """Return the least seconds of one of several runs, each of which the device has finished."""
        found: list[float] = []
        for _ in range(times):
            self.wait()
            began = time.perf_counter()
            run(*arguments)
            self.wait()
            found.append(time.perf_counter() - began)
        return min(found)

    def peaks(self, run: Callable[..., object], *arguments: Any) -> tuple[int, int]:
        """Return the most bytes allocated and reserved during a run; 0 where the device does not count.

        Readings within a step begin new peaks, so what was there before each is kept.
        """
        self.wait()
        forget, found = accelerator.forget_peak, [0, 0]
        reserved = getattr(self.module, "max_memory_reserved", lambda _: 0)

        def note(device: torch.device) -> int | None:
            found[:] = map(max, found, (accelerator.peak_bytes(self.device) or 0, reserved(self.device)))
            return forget(device)

        forget(self.device)
        accelerator.forget_peak = note
        try:
            run(*arguments)
            self.wait()
            note(self.device)
        finally:
            accelerator.forget_peak = forget
        return found[0], found[1]

    def free(self) -> None:
        """Free what earlier figures held."""
        gc.collect()
        accelerator.free_cache()

    def trained(self, case: Case, **options: Any) -> tuple[ab.Step, nn.Module]:
        """Return a step with AdamW on a new model."""
        model, loss = case.on(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        extra = {} if options.get("options") else {"options": ab.Options(check=False)}
        return ab.Step(model, loss, optimizer, **extra, **options), model


@contextmanager
def exact_kernels() -> Iterator[None]:
    """Use deterministic kernels where there are some, without TF32."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("highest")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, deterministic=True):
        yield
    torch.use_deterministic_algorithms(False)


# ---- selftest and tests


def selftest_section(bench: Bench) -> Figures:
    """The self-test of the command line, then the tests that run on a device."""
    told, _ = selftest(argparse.Namespace(device=str(bench.device), version=ab.__version__))
    for name, result, words in told["rows"]:
        yield Figure(table="selftest", row=name, what="result", value=f"{result}: {words}")
    failed = sum(result == "FAILED" for _, result, _ in told["rows"])
    yield Figure(table="selftest", row="rows that failed", what="count", value=failed, limit=0)
    tests = ["@tests/on_device.txt"] if bench.is_full else ["tests/core/test_finite.py"]
    workers = ["-n", str(min(10, os.cpu_count() or 1))] if bench.is_full and has("xdist") else []
    off = [f"-pno:{name}" for name in ("cacheprovider", "benchmark")]
    command = [sys.executable, "-m", "pytest", *off, "-q", "-m", "not slow", *workers, *tests, "--tb=line"]
    done = subprocess.run(
        [*command, "--device", bench.device.type], capture_output=True, text=True, check=False
    )
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|errors?)", done.stdout)}
    if not counts:
        raise NeedsPackage(f"pytest, hypothesis: {(done.stdout + done.stderr).strip()[-200:]}")
    wrong = sum(number for kind, number in counts.items() if kind != "passed")
    for line in re.findall(r"^FAILED (.*)$", done.stdout, re.MULTILINE)[:20]:
        yield Figure(table="device tests", row=line[:100], what="result", value="FAILED")
    yield Figure(table="device tests", row="passed", what="count", value=counts.get("passed", 0))
    yield Figure(table="device tests", row="failed", what="count", value=wrong, limit=0)


def has(name: str) -> bool:
    """Return True if a module can be imported."""
    try:
        __import__(name)
    except ImportError:
        return False
    return True


# ---- the same result


def gradients(bench: Bench, case: Case, dtype: torch.dtype, size: int | None, **options: Any) -> Any:
    """Return the gradients of a batch in micro-batches of a size; None for those of plain torch."""
    model, loss = case.on(bench.device, dtype)
    batch = case.rows_on(bench.device, dtype=dtype)
    torch.manual_seed(0)
    if size is None:
        case.whole(model, batch).backward()
    else:
        ab.BatchLoss(model, loss, micro_batch=size, options=ab.Options(check=False, **options))(
            batch
        ).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def exact(bench: Bench) -> Figures:
    """Twelve families: any cut is the whole batch, uncut is torch to the bit."""
    for name, (dtype, limit) in [
        (name, one) for name in FAMILIES for one in ((torch.float64, 1e-12), (torch.float32, 1e-4))
    ]:
        short = str(dtype).removeprefix("torch.")
        try:
            case = bench.case(name)
            if dtype == torch.float64:
                torch.ones((), dtype=dtype, device=bench.device)
        except NeedsPackage as error:
            yield Figure(table="exact", row=name, what=short, value=f"not run: needs {error}")
            continue
        except (TypeError, RuntimeError):
            continue  # no float64 on this device
        with exact_kernels():
            whole = gradients(bench, case, dtype, None)
            uncut = gradients(bench, case, dtype, case.rows)
            is_same = whole.keys() == uncut.keys() and all(torch.equal(uncut[k], whole[k]) for k in whole)
            if case.dropout:  # other cuts draw other masks, recomputed or not
                again = gradients(bench, case, dtype, 5, recompute=["[0-4]"])
                plain = gradients(bench, case, dtype, 5)
                error = 0.0 if all(torch.equal(again[k], plain[k]) for k in plain) else 1.0
            else:
                cuts = [gradients(bench, case, dtype, size) for size in (1, 5, 8)]
                error = max(relative_error(one, whole) for one in cuts)
        if case.loss_in_float32:
            limit = max(limit, 1e-6)
        yield Figure(table="exact", row=name, what=f"{short}, error of cuts", value=error, limit=limit)
        yield Figure(
            table="exact", row=name, what=f"{short}, uncut: other bits", value=int(not is_same), limit=0
        )


def precision(bench: Bench) -> Figures:
    """Weights after 20 updates in 16 bits: cut in five and whole, both against float32."""
    name = "convolutions, GroupNorm"
    case, updates = bench.case(name), 20 if bench.is_full else 4
    batches = [case.rows_on(bench.device, rows) for rows in range(20, 20 + updates)]

    def run(**options: Any) -> tuple[dict[str, Tensor], int]:
        model, loss = case.on(bench.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = ab.Step(model, loss, optimizer, options=ab.Options(check=False), **options)
        redone = sum(step(batch).redone for batch in batches)
        return {key: one.detach().clone() for key, one in model.named_parameters()}, redone

    full, _ = run()
    begun = dict(case.on(bench.device)[0].named_parameters())
    moved = {key: full[key] - begun[key].detach() for key in full}
    overflowing = ab.Precision(compute="float16", loss_scale=2.0**22)
    for label, chosen in {
        "float32": "float32", "tf32": "tf32", "bf16-mixed": "bf16-mixed", "fp16-mixed": "fp16-mixed",
        "fp16-mixed, overflow": overflowing,
    }.items():  # fmt: skip
        found: list[dict[str, Tensor]] = []
        redone = 0
        for size in (None, 5):
            weights, again = run(precision=chosen, micro_batch=size)
            found.append({key: weights[key] - begun[key].detach() for key in full})
            redone += again
        whole, cut = (relative_error(one, moved) for one in found)
        yield Figure(table="precision", row=label, what="whole, from float32", value=whole)
        limit = max(1e-5, 1.5 * whole)
        yield Figure(table="precision", row=label, what="cut, from float32", value=cut, limit=limit)
        yield Figure(table="precision", row=label, what="micro-batches redone", value=redone)


# ---- bytes

BUDGETED = {"GPT-2": 16, "ResNet-50, GroupNorm": 48, "ViT-B": 48, "BERT-large": 16, "LSTM": 128}
SHARES = (0.7, 0.45, 0.3, 0.2)


def hand_cuts(bench: Bench, case: Case, batch: Any, rows: int) -> list[tuple[int, int, int, float, float]]:
    """Return rows, bytes allocated and reserved, seconds a row and of the first step, of cuts by hand."""
    found: list[tuple[int, int, int, float, float]] = []
    for size in (rows, rows // 2, rows // 4, rows // 8):
        bench.free()
        step, _ = bench.trained(case, micro_batch=size)
        cold = bench.seconds(step, batch)  # makes the optimizer's state
        allocated, reserved = bench.peaks(step, batch)
        found.append((size, allocated, reserved, bench.seconds(step, batch) / rows, cold))
        step = None
    return found


def budgets(bench: Bench) -> Figures:
    """Steps within shares of the plain peak: bytes, what was undone, the first step, and settled speed."""
    for name, full_rows in BUDGETED.items():
        rows = full_rows if bench.is_full else 16
        try:
            case = bench.case(name)
        except NeedsPackage as error:
            yield Figure(table="budgets", row=name, what="budget", value=f"not run: needs {error}")
            continue
        batch = case.rows_on(bench.device, rows)
        cuts = hand_cuts(bench, case, batch, rows)
        plain, plain_seconds = cuts[0][1], cuts[0][3] * rows
        yield Figure(table="budgets, plain", row=name, what="peak allocated, GiB", value=plain / GIB)
        slack = max(reserved / max(1, allocated) for _, allocated, reserved, _, _ in cuts)
        yield Figure(table="budgets, plain", row=name, what="reserved over allocated", value=slack)
        cold = max(one[4] for one in cuts[1:]) / plain_seconds
        yield Figure(
            table="budgets, plain", row=name, what="first step of a new cut, in plain steps", value=cold
        )
        if not plain:
            yield Figure(table="budgets, plain", row=name, what="budgets", value="no bytes counted")
            continue
        for share in SHARES:
            yield from budget(
                bench, case, batch, f"{name} at {share:.0%}", int(share * plain), cuts, plain_seconds
            )
    yield from uncut_batch_norm(bench)
    yield from lengths(bench)


def budget(
    bench: Bench, case: Case, batch: Any, row: str, num_bytes: int, cuts: Any, plain_seconds: float
) -> Figures:
    """Ten steps within a budget."""
    bench.free()
    step, _ = bench.trained(case, memory=num_bytes)
    reports: list[ab.StepReport] = []
    shown = {0: 1, 1: 2, 2: 3, 9: 10}
    worst = [0.0, 0.0]
    for index in range(10):
        began = time.perf_counter()
        try:
            peaks = bench.peaks(lambda: reports.append(step(batch)))
        except ab.BudgetError as error:
            yield Figure(table="budgets", row=row, what="refused, smallest GiB", value=error.smallest / GIB)
            if error.smallest > num_bytes:
                yield from smallest(bench, case, batch, row, error.smallest)
            return
        except OutOfMemoryError as error:
            yield Figure(table="budgets", row=row, what="out of memory", value=str(error)[:160], limit=0)
            return
        if index == 0:
            first = time.perf_counter() - began
        used = [one / num_bytes for one in peaks]
        if index:
            worst = [*map(max, worst, used)]
        elif bench.is_card:
            yield Figure(table="budgets", row=row, what="step 1: allocated", value=used[0])
        if index in shown and bench.scale == "card":
            yield Figure(
                table="budgets, steps", row=row, what=f"step {shown[index]}, allocated", value=used[0]
            )
            yield Figure(
                table="budgets, steps", row=row, what=f"step {shown[index]}, reserved", value=used[1]
            )
    last = reports[-1]
    undone = sum(one.redone for one in reports)
    settled = bench.seconds(step, batch, times=3) / last.rows
    fitting = [seconds for _, allocated, _, seconds, _ in cuts if allocated <= num_bytes]
    yield Figure(table="budgets", row=row, what="rows", value=max(last.cut))
    yield Figure(table="budgets", row=row, what="steps 2 to 10: allocated", value=worst[0], limit=1.0)
    yield Figure(table="budgets", row=row, what="reserved", value=worst[1], limit=1.0)
    yield Figure(table="budgets", row=row, what="undone", value=undone, limit=0)
    yield Figure(table="budgets", row=row, what="first, in plain steps", value=first / plain_seconds)
    if fitting:
        over = settled / min(fitting)
        yield Figure(table="budgets", row=row, what="settled over best by hand", value=over, limit=1.1)


def smallest(bench: Bench, case: Case, batch: Any, row: str, num_bytes: int) -> Figures:
    """Four steps within the smallest budget that a refusal has named."""
    bench.free()
    step, _ = bench.trained(case, memory=num_bytes)
    try:
        used = [bench.peaks(step, batch)[0] / num_bytes for _ in range(4)]
        yield Figure(
            table="budgets", row=row, what="smallest, given: allocated", value=max(used[1:]), limit=1.0
        )
    except ab.AnybatchError as error:
        yield Figure(table="budgets", row=row, what="smallest, given", value=str(error)[:120], limit=0)


def uncut_batch_norm(bench: Bench) -> Figures:
    """A batch whose rows meet is not cut: what a budget does with it."""
    rows = 64 if bench.is_full else 8
    case = bench.case("ResNet-50, BatchNorm")
    batch = case.rows_on(bench.device, rows)
    bench.free()
    step, _ = bench.trained(case)
    step(batch)
    plain = bench.peaks(step, batch)[0]
    step = None
    for share in SHARES if plain else ():
        row, num_bytes = f"ResNet-50, BatchNorm at {share:.0%}", int(share * plain)
        bench.free()
        step, _ = bench.trained(case, memory=num_bytes)
        try:
            used = [bench.peaks(step, batch)[0] / num_bytes for _ in range(3)]
        except ab.AnybatchError as error:
            yield Figure(table="BatchNorm uncut", row=row, what="result", value=str(error)[:110])
            continue
        yield Figure(table="BatchNorm uncut", row=row, what="allocated", value=max(used[1:]), limit=1.0)


def lengths(bench: Bench) -> Figures:
    """Eight steps of eight lengths, with and without segments that can grow."""
    if not bench.is_card or os.environ.get("PYTORCH_ALLOC_CONF"):
        return
    for conf in ("", "expandable_segments:True"):
        command = [sys.executable, "-m", "benchmarks.gpu", "--lengths", "--device", str(bench.device)]
        command += [] if bench.is_full else ["--rehearse"]
        environment = {**os.environ, "PYTORCH_ALLOC_CONF": conf, "PYTORCH_CUDA_ALLOC_CONF": conf}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        row = conf or "segments of fixed size"
        try:
            told = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            told = {"error": done.stderr.strip()[-200:]}
        for what, value in told.items():
            limit = {"reserved": 1.0, "undone": 0}.get(what)
            yield Figure(table="eight lengths", row=row, what=what, value=value, limit=limit)


def eight_lengths(bench: Bench) -> dict[str, Any]:
    """Make a step of each of eight lengths within 45 % of the plain peak; return what was seen."""
    case, rows = bench.case("GPT-2"), 32 if bench.is_full else 16
    whole = case.rows_on(bench.device, rows)
    step, _ = bench.trained(case)
    step(whole)
    plain = bench.peaks(step, whole)[0]
    step = None
    bench.free()
    num_bytes = int(0.45 * plain) or 10**9
    step, _ = bench.trained(case, memory=num_bytes)
    used, undone, longest = [0.0, 0.0], 0, whole["input_ids"].shape[1]
    for index in (7, 2, 5, 0, 6, 1, 4, 3):  # 512 to 225 tokens
        batch = {key: one[:, : longest - index * longest // 12] for key, one in whole.items()}
        reports: list[ab.StepReport] = []
        peaks = bench.peaks(lambda batch=batch, into=reports: into.append(step(batch)))
        used = [max(a, b / num_bytes) for a, b in zip(used, peaks, strict=True)]
        undone += reports[0].redone
    return {"allocated": used[0], "reserved": used[1], "undone": undone}


def plan(bench: Bench) -> Figures:
    """The plan for this card from a model on the meta device, beside what then happens."""
    rows = 8
    for name in ("GPT-2", "GPT-2, dropout", "BERT-base", "ResNet-50, GroupNorm"):
        for chosen in ("float32", "bf16-mixed"):
            row = f"{name}, {chosen}"
            try:
                case = bench.case(name)
            except NeedsPackage as error:
                yield Figure(table="plan", row=row, what="bytes", value=f"not run: needs {error}")
                continue
            with torch.device("meta"):
                model = case.make()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            few = case.batch(rows)
            size = rows // 2
            planned = ab.plan(
                model, case.loss, optimizer, few, micro_batch=size, device=str(bench.device), precision=chosen
            )
            bench.free()
            step, _ = bench.trained(case, micro_batch=size, precision=chosen)
            batch = case.rows_on(bench.device, rows)
            step(batch)
            used, _ = bench.peaks(step, batch)
            seconds = bench.seconds(step, batch, times=3)
            step = None
            if used:
                yield Figure(table="plan", row=row, what="planned over used bytes", value=planned.peak / used)
            yield Figure(
                table="plan", row=row, what="planned over used seconds", value=planned.seconds / seconds
            )


# ---- out of memory


def oom(bench: Bench) -> Figures:
    """A limit on the allocator, and memory that another process holds: the same update, nothing lost."""
    case, rows = bench.case("ResNet-50, GroupNorm"), 64 if bench.is_full else 16
    batch = case.rows_on(bench.device, rows)

    def update(**options: Any) -> tuple[ab.StepReport, dict[str, Tensor], float]:
        step, model = bench.trained(case, **options)
        reports: list[ab.StepReport] = []
        seconds = bench.seconds(lambda: reports.append(step(batch)))
        return reports[0], {key: one.detach().cpu() for key, one in model.named_parameters()}, seconds

    with exact_kernels():
        update()  # libraries load
        bench.free()
        held = accelerator.allocated(bench.device)
        accelerator.forget_peak(bench.device)
        _, expected, plain = update()
        peak = (accelerator.peak_bytes(bench.device) or 0) - held
        if not peak:
            yield Figure(table="out of memory", row="limits", what="result", value="no bytes counted")
            return
        begun = {key: one.detach().cpu() for key, one in case.on(bench.device)[0].named_parameters()}
        moved = {key: expected[key] - begun[key] for key in begun}
        for share in (0.9, 0.6, 0.4, 0.25):
            bench.free()
            row = f"allocator limited to {share:.0%} of the peak"
            with accelerator.capped(bench.device, int(share * peak) + held) as is_limited:
                if not is_limited:
                    break
                try:
                    report, found, seconds = update()
                except ab.AnybatchError as error:
                    yield Figure(table="out of memory", row=row, what="result", value=str(error)[:110])
                    continue
            yield from same(row, report, found, begun, moved, seconds / plain)
        yield from beside_another(bench, update, begun, moved, plain, peak)
        yield from no_room_for_update(bench, case, batch)


def same(row: str, report: Any, found: Any, begun: Any, moved: Any, slower: float) -> Figures:
    """Yield how far an update is from the one without a limit."""
    error = relative_error({key: found[key] - begun[key] for key in begun}, moved)
    # AdamW divides by the root of the gradient's square: where that is rounding, the first step is its sign.
    yield Figure(table="out of memory", row=row, what="error of the update", value=error, limit=2e-2)
    yield Figure(table="out of memory", row=row, what="micro-batches", value=report.micro_batches)
    yield Figure(table="out of memory", row=row, what="undone", value=report.redone)
    yield Figure(table="out of memory", row=row, what="plain steps", value=slower)


def beside_another(bench: Bench, update: Any, begun: Any, moved: Any, plain: float, peak: int) -> Figures:
    """Make an update while another process leaves half of what it needs."""
    found = accelerator.free_and_total(bench.device)
    bench.free()
    if found is None or found[0] < 2 * peak:
        return
    hold = found[0] - int(0.5 * peak) - GIB // 2
    code = (
        f"import torch; x = torch.empty({hold}, dtype=torch.uint8, device={str(bench.device)!r});"
        "print('held', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None  # noqa: PT018
    try:
        if other.stdout.readline().strip() == "held":
            report, weights, seconds = update()
            yield from same("another process holds the rest", report, weights, begun, moved, seconds / plain)
    finally:
        other.communicate("\n")


def no_room_for_update(bench: Bench, case: Case, batch: Any) -> Figures:
    """Leave room for the gradients, and none for the optimizer's state: an error, and all as before."""
    bench.free()
    step, model = bench.trained(case, micro_batch=1)
    before = {key: one.detach().clone() for key, one in model.named_parameters()}
    size = sum(one.nbytes for one in model.parameters())
    held = accelerator.allocated(bench.device)
    row, result = "no room for the optimizer's state", "updated"
    try:
        with accelerator.capped(bench.device, held + int(2.2 * size)):
            step(batch)
    except ab.AnybatchError as error:
        result = type(error).__name__
    is_same = all(torch.equal(one.detach(), before[key]) for key, one in model.named_parameters())
    yield Figure(table="out of memory", row=row, what="result", value=result)
    lost = int(result != "updated" and not is_same)
    yield Figure(table="out of memory", row=row, what="weights changed", value=lost, limit=0)


# ---- speed

RACES = {"LeNet-5": 64, "BERT-base": 32, "GPT-2": 8, "ResNet-50, GroupNorm": 32}


def contestants(case: Case, size: int, make: Callable[[], tuple[nn.Module, Any, Any]]) -> dict[str, Any]:
    """Return functions that make one update of a batch: by hand, by anybatch in three ways, by others."""
    found: dict[str, Any] = {}

    def split(batch: Any) -> list[Any]:
        nest = tree.flatten(batch)
        parts = zip(*[leaf.split(size) for leaf in nest.leaves], strict=True)
        return [nest.build(iter(part)) for part in parts]

    def weight(batch: Any) -> Tensor | int:
        return (batch["labels"] != -100).sum() if isinstance(batch, dict) else len(batch[1])

    model, loss, optimizer = make()

    def hand(batch: Any, model: Any = model, optimizer: Any = optimizer) -> float:
        whole, total = weight(batch), torch.zeros((), device=next(model.parameters()).device)
        for micro in split(batch):
            value = case.whole(model, micro) * (weight(micro) / whole)
            value.backward()
            total += value.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    found["hand"] = hand
    model, loss, optimizer = make()
    found["step"] = ab.Step(model, loss, optimizer, micro_batch=size)
    model, loss, optimizer = make()
    step = ab.Step(model, loss, optimizer)

    def window(batch: Any, step: ab.Step = step) -> None:
        with step.window() as opened:
            for micro in split(batch):
                opened.add(micro)

    found["window"] = window
    model, loss, optimizer = make()
    batch_loss = ab.BatchLoss(model, loss, micro_batch=size)

    def by_loss(batch: Any, optimizer: Any = optimizer) -> None:
        batch_loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    found["BatchLoss"] = by_loss
    with suppress(ImportError):
        from accelerate import Accelerator

        other = Accelerator(gradient_accumulation_steps=4)
        if other.device.type != next(model.parameters()).device.type:
            return found
        model, loss, optimizer = make()
        model, optimizer = other.prepare(model, optimizer)

        def accelerated(batch: Any, model: Any = model, optimizer: Any = optimizer) -> None:
            for micro in split(batch):
                with other.accumulate(model):
                    value = case.whole(model, micro)
                    other.backward(value)
                    optimizer.step()
                    optimizer.zero_grad()
            value.item()

        found["accelerate"] = accelerated
    return found


def speed(bench: Bench) -> Figures:
    """One update in four micro-batches, in turn with the loop by hand; stops of the device, and launches."""
    from benchmarks.models import LeNet5

    loss = nn.CrossEntropyLoss()
    lenet = Case(
        make=LeNet5,
        loss=loss,
        whole=lambda model, batch: loss(model(batch[0]), batch[1]),
        batch=lambda rows: (torch.randn(rows, 1, 32, 32), torch.randint(10, (rows,))),
    )
    for name, full_rows in RACES.items():
        rows = full_rows if bench.is_full else 8
        for compiled in (False, True) if bench.is_full and name == "LeNet-5" else (False,):
            row = f"{name}, compiled" if compiled else name
            try:
                case = lenet if name == "LeNet-5" else bench.case(name)
            except NeedsPackage as error:
                yield Figure(table="speed", row=row, what="step", value=f"not run: needs {error}")
                continue

            def make(case: Case = case, compiled: bool = compiled) -> tuple[nn.Module, Any, Any]:
                model, loss = case.on(bench.device)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
                if compiled:
                    model.compile()
                return model, loss, optimizer

            batch = case.rows_on(bench.device, rows)
            bench.free()
            runs = contestants(case, rows // 4, make)
            yield from raced(bench, row, runs, batch)
            if not compiled:
                yield from counted(bench, row, runs, batch)
            del runs
    yield from trainers(bench)


def raced(bench: Bench, row: str, runs: dict[str, Any], batch: Any) -> Figures:
    """Yield the median of ratios to the loop by hand, in turn."""
    rounds = 9 if bench.is_full else 3
    for run in runs.values():
        for _ in range(5):  # looks, compilation and kernels
            run(batch)
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        names = [*runs] if index % 2 else [*reversed(runs)]
        taken = {name: bench.seconds(runs[name], batch, times=2) for name in names}
        for name, seconds in taken.items():
            ratios[name].append(seconds / taken["hand"])
    for name in runs:
        if name != "hand":
            limit = {"step": 1.03, "window": 1.1, "BatchLoss": 1.05}.get(name)
            yield Figure(table="speed", row=row, what=name, value=median(ratios[name]), limit=limit)


def counted(bench: Bench, row: str, runs: dict[str, Any], batch: Any) -> Figures:
    """Yield how often an update stops the device, and how many kernels it launches."""
    if not hasattr(bench.module, "set_sync_debug_mode"):
        return
    import warnings

    from torch.profiler import ProfilerActivity, profile

    for name in ("hand", "step", "window"):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            bench.module.set_sync_debug_mode("warn")
            runs[name](batch)
            bench.module.set_sync_debug_mode("default")
        stops = sum("synchroniz" in str(one.message) for one in told)
        yield Figure(table="stops and launches", row=row, what=f"{name}, stops", value=stops)
        with profile(activities=[ProfilerActivity.CPU]) as recorded, suppress(RuntimeError):
            runs[name](batch)
        operations = sum(one.count for one in recorded.key_averages() if one.key.startswith("aten::"))
        yield Figure(table="stops and launches", row=row, what=f"{name}, operations", value=operations)


def trainers(bench: Bench) -> Figures:
    """transformers' Trainer with gradient accumulation, and the one with the whole batch."""
    if not (has("transformers") and has("accelerate")):
        yield Figure(
            table="speed", row="Trainer", what="step", value="not run: needs transformers, accelerate"
        )
        return
    import tempfile

    import transformers

    from anybatch.homes.transformers import Trainer

    case, rows = bench.case("BERT-base"), 32 if bench.is_full else 8
    whole = case.batch(rows)
    data = [{key: one[row] for key, one in whole.items()} for row in range(rows)] * 8

    def run(kind: Any, size: int, steps: int, **more: Any) -> float:
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder, per_device_train_batch_size=size, gradient_accumulation_steps=steps,
                max_steps=8, save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no",
                use_cpu=not bench.is_card,
            )  # fmt: skip
            trainer = kind(case.on(torch.device("cpu"))[0], arguments, train_dataset=data, **more)
            return bench.seconds(trainer.train)

    def ours() -> float:
        return run(Trainer, rows, 1, micro_batch=rows // 4)

    def theirs() -> float:
        return run(transformers.Trainer, rows // 4, 4)

    ours(), theirs()
    ratios = [ours() / theirs() for _ in range(3 if bench.is_full else 1)]
    yield Figure(
        table="speed", row="Trainer over transformers' own", what="step", value=median(ratios), limit=1.1
    )


# ---- offload and recompute


def offload(bench: Bench) -> Figures:
    """Bytes freed and seconds paid by each policy; the share of copies that run beside the computation."""
    rows = 8
    for name in ("GPT-2", "ViT-B"):
        try:
            case = bench.case(name)
        except NeedsPackage as error:
            yield Figure(
                table="offload and recompute", row=name, what="bytes", value=f"not run: needs {error}"
            )
            continue
        batch, found = case.rows_on(bench.device, rows), dict[str | None, tuple[int, float]]()
        for policy in (None, "selective", "all", "offload"):
            bench.free()
            step, _ = bench.trained(case, options=ab.Options(recompute=policy, check=False))
            step(batch)
            step(batch)
            peak, _ = bench.peaks(step, batch)
            found[policy] = peak, bench.seconds(step, batch, times=3)
            step = None
            if policy is not None:
                row = f"{name}, {policy}"
                if peak:
                    share = peak / found[None][0]
                    yield Figure(table="offload and recompute", row=row, what="bytes", value=share, limit=1.0)
                slower = found[policy][1] / found[None][1]
                yield Figure(table="offload and recompute", row=row, what="seconds", value=slower)
        freed = found[None][0] - found["offload"][0]
        if bench.is_card and freed > 0:
            source = torch.empty(freed // 4, dtype=torch.uint8, device=bench.device)
            target = torch.empty(freed // 4, dtype=torch.uint8, pin_memory=True)
            copies = 8 * bench.seconds(target.copy_, source, True, times=3)  # there and back
            beside = 1 - (found["offload"][1] - found[None][1]) / copies
            yield Figure(
                table="offload and recompute", row=f"{name}, offload", what="copies hidden", value=beside
            )


Section = Callable[[Bench], Figures]
#: Sections by name, in order, and the seconds each may take on a card.
SECTIONS: dict[str, tuple[Section, int]] = {
    "selftest": (selftest_section, 150),
    "exact": (exact, 60),
    "precision": (precision, 60),
    "budgets": (budgets, 170),
    "plan": (plan, 80),
    "oom": (oom, 60),
    "speed": (speed, 120),
    "offload": (offload, 75),
}
