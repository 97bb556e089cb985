"""EMA in any step: the average of the whole batch's updates, in steps, windows and beside a trainer."""

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import PlanError

DECAY, UPDATES, LIMIT = 0.8, 5, 1e-12
DATA = [(torch.randn(12, 4).double(), torch.randn(12, 1).double()) for _ in range(UPDATES)]


def made(ema: ab.EMA, micro_batch: int | None = None) -> ab.Step:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Step(model, nn.MSELoss(), optimizer, micro_batch=micro_batch, callbacks=[ema])


def right() -> Tensor:
    """The average by hand: torch's own loop, and the formula."""
    step = made(ab.EMA())
    model, optimizer, average = step.model, step.optimizers[0], torch.zeros(0)
    for update, (x, y) in enumerate(DATA):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        now = model.weight.detach().clone()  # pyright: ignore
        average = now if update == 0 else DECAY * average + (1 - DECAY) * now
    return average


@pytest.mark.parametrize("way", ["uncut", "cut", "window", "trainer"])
def test_average_counts_updates_and_not_micro_batches(way: str) -> None:
    ema = ab.EMA(DECAY)
    step = made(ema, None if way == "uncut" else 5)
    if way == "trainer":
        loader = torch.utils.data.DataLoader(DATA, batch_size=None)  # pyright: ignore
        ab.Trainer(step, loader, progress=False).fit(epochs=1)
    for x, y in () if way == "trainer" else DATA:
        if way == "window":
            with step.window() as window:
                window.add((x[:7], y[:7]))
                window.add((x[7:], y[7:]))
                window.update()
        else:
            step((x, y))
    own = step.model.weight.detach().clone()  # pyright: ignore
    with ema.weights():
        torch.testing.assert_close(step.model.weight.detach(), right(), rtol=LIMIT, atol=LIMIT)  # pyright: ignore
    assert torch.equal(step.model.weight, own)  # pyright: ignore
    assert ema.updates == UPDATES


def test_a_loss_for_another_loop_is_refused() -> None:
    with pytest.raises(PlanError, match=r"got an ab\.BatchLoss of Linear\. Your loop makes the update"):
        ab.BatchLoss(nn.Linear(2, 1), nn.MSELoss(), callbacks=[ab.EMA()])
