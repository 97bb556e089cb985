"""Sections about bytes and seconds: budgets, plans, speed, offload and recompute."""

import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

import anybatch as ab
from anybatch.core import accelerator
from benchmarks.gpu import nets
from benchmarks.gpu.nets import Training
from benchmarks.gpu.notes import Notes

MODELS = ("gpt2", "resnet50", "resnet50-bn", "vit", "bert-large", "lstm")
SHARES = (70, 45, 30, 20)
Hand = dict[int, tuple[float, int]]  # seconds and allocated bytes of each size by hand


def budgets(notes: Notes) -> None:
    """Train within shares of the plain peak; hold allocated and reserved bytes against the budget."""
    if accelerator.forget_peak(notes.device) is None:
        notes.add("this device", "left out", "does not count its bytes")
        return
    for name in MODELS:
        if notes.is_late:
            notes.state["late"].append(name)
            continue
        with notes.case(name):
            hand = _hand(notes, name)
            notes.add(name, "plain bytes", max(peak for _, peak in hand.values()))
            notes.each({f"{name} {share} %": partial(_budget, notes, name, share, hand) for share in SHARES})
    notes.each({"hard limit": partial(_hard_limit, notes), "lengths": partial(_lengths, notes)})


def _hand(notes: Notes, name: str) -> Hand:
    """Return seconds and bytes of cuts by hand; BatchNorm in training mode is not cut."""
    training = Training(name, notes.device, small=notes.small)
    training.by_hand(training.rows)
    found: Hand = {}
    for size in training.sizes()[: 1 if name.endswith("-bn") else 4]:
        training.by_hand(size)
        notes.forget()
        took = [notes.seconds(partial(training.by_hand, size)) for _ in range(2)]
        found[size] = min(took), notes.allocated() or 0
    return found


def _budget(notes: Notes, name: str, share: int, hand: Hand) -> None:
    case, plain = f"{name} {share} %", next(iter(hand.values()))
    budget = plain[1] * share // 100
    notes.forget()
    base = accelerator.allocated(notes.device)
    if base > 2**20 and not notes.small:
        notes.add(case, "held before", base)
    training = Training(name, notes.device, small=notes.small)
    smallest = _try(notes, case, training, budget, plain[0], hand)
    if smallest is None:
        return
    del training
    if not smallest:
        notes.add(case, "refused", "below weights, gradients and optimizer")
        return
    notes.add(case, "smallest named / plain", smallest / plain[1])
    notes.forget()
    again = Training(name, notes.device, small=notes.small)
    refused = _try(notes, f"{case}, named", again, smallest, plain[0], hand, count=3)
    notes.add(f"{case}, named", "named, refused again", float(refused is not None))


def _try(notes: Notes, case: str, *rest: Any, **keywords: Any) -> int | None:
    """Train within a budget; return the smallest budget that a refusal names, 0 if it names none."""
    try:
        _steps(notes, case, *rest, **keywords)
    except ab.BudgetError as error:
        return error.smallest
    except ab.errors.OutOfMemoryError as error:
        notes.add(case, "update out of memory", 1)
        notes.add(case, "told", str(error)[:200])
    return None


