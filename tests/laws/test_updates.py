"""Several updates in a row: optimizer state, clipping and schedule go as with the whole batch at once."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch import Options, Step, StepReport
from anybatch.losses.inputs import call_model, split_batch
from anybatch.testing import relative_error, tolerance
from tests.laws.cases import Case
from tests.laws.check import parts
from tests.laws.losses import CASES

ROWS, UPDATES, CLIP = 7, 4, 0.05
CLIPS = {"norm": torch.nn.utils.clip_grad_norm_, "value": torch.nn.utils.clip_grad_value_}
NAMES = (
    "cross_entropy-label_smoothing=0.1-weight=per_class-ignore_index=2-reduction=mean",
    "mse-reduction=mean",
    "ctc-reduction=mean",
)
CHOSEN = [case for case in CASES if case.name in NAMES]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def schedule(optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def by_hand(
    model: nn.Module, loss: Any, batches: list[Any], make: Callable[[Any], Optimizer], clip: str
) -> dict[str, Tensor]:
    """The plain loop: whole batch, clip, step, schedule."""
    optimizer = make(model.parameters())
    scheduler = schedule(optimizer)
    for batch in batches:
        inputs, targets = split_batch(batch)
        loss(*call_model(model, inputs), *targets).backward()
        CLIPS[clip](model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("optimizer", "clip"), [("momentum", "norm"), ("adamw", "norm"), ("momentum", "value")]
)
@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
@pytest.mark.parametrize("micro_batch", [1, 3, None, "window"])
def test_parameters_after_several_updates(
    case: Case, optimizer: str, clip: str, micro_batch: int | str | None
) -> None:
    """Mutation: a micro-batch is clipped, or clipping is left out."""
    problem = case.problem("function", ROWS)
    batches = [case.problem("function", ROWS, seed=seed).batch for seed in range(UPDATES)]
    model, loss, make = problem.model, problem.loss, OPTIMIZERS[optimizer]
    expected = by_hand(copy.deepcopy(model), loss, batches, make, clip)
    made = make(model.parameters())
    rows = None if isinstance(micro_batch, str) else micro_batch
    step = Step(
        model,
        loss,
        made,
        micro_batch=rows,
        clip_norm=CLIP if clip == "norm" else None,
        options=Options(scheduler=schedule(made), check=False, clip_value=CLIP if clip == "value" else None),
    )
    for batch in batches:
        report = windowed(step, batch) if isinstance(micro_batch, str) else step(batch)
        assert report.grad_norm > CLIP  # the clip does something
    error = relative_error(dict(model.named_parameters()), expected)
    assert error <= tolerance(torch.float64, ROWS * UPDATES)


def windowed(step: Step, batch: Any) -> StepReport:
    window = step.window()
    for micro in parts(batch, [3, 1, 3]):
        window.add(micro)
    return window.close()
