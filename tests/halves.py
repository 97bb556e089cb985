"""Steps whose windows are saved half-way, and the rows that go through them."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Step, StepReport, Terms, Total, Window
from anybatch.state import rng
from anybatch.train import checkpoint
from tests.options import flat


def terms(model: nn.Module, micro: Any) -> dict[str, Total]:
    """Two terms with divisors of their own, so that each has a bank of gradients."""
    x, y = micro
    scores = model(x)
    return {
        "fit": Total(F.cross_entropy(scores, y, reduction="sum"), (y != -100).sum()),
        "size": Total(scores.float().square().sum(), scores.numel()),
    }


TERMS = Terms(terms, coefficients={"size": 0.5})
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "fp16-mixed": {"precision": "fp16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "fp16-true": {"precision": "fp16-true"},
    "compensated": {"compensated": True},
    "several terms": {"loss": TERMS},
    "several terms, fp16-true, compensated": {"loss": TERMS, "precision": "fp16-true", "compensated": True},
    "sum": {"loss": nn.CrossEntropyLoss(reduction="sum")},
    "drop": {"non_finite": "drop", "precision": "fp16-mixed"},
}


def build(loss: object = None, **options: Any) -> Step:
    """With random draws, buffers that change, and an optimizer with a state to lose."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 4), nn.Linear(4, 4)
    )
    model[5].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    settings = {"batch_norm": "micro", "clip_norm": 0.5, "scheduler": scheduler}
    return Step(model, nn.CrossEntropyLoss() if loss is None else loss, optimizer, **flat(settings | options))


def rows(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count = 3 + seed % 4
    x = torch.randn(count, 3, generator=generator)
    y = torch.randint(4, (count,), generator=generator)
    return x, y.where(torch.arange(count) > 0, -100)


def begun(step: Step, *, overflowing: bool = False) -> Window:
    """An update, then a window with two micro-batches of four in it.

    Args:
        step: as `build` makes it.
        overflowing: the loss scale is so large in the second one that it has to give way.
    """
    torch.manual_seed(5)
    step(rows(9))
    window = step.window()
    window.add(rows(0))
    if overflowing:
        step.scale.load({"value": 2.0**22, "clean": 7})
    window.add(rows(1))
    return window


def ended(step: Step, window: Window) -> list[StepReport]:
    """The other two, and one more step."""
    window.add(rows(2))
    window.add(rows(3))
    return [window.close(), step(rows(8))]


def save(path: Path, step: Step, **progress: Any) -> None:
    checkpoint.save(
        path,
        model=step.model,
        optimizers=step.optimizers,
        schedulers=step.schedulers,
        masters=step.masters,
        progress=progress,
        random=rng.capture_process(),
    )


def restore(path: Path, step: Step) -> dict[str, Any]:
    """Put all back, and give what was saved along."""
    found = checkpoint.load(path)
    checkpoint.restore(
        found, model=step.model, optimizers=step.optimizers, schedulers=step.schedulers, masters=step.masters
    )
    rng.restore_process(found.random)
    return found.progress