def _steps(
    notes: Notes, case: str, training: Training, budget: int, plain: float, hand: Hand, count: int = 10
) -> None:
    step, took, redone = training.step(memory=budget), list[float](), 0
    for index in range(1, count + 1):
        notes.forget(keep_cache=True)
        reports: list[ab.StepReport] = []
        took.append(notes.seconds(lambda: reports.append(step(training.batch))))  # noqa: B023
        redone += reports[0].redone
        if index in (1, 2, 3, 10):
            notes.add(case, f"allocated {index}", (notes.allocated() or 0) / budget)
            notes.add(case, f"reserved {index}", (notes.reserved() or 0) / budget)
        if index == 1:
            notes.add(case, "first / plain", took[0] / plain)
    notes.add(case, "cut", str(max(reports[0].cut)))
    notes.add(case, "micro-batches undone", redone)
    fitting = [seconds for seconds, peak in hand.values() if peak <= budget]
    settled = statistics.median(took[count // 2 :])
    notes.add(case, "settled / plain", settled / plain)
    if fitting:
        notes.add(case, "settled / by hand", settled / min(fitting))


def _hard_limit(notes: Notes) -> None:
    """Let a plain step, and blocks of memory, run into the allocator's limit."""
    training = Training("gpt2", notes.device, small=notes.small)
    training.by_hand(max(1, training.rows // 4))
    notes.forget()
    limit = accelerator.allocated(notes.device) * 5 // 4 + 2**20
    with accelerator.capped(notes.device, limit) as is_capped:
        notes.add("hard limit", "capped", str(is_capped))
        if not is_capped:
            return
        for name, run in {
            "step": partial(training.by_hand, training.rows),
            "blocks": partial(_fill, notes),
        }.items():
            training.optimizer.zero_grad()
            notes.forget()
            with suppress(torch.OutOfMemoryError, RuntimeError):
                run()
            notes.add("hard limit", f"{name}: allocated / limit", (notes.allocated() or 0) / limit)
            notes.add("hard limit", f"{name}: reserved / limit", (notes.reserved() or 0) / limit)


def _fill(notes: Notes) -> None:
    held: list[torch.Tensor] = []
    while len(held) < 10_000:
        held.append(
            torch.empty(3 * 2**20 if not notes.small else 2**12, dtype=torch.uint8, device=notes.device)
        )


def _lengths(notes: Notes) -> None:
    """Run batches of eight lengths in children, with and without segments that grow."""
    for grows in (False, True):
        value = f"expandable_segments:{grows}"
        environment = os.environ | dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), value)
        path = notes.path.with_suffix(f".{grows}.json".lower())
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            "--section",
            "lengths",
            "--device",
            str(notes.device),
        ]
        command += ["--out", str(path), *(["--rehearse"] if notes.small else [])]
        subprocess.run(command, env=environment, check=True, timeout=60)
        for one in json.loads(path.read_text(encoding="utf-8"))["figures"]:
            notes.add(f"eight lengths, {value}", one["name"], one["value"])
        path.unlink()


def lengths(notes: Notes) -> None:
    """Make 8 steps of 8 lengths within 45 % of the plain peak (run by `budgets`)."""
    name = "lstm" if notes.small else "gpt2"
    plain = Training(name, notes.device, small=notes.small)
    plain.by_hand(plain.rows)
    notes.forget()
    plain.by_hand(plain.rows)
    budget = (notes.allocated() or 0) * 45 // 100
    training, peaks = Training(name, notes.device, small=notes.small), list[tuple[int, int]]()
    del plain
    step, redone = training.step(memory=budget), 0
    longest = len(nets.leaves(training.batch)[0][0])
    for index in range(8):
        length = longest * (index * 5 % 8 + 1) // 8
        batch = nets.shortened(training.batch, max(2, length))
        notes.forget(keep_cache=True)
        redone += step(batch).redone
        peaks.append((notes.allocated() or 0, notes.reserved() or 0))
    notes.add("lengths", "allocated, worst after 1", max(one for one, _ in peaks[1:]) / budget)
    notes.add("lengths", "reserved, worst after 1", max(one for _, one in peaks[1:]) / budget)
    notes.add("lengths", "micro-batches undone", redone)


def plan(notes: Notes) -> None:
    """Plan from a model on the CPU, then run the plan: bytes and seconds."""

    def one(name: str, precision: Any, dropout: bool) -> None:
        case = f"{name} {precision}{' dropout' if dropout else ''}"
        model, loss, batch_of = nets.make(name, small=notes.small, dropout=dropout)
        rows = 8 if notes.small else nets.ROWS[name]
        batch = batch_of(rows, torch.Generator().manual_seed(1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        said = ab.plan(model, loss, optimizer, batch, device=notes.device.type, precision=precision)
        training = Training(name, notes.device, small=notes.small, dropout=dropout)
        step = training.step(precision=precision)
        step(training.batch)
        notes.forget()
        took = [notes.seconds(lambda: step(training.batch)) for _ in range(3)]
        notes.add(case, "seconds measured / planned", min(took) / said.seconds)
        notes.add(case, "bytes planned", said.peak)
        if (peak := notes.allocated()) is not None:
            notes.add(case, "bytes measured", peak)
            notes.add(case, "bytes off", abs(peak / said.peak - 1))

    notes.each({
        f"{name} {precision} {dropout}": partial(one, name, precision, dropout)
        for name in ("gpt2", "resnet50", "bert") for precision in ("float32", "bf16-mixed")
        for dropout in ((False, True) if name != "resnet50" else (False,))
    })  # fmt: skip


def _contestants(training: Training, device: torch.device, size: int) -> dict[str, Callable[[], Any]]:
    """Return ways to make one update with micro-batches of `size`, each of which reads the loss."""
    model, loss, optimizer, batch = training.model, training.loss, training.optimizer, training.batch
    step, batch_loss = training.step(micro_batch=size), ab.BatchLoss(model, loss, micro_batch=size)
    count = -(-training.rows // size)

    def window() -> None:
        opened = step.window()
        for part in nets.split(batch, size):
            opened.add(part)
        opened.close()

    def by_loss() -> None:
        found = batch_loss(batch)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.item()

    def hand() -> None:
        running = torch.zeros((), device=device)
        for part in nets.split(batch, size):
            value = nets.mean(model, loss, part) / count
            value.backward()
            running += value.detach()
        optimizer.step()
        optimizer.zero_grad()
        running.item()

    found = {"hand": hand, "step": lambda: step(batch), "window": window, "batch loss": by_loss}
    return found | _peers(training, device, size, count)


def _peers(training: Training, device: torch.device, size: int, count: int) -> dict[str, Callable[[], Any]]:
    """Return accelerate and Fabric, where they are installed."""
    loss, batch, found = training.loss, training.batch, dict[str, Callable[[], Any]]()
    with suppress(ImportError):
        from accelerate import Accelerator

        home = Accelerator(gradient_accumulation_steps=count, cpu=device.type == "cpu")
        model, optimizer = home.prepare(training.model, training.optimizer, device_placement=[False, False])

        def accelerate() -> None:
            running = torch.zeros((), device=device)
            for part in nets.split(batch, size):
                with home.accumulate(model):
                    value = nets.mean(model, loss, part)
                    home.backward(value)
                    optimizer.step()
                    optimizer.zero_grad()
                running += value.detach() / count
            running.item()

        found["accelerate"] = accelerate
    with suppress(ImportError):
        try:
            from lightning.fabric import Fabric
        except ImportError:
            from lightning_fabric import Fabric
        fabric = Fabric(accelerator="cpu" if device.type == "cpu" else "auto", devices=1)
        wrapped, own = fabric.setup(training.model, training.optimizer, move_to_device=False)

        def lightning() -> None:
            running = torch.zeros((), device=device)
            for index, part in enumerate(nets.split(batch, size), start=1):
                with fabric.no_backward_sync(wrapped, enabled=index < count):
                    value = nets.mean(wrapped, loss, part) / count
                    fabric.backward(value)
                running += value.detach()
            own.step()
            own.zero_grad()
            running.item()

        found["fabric"] = lightning
    return found


def speed(notes: Notes) -> None:
    """Race everybody against the loop by hand: medians of seconds taken in turn."""

    def one(name: str, compiled: bool) -> None:
        case = f"{name}{' compiled' if compiled else ''}"
        training = Training(name, notes.device, small=notes.small)
        if compiled:
            training.model.compile()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ways = _contestants(training, notes.device, max(1, training.rows // 4))
            took: dict[str, list[float]] = {way: [] for way in ways}
            for way in ways.values():
                way(), way()
            for turn in range(3 if notes.small else 7):
                for way in (list(ways), list(ways)[::-1])[turn % 2]:
                    took[way].append(notes.seconds(ways[way]))
            for way in list(ways)[1:]:
                ratio = statistics.median(a / b for a, b in zip(took[way], took["hand"], strict=True))
                notes.add(case, way, ratio)
            for way in ("hand", "step", "window"):
                notes.add(case, f"{way}: stops", _stops(notes, ways[way]))
                notes.add(case, f"{way}: launches", _launches(notes, ways[way]))

    names = ("lenet5", "bert", "gpt2", "resnet50")
    may_compile = not notes.small
    notes.each({f"{n}": partial(one, n, False) for n in names})
    notes.each({f"{n} compiled": partial(one, n, True) for n in names[::2] if may_compile})


def _stops(notes: Notes, way: Callable[[], Any]) -> float | None:
    """Return how often the host waits for the device in an update; None where torch does not say."""
    module = accelerator.module_of(notes.device)
    if not hasattr(module, "set_sync_debug_mode"):
        return None
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        module.set_sync_debug_mode("warn")
        try:
            way()
        finally:
            module.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in found)


def _launches(notes: Notes, way: Callable[[], Any]) -> float | None:
    """Return how many kernels an update launches; None on a device without."""
    if notes.device.type == "cpu" or not hasattr(accelerator.module_of(notes.device), "set_sync_debug_mode"):
        return None
    with torch.profiler.profile() as seen:
        way()
        notes.sync()
    return sum("LaunchKernel" in event.name for event in seen.events())


def offload(notes: Notes) -> None:
    """Measure what each policy of the blocks frees and costs, and how far copies hide behind work."""

    def one(name: str) -> None:
        plain: tuple[float, int] | None = None
        bits: dict[str, torch.Tensor] = {}
        for policy in (None, "selective", "all", "offload"):
            training = Training(name, notes.device, small=notes.small)
            step = training.step(options=ab.Options(recompute=policy, check=False))
            step(training.batch), step(training.batch)
            notes.forget()
            took = statistics.median(notes.seconds(lambda: step(training.batch)) for _ in range(5))  # noqa: B023
            peak, case = notes.allocated() or 0, f"{name} {policy}"
            weights = {key: one.detach().cpu() for key, one in training.model.named_parameters()}
            if plain is None:
                plain, bits = (took, peak), weights
                continue
            notes.add(case, "seconds / plain", took / plain[0])
            if peak:
                notes.add(case, "bytes freed / plain", 1 - peak / plain[1])
            changed = sum(not torch.equal(one, bits[key]) for key, one in weights.items())
            notes.add(case, "other bits", changed)
            if policy == "offload" and peak:
                moved = plain[1] - peak
                alone = _there_and_back(notes, moved)
                notes.add(case, "copies alone / plain", alone / plain[0])
                hidden = 1 - (took - plain[0]) / alone if alone else 0.0
                notes.add(case, "share of copies hidden", hidden)

    notes.each({name: partial(one, name) for name in ("gpt2", "vit")})


def _there_and_back(notes: Notes, num_bytes: int) -> float:
    """Return the seconds of copies of so many bytes to pinned host memory and back."""
    here = torch.empty(max(1, num_bytes), dtype=torch.uint8, device=notes.device)
    is_pinned = notes.device.type != "cpu" and not notes.small
    host = torch.empty(here.shape, dtype=torch.uint8, pin_memory=is_pinned)

    def copies() -> None:
        host.copy_(here, non_blocking=True)
        here.copy_(host, non_blocking=True)

    return notes.seconds(copies)
