"""What is moved, how often, and when it is let go."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.core import is_moving
from anybatch.core.errors import PlanError
from anybatch.recompute import offload as module
from anybatch.recompute.offload import HostLink, Offload
from tests.device import needs_cpu

pytestmark = needs_cpu  # devices with streams are in tests/accelerator


class Watched(HostLink):
    """Notes the journeys, and waits like a device: what is not waited for may not be freed."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.moving: list[bool] = []

    def away(self, flat: Tensor) -> tuple[Tensor, Any]:
        self.log.append(mark := f"away {flat.numel()}")
        self.moving.append(is_moving())
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


def test_a_storage_moves_once(link: Watched) -> None:
    offload, x = Offload([]), leaf(20)
    with offload.saving("cpu"):
        y = x.exp()  # saves its result
        z = y[2:7] * y[5:10] * y.view(4, 5)[0]  # saves views of it
    z.sum().backward()
    assert link.log[0] == "away 20"
    assert all(int(one.split()[-1]) < 20 for one in link.log[1:])  # products of views
    assert all(link.moving)
    y = x.exp()
    expected = (y[2:7] * y[5:10] * y.view(4, 5)[0]).sum()
    assert torch.equal(x.grad, torch.autograd.grad(expected, x)[0])


def test_what_was_written_to_moves_again_and_is_refused(link: Watched) -> None:
    offload, x = Offload([]), leaf(20)
    with offload.saving("cpu"):
        y = x * 1
        first = y * y
        y.detach().mul_(0)
        second = torch.sin(y)
    assert link.log == ["away 20", "away 20"]
    second.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, torch.ones(20))
    with pytest.raises(PlanError, match="changed in place"):
        first.sum().backward()


def test_what_is_small_or_stays_is_not_moved(link: Watched) -> None:
    weight, x = leaf(20), leaf(20)
    offload = Offload([weight])
    with offload.saving("cpu"):
        y = (x.sum() * weight.view(4, 5).t()).sum() + leaf(9).exp().sum()
    assert link.log == []
    y.backward()
    assert torch.equal(weight.grad, x.detach().sum().expand(20))


def test_blocks_leave_one_behind_the_other_and_come_back_ahead(link: Watched) -> None:
    offload, x = Offload([]), leaf(20)
    y = x
    for size in (20, 30, 40):
        with offload.saving("cpu"):
            y = torch.cat([y, y[:10]])[:size].exp()
    y.sum().backward()
    offload.close()
    # A block is let go when the next one is done. The last one's is still there; the one before it starts.
    forward = ["away 20", "away 30", "wait away 20", "away 40", "wait away 30"]
    assert link.log == [*forward, "back 30", "back 20", "wait back 30", "wait back 20"]


def test_what_is_not_taken_is_waited_for(link: Watched) -> None:
    offload, x = Offload([]), leaf(20)
    with offload.saving("cpu"):
        y = x.exp()
    with offload.saving("cpu"):
        z = y.exp()
    torch.autograd.grad(z.sum(), y, retain_graph=True)
    assert "back 20" in link.log
    assert "wait back 20" not in link.log
    offload.close()
    assert "wait back 20" in link.log


def test_memory_is_let_go(link: Watched) -> None:
    offload, x = Offload([]), leaf(20)
    freed: list[str] = []
    y = x
    for name in ("first", "second", "third"):
        with offload.saving("cpu"):
            y = y.exp()
            weakref.finalize(y.untyped_storage(), freed.append, name)
        gc.collect()
    assert freed == ["first", "second"]  # the third is needed first
    y.sum().backward()
    del y
    gc.collect()
    assert freed[2:] == ["third"]


def test_what_is_filled_after_it_was_saved_is_moved_full(link: Watched) -> None:
    found: list[Tensor | None] = []
    for first in ("nothing", "cpu"):
        torch.manual_seed(0)
        offload, x = Offload([]), leaf(20)
        for _ in range(2):
            with offload.saving(first):
                y = torch.nn.functional.rrelu(x * 1, training=True)
        with offload.saving("cpu"):
            z = y.exp()
        z.sum().backward()
        found.append(x.grad)
    assert torch.equal(found[0], found[1])
    assert link.log.count("back 20") == 2


def test_blocks_that_are_not_moved_take_part(link: Watched) -> None:
    offload, x = Offload([]), leaf(20)
    y = x
    for size, kind in ((20, "cpu"), (30, ""), (40, ""), (50, "cpu"), (60, "")):
        with offload.saving(kind) as visit:
            y = torch.cat([y, y[:10]])[:size].exp()
        offload.watch(visit, y)
        y.register_hook(lambda _, size=size: link.log.append(f"reaches {size}"))
    forward = ["away 20", "wait away 20", "away 50", "wait away 50"]
    assert link.log == forward  # let go when the next block is done, though that one keeps what it saves
    y.sum().backward()  # 50 is on its way back before backward comes there
    backward = ["reaches 60", "back 50", "reaches 50", "wait back 50", "reaches 40", "reaches 30"]
    assert link.log == [*forward, *backward, "back 20", "reaches 20", "wait back 20"]
