"""What is moved, how often, and when it is let go."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.core.errors import PlanError
from anybatch.recompute import offload as module
from anybatch.recompute.offload import HostLink, Offload
from tests.device import needs_cpu

pytestmark = needs_cpu  # devices with streams are in tests/accelerator


class Watched(HostLink):
    """Notes the journeys, and waits like a device: what is not waited for may not be freed."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def away(self, flat: Tensor) -> tuple[Tensor, Any]:
        self.log.append(mark := f"away {flat.numel()}")
        return super().away(flat)[0], mark

    def back(self, host: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        self.log.append(mark := f"back {host.numel()}")
        return super().back(host, device)[0], mark

    def wait(self, mark: Any) -> None:
        self.log.append(f"wait {mark}")


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Watched:
    link = Watched()
    monkeypatch.setattr(module, "HostLink", lambda: link)
    monkeypatch.setattr(module, "SMALLEST", 40)
    return link


def leaf(size: int) -> Tensor:
    return torch.randn(size, requires_grad=True)


def test_what_was_written_to_moves_again_and_is_refused(link: Watched) -> None:
    offload, x = Offload([]), leaf(20)
    with offload.saving("cpu"):
        y = x * 1
        first = y * y
        y.detach().mul_(0)
        second = torch.sin(y)
    assert link.log.count("away 20") == 2
    second.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, torch.ones(20))
    with pytest.raises(PlanError, match="changed in place"):
        first.sum().backward()


def test_where_room_is_tight_only_small_storages_come_ahead(link: Watched) -> None:
    offload, x = Offload([], is_tight=True), leaf(20)
    y = x
    with offload.saving("cpu"):
        for size in (10, 15, 80, 20, 80):
            y = torch.cat([y] * 8)[:size].exp()
    y.sum().backward()
    offload.close()
    # Beside 20 there is no room for the 80 before it; beside 15 there is for 10.
    back = [one for one in link.log if "back" in one]
    assert back[:4] == ["back 20", "wait back 20", "back 80", "wait back 80"]
    assert back[4:] == ["back 15", "back 10", "wait back 15", "wait back 10"]


def test_rows_of_the_batch_stay(link: Watched) -> None:
    """With them the whole batch would come back, once for each micro-batch."""
    offload, batch, weight = Offload([]), torch.randn(80), leaf(20)
    with offload.saving("cpu"):
        y = (weight * batch[:20]).exp()
    assert [one for one in link.log if "away" in one] == ["away 20"]
    y.sum().backward()
    assert torch.equal(weight.grad, y.detach() * batch[:20])


def test_a_graph_that_no_backward_frees_is_let_go(link: Watched) -> None:
    """Small tensors are not moved, and may be the result of the operation that saves them."""
    with Offload([]).saving("cpu"):
        y = leaf(2).exp()
    left = weakref.ref(y.untyped_storage())
    del y
    assert left() is None
    assert not link.log


def test_memory_is_let_go(link: Watched) -> None:
    offload, x = Offload([]), leaf(20)
    freed: list[str] = []
    y = x
    with offload.saving("cpu"):
        for name in ("first", "second", "third"):
            y = y.exp()
            weakref.finalize(y.untyped_storage(), freed.append, name)
    gc.collect()
    assert freed == ["first", "second"]  # the third is needed first
    y.sum().backward()
    del y
    offload.close()
    gc.collect()
    assert freed[2:] == ["third"]
