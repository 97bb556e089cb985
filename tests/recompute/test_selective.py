"""Which operations are kept, and how often they can be used."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from anybatch.recompute.selective import contexts
from tests.device import needs_cpu


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def backward(forward: Any, *tensors: Tensor, passes: int = 1) -> Counter[str]:
    loss = checkpoint(forward, *tensors, use_reentrant=False, context_fn=contexts).sum()
    with Counts() as counts:
        for left in reversed(range(passes)):
            loss.backward(retain_graph=left > 0)
    return counts.ran


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


ATTENTION = (torch.nn.functional.scaled_dot_product_attention, ((1, 2, 4, 8),) * 3, "attention")


@pytest.mark.parametrize(
    ("forward", "shapes", "kept"),
    [
        (torch.conv2d, ((1, 2, 4, 4), (3, 2, 3, 3)), "convolution"),
        pytest.param(*ATTENTION, marks=needs_cpu),  # which has a kernel for it
    ],
)
def test_convolutions_and_attention_are_kept(forward: Any, shapes: Any, kept: str) -> None:
    ran = backward(lambda *given: forward(*given).tanh().exp(), *leaves(*shapes))
    assert not any(kept in name and "backward" not in name for name in ran)
    assert any(kept in name for name in ran)
    assert ran["tanh"] == 1
