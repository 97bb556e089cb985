"""Whole-batch losses: what cannot be exact in two passes is refused, and nothing is lost."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step
from anybatch.core.errors import LossError, NonFiniteLossError
from anybatch.losses.whole_batch import WholeBatch
from tests.losses.whole_losses import encoder, labelled, ranked, sup_con, take
from tests.snapshots import same_as_before

ROWS, MICRO_BATCH = 23, 4


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Every law is stated in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_a_second_pass_that_differs_is_refused() -> None:
    class Own(nn.Module):
        """Draws from a generator that nobody can put back."""

        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(0)

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rand(x.shape, generator=self.generator)

    model = nn.Sequential(encoder(), Own())
    step = Step(model, WholeBatch(sup_con), torch.optim.SGD(model.parameters(), lr=1.0), micro_batch=4)
    batch = labelled(ROWS)
    with pytest.raises(LossError, match="repeat the first"), same_as_before(step):
        step(batch)


def test_a_forward_that_writes_to_parameters_is_refused() -> None:
    def write(*_: Any) -> None:
        model[-1].weight.mul_(0.5)

    model = encoder().append(nn.Linear(4, 4).requires_grad_(False))
    model.register_forward_pre_hook(write)
    with pytest.raises(LossError, match=r"leave parameters alone.*\b4\.weight"):
        take(model, WholeBatch(sup_con), labelled(ROWS), MICRO_BATCH)


def test_rank_losses_name_their_bad_rows_too() -> None:
    model, batch = nn.Sequential(encoder(outputs=1), nn.Flatten(0)), ranked(ROWS)
    batch["input"][7] = torch.nan
    loss = WholeBatch(lambda scores, relevance: (scores[:, None] - scores[None]).square().mean())
    with pytest.raises(NonFiniteLossError, match=r"rows \[7\]"):
        take(model, loss, batch, MICRO_BATCH)
