"""Loops of accelerate, as a user writes them, that keep what they saw."""

import copy
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor

import anybatch as ab
from anybatch.parallel.wrappers import is_sharded
from tests.homes.tasks import LOSSES, MICRO_BATCH, OURS, ROWS, UPDATES, Run, as_rank, data, dies_at, net
from tests.parallel.pairs import error_of, make, rows, share, tokens


def accelerator(**options: Any) -> Accelerator:
    """A new one: accelerate keeps its state for the process."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    return Accelerator(cpu=True, **options)


def parts_of(model: Any) -> tuple[Any, Any, Any]:
    """A model, its optimizer and its scheduler, as `Accelerator.prepare` takes them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)


class Loop:
    """A training; the losses are the host's own unless it is cut."""

    def __init__(
        self, task: str, host: Accelerator, *, is_cut: bool, most: int = ROWS, width: int = 16, **options: Any
    ) -> None:
        self.host, self.plain = host, net(width, most).double()
        self.model, self.optimizer, self.scheduler = host.prepare(*parts_of(self.plain))
        self.loss: Callable[[Any], Tensor] = lambda batch: LOSSES[task](self.model, batch)
        if is_cut:
            self.loss = ab.BatchLoss(self.model, OURS[task], **{"micro_batch": MICRO_BATCH} | options)

    def run(self, batches: Any) -> Run:
        found = Run([], [], [], [*self.plain.parameters()], None)
        for batch in batches:
            with self.host.accumulate(self.model):
                loss = self.loss(batch)
                self.host.backward(loss)
                if self.host.sync_gradients:
                    named = self.plain.named_parameters()
                    found.gradients.append({name: p.grad.clone() for name, p in named})
                    found.rates.append(self.scheduler.get_last_lr()[0])
                    self.host.clip_grad_norm_(self.model.parameters(), 0.1)
                found.losses.append(loss.item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return found._replace(report=getattr(self.loss, "report", None))


def batches(task: str, rows: int = ROWS, *, given: Any = None) -> list[list[Tensor]]:
    return [[*batch] for batch in zip(*[part.split(rows) for part in given or data(task)], strict=True)]


def train(
    task: str, *, is_cut: bool = False, parts: int = 1, rows: Any = None, ranks: int = 1, **options: Any
) -> Run:
    """Train on 20 batches, each in so many parts by the host's own accumulation."""
    host = accelerator(gradient_accumulation_steps=parts)
    assert host.num_processes == ranks
    found = Loop(task, host, is_cut=is_cut, **options).run(batches(task, ROWS // parts, given=rows))
    return found._replace(losses=[*found.losses, fmean(found.losses)])


def halves(task: str, folder: Path, *, dies: bool = False) -> Run:
    """Train and save half-way, or go on from what is saved; with `dies`, end by SIGKILL soon after."""
    loop, rows = Loop(task, accelerator(), is_cut=True), batches(task)
    if folder.exists():
        loop.host.load_state(str(folder))
    else:
        loop.run(rows[: UPDATES // 2])
        loop.host.save_state(str(folder))
    if dies:
        dies_at(6, loop.plain)  # in the second update from here
    return loop.run(rows[UPDATES // 2 :])


def shards_on_rank(rank: int, size: int, accumulate: int) -> list[float]:
    """The errors of six calls with a model that accelerate has sharded by FSDP2; ranks have 5 and 2 rows."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"], cpu_ram_efficient_loading=False,
    )  # fmt: skip
    errors: list[float] = []
    # accelerate keeps FSDP2 for accelerators, so the kind of its state is set here; the rest is accelerate's.
    with as_rank(rank, size), mock.patch.object(AcceleratorState, "is_fsdp2", True):
        host = accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=accumulate)
        host.state.fsdp_plugin = plugin
        plain = make()
        model = copy.deepcopy(plain)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9) for one in (model, plain)]
        model, optimizer = host.prepare(model, optimizers[0])
        assert is_sharded(model)
        ours = ab.BatchLoss(model, tokens, micro_batch=None if accumulate > 1 else 2)
        expected = ab.BatchLoss(plain, tokens, options=ab.Options(strategy="local", check=False))
        for number in range(6):
            batch = rows(7, seed=number)
            with host.accumulate(model):
                host.backward(ours(share(batch, [5, 2], rank)))
                if host.sync_gradients:
                    host.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            (expected(batch) / accumulate).backward()
            if host.sync_gradients:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                optimizers[1].step()
                optimizers[1].zero_grad()
            errors.append(error_of(model, plain))
    return errors
