"""accelerate: `accelerator.backward(batch_loss(batch))` with prepared parts, and ab.Step with them."""

from contextlib import nullcontext

import pytest
import torch

import anybatch as ab
from anybatch.testing import relative_error, tolerance
from tests.homes.tasks import LOSSES, OURS, ROWS, UPDATES, data, net

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("accelerate")


from tests.homes.accelerates import accelerator, batches, parts_of, train  # noqa: E402

EXACT = 1e-12


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the variables that accelerate sets."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.mark.parametrize("where", ["forward", "loop"])
def test_bfloat16_of_the_host(where: str) -> None:
    host, plain, batch = accelerator(mixed_precision="bf16"), net(), data("tokens", 1, dtype=torch.float32)
    LOSSES["tokens"](plain, batch).backward()
    expected = [p.grad.clone() for p in plain.parameters()]
    model, errors = host.prepare(plain), []
    ours = ab.BatchLoss(model, OURS["tokens"], micro_batch=7)
    for loss in (lambda batch: LOSSES["tokens"](model, batch), ours):
        plain.zero_grad()
        with host.autocast() if where == "loop" else nullcontext():
            value = loss(batch)
        host.backward(value)
        errors.append(relative_error([p.grad for p in plain.parameters()], expected))
    assert 0 < errors[1] <= tolerance(torch.bfloat16, ROWS)
    assert errors[1] <= 2 * errors[0]


def test_step_takes_prepared_parts() -> None:
    plain, optimizer, scheduler = parts_of(net().double())
    model, given, prepared = accelerator().prepare(plain, optimizer, scheduler)
    options = ab.Options(scheduler=prepared)
    step = ab.Step(model, OURS["tokens"], given, options=options, micro_batch=7, clip_norm=0.1)
    whole = train("tokens")
    for batch in batches("tokens"):
        step(batch)
    assert (step.optimizers, step.schedulers) == ((optimizer,), (scheduler,))
    assert relative_error([*plain.parameters()], whole.parameters) <= tolerance(torch.float64, 4 * UPDATES)
    assert scheduler.last_epoch == UPDATES
