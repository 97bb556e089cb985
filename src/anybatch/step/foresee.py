"""The cost of a step before anything runs: the plan, its bytes and its seconds."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core import Collate, tree
from anybatch.losses import LossLike
from anybatch.parallel import refuse_sharded, unwrapped
from anybatch.planner import PlanReport
from anybatch.precision import Precision, PrecisionName, find_precision
from anybatch.state import ObjectState
from anybatch.step.options import DEFAULT, Options, known_keywords
from anybatch.step.step import Step


@known_keywords()
def plan(
    model: nn.Module,
    loss: LossLike,
    optimizer: Optimizer | Sequence[Optimizer],
    batch: Any,
    *,
    memory: str | int | None = None,
    rows: int | None = None,
    device: str | torch.device | None = None,
    micro_batch: int | None = None,
    precision: PrecisionName | Precision = "float32",
    clip_norm: float | None = None,
    collate: Collate | None = None,
    options: Options = DEFAULT,
) -> PlanReport:
    """Return the fastest plan of one step within a budget, and every byte of it.

    The step runs on fake tensors, which have shapes and no data: the model may be on the meta device, the
    batch may hold only a few of its rows, and the device need not be here. The plan chooses the size of
    micro-batches, and which blocks of the model are kept, recomputed or offloaded; none of this changes the
    result. Seconds are estimated from the device's figures: trust their order more than their size.

    Args:
        model: as for `anybatch.Step`, and so is all that is not named here. Without `micro_batch` or
            `recompute` the plan chooses.
        batch: rows of the form that the step will see; only shapes and dtypes matter.
        memory: "12GB", "2GiB", "80%" of the device, "auto" for what is free, or bytes; None for no limit:
            then nothing is chosen, and the plan is that of `micro_batch` and `Options(recompute=...)`.
        rows: of the logical batch; None for those of `batch`.
        device: "cpu", the accelerator, or a card that need not be here (those of `anybatch plan --help`);
            None for where the model is.
        precision: as for a step; a true one is planned for, and the model stays as it is.
        options: as for a step; its scheduler, strategy and check do not matter.

    Raises:
        BudgetError: nothing fits; says the smallest budget that would, and what holds it up.
        PlanError: the step cannot be traced, because shapes depend on values; and as from a step.
        BatchError, LossError, OptimizerError: as from a step.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> batch = torch.zeros(2, 64), torch.zeros(2, 8)
        >>> report = plan(model, nn.MSELoss(), optimizer, batch, rows=4096, memory="2MiB")
        >>> report.plan.rows, report.peak <= 2 * 2**20, report.plan.is_cut
        (4096, True, True)
    """
    model = unwrapped(model, "auto")  # rank 0 may plan while the others wait
    refuse_sharded(model, "a plan")
    chosen = find_precision(precision)
    optimizers = optimizer if tree.is_sequence(optimizer) else [optimizer]
    with _as_it_was(model, optimizers) if chosen.is_short else nullcontext():
        step = Step(
            model,
            loss,
            optimizer,
            micro_batch=micro_batch,
            precision=chosen,
            clip_norm=clip_norm,
            collate=collate,
            options=replace(options, scheduler=None, check=False, strategy="local"),
        )
        return step.foresee(batch, memory=memory, rows=rows, device=device)


@contextmanager
def _as_it_was(model: nn.Module, optimizers: Iterable[Any]) -> Generator[None]:
    """Afterwards weights, buffers, forwards and states are as before; a short precision changes them."""
    weights = [(parameter, parameter.data) for parameter in model.parameters()]
    noted = ObjectState([model, *optimizers])
    try:
        yield
    finally:
        for parameter, data in weights:
            parameter.data = data
        noted.put_back()
