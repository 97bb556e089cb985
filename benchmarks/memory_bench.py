"""A model of the zoo under any plan: its peak predicted, measured by following storages, and its time."""

import gc
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import anybatch as ab
from anybatch.core import tree
from anybatch.core.batch import Batch
from anybatch.engine import admit, carry_out
from anybatch.engine.plan import Plan
from anybatch.memory.device import find_device
from anybatch.memory.meter import Meter
from anybatch.planner.report import PlanReport
from anybatch.planner.trace import Trace, trace
from anybatch.recompute.blocks import choose_blocks
from benchmarks.race import quiet_collector
from benchmarks.zoo import OPTIMIZERS, Entry, Made

KEEP, HALF = "keep", "half"
POLICIES = (KEEP, "recompute", "selective", HALF)
"""All blocks under one policy; `half`: every second block is recomputed."""

Choice = tuple[tuple[str, str], ...]


class Peak(NamedTuple):
    """Bytes at the peak of one step, in all and by owner (empty where the allocator counted)."""

    bytes: int
    by_owner: Mapping[str, int]


class Subject:
    """One model with its optimizer on one device; every step is the same whatever came before.

    Args:
        entry: which model.
        made: the model; it is moved to the device.
        optimizer: one of `benchmarks.zoo.OPTIMIZERS`.
        device: "cpu" or "cuda".
        seed: of the batches.
    """

    def __init__(
        self, entry: Entry, made: Made, optimizer: str, *, device: str = "cpu", seed: int = 0
    ) -> None:
        self.model = made.model.to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.step = entry.step(made, self.optimizer)
        self.device = torch.device(device)
        self._entry, self._made, self._seed = entry, made, seed

    def batch(self, rows: int) -> Any:
        """So many rows, the same each time, in storages of their own."""
        made = self._made.batch_of(rows, torch.Generator().manual_seed(self._seed))
        return tree.map_leaves(lambda leaf: leaf.to(self.device), made)

    def plan(self, rows: int, micro_batch: int, blocks: Choice = ()) -> Plan:
        """Of so many rows, cut into micro-batches of so many, these blocks not kept."""
        return replace(self.step.plan(rows), micro_batch=micro_batch, blocks=blocks)

    def blocks(self, policy: str) -> Choice:
        """Every block under a policy of POLICIES."""
        if policy == KEEP:
            return ()
        wanted = "recompute" if policy == HALF else policy
        asked = dict.fromkeys(self._entry.blocks, wanted) or wanted
        chosen = choose_blocks(self.model, asked)
        return chosen[::2] if policy == HALF else chosen

    def predict(self, plan: Plan, device: str | None = None) -> Trace:
        """Without data: the step on fake tensors, as on this device or on one that need not be here."""
        task, batch = self._prepared(plan.rows)
        return trace(plan, task, batch, device=find_device(device or self.device))

    def ask(self, rows: int, memory: int | None, **options: Any) -> PlanReport:
        """The planner's answer for so many rows within so many bytes."""
        made, batch_norm = self._made, self._entry.batch_norm
        return ab.plan(
            made.model,
            made.loss,
            self.optimizer,
            self.batch(rows),
            memory=memory,
            options=ab.Options(batch_norm=batch_norm),
            **options,
        )

    def warm_up(self) -> None:
        """One step of the fewest rows there are, so that the optimizer has its state."""
        self._run(self.plan(2, 1))

    def measure(self, plan: Plan) -> Peak:
        """The peak of a real step: of tensors on the CPU, of the allocator on a card.

        Of the second one: the first step of a policy keeps the outputs of its blocks to compare them.
        """
        self._run(plan)
        gc.collect()
        if self.device.type == "cuda":
            batch = self.batch(plan.rows)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._run(plan, batch)
            torch.cuda.synchronize()
            return Peak(torch.cuda.max_memory_allocated(), {})
        batch = self.batch(plan.rows)
        leaves = tree.flatten(batch).leaves
        with Meter(
            self.model, self.step.optimizers, loss_module=self.step.loss_module, batch_leaves=leaves
        ) as meter:
            self._run(plan, batch)
        ledger = meter.ledger()
        return Peak(ledger.peak, dict(ledger.at_peak))

    def seconds(self, plan: Plan) -> float:
        """Wall time of one update."""
        task, batch = self._prepared(plan.rows)
        task.effects.begin(task.network.modules)  # as a step does
        self._wait()
        start = time.perf_counter()
        carry_out(plan, task, batch)
        self._wait()
        return time.perf_counter() - start

    def race(self, plans: Mapping[str, Plan], rounds: int) -> dict[str, list[float]]:
        """Seconds of each plan in each round; they take turns, there and back, after one round unmeasured."""
        names = list(plans)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        with quiet_collector():
            for name in names:
                self.seconds(plans[name])
            for turn in range(rounds):
                for name in names if turn % 2 else reversed(names):
                    seconds[name].append(self.seconds(plans[name]))
                    gc.collect()
        return seconds

    def _prepared(self, rows: int, batch: Any = None) -> tuple[Any, Batch]:
        task = self.step.task()  # pyright: ignore[reportPrivateUsage]
        return task, admit(self.batch(rows) if batch is None else batch, task, None)

    def _run(self, plan: Plan, batch: Any = None) -> None:
        task, logical = self._prepared(plan.rows, batch)
        task.effects.begin(task.network.modules)
        carry_out(plan, task, logical)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
