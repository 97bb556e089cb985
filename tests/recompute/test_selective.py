"""Which operations are kept, and how often they can be used."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from anybatch.recompute import selective
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


@pytest.mark.parametrize("passes", [1, 3])
def test_products_are_kept_and_the_rest_is_rebuilt(passes: int) -> None:
    ran = backward(lambda a, b: (a @ b).tanh().exp().sin(), *leaves((3, 4), (4, 5)), passes=passes)
    assert ran["mm"] == 2 * passes  # those of the gradients
    assert ran["tanh"] == ran["exp"] == passes


@pytest.mark.parametrize(
    ("forward", "shapes", "kept"),
    [
        (torch.conv2d, ((1, 2, 4, 4), (3, 2, 3, 3)), "convolution"),
        pytest.param(
            torch.nn.functional.scaled_dot_product_attention,
            ((1, 2, 4, 8),) * 3,
            "attention",
            marks=needs_cpu,  # which has a kernel for it
        ),
    ],
)
def test_convolutions_and_attention_are_kept(forward: Any, shapes: Any, kept: str) -> None:
    ran = backward(lambda *given: forward(*given).tanh().exp(), *leaves(*shapes))
    assert not any(kept in name and "backward" not in name for name in ran)
    assert any(kept in name for name in ran)
    assert ran["tanh"] == 1


def test_attention_that_draws_is_rebuilt() -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    given = [torch.empty(0)] * 3
    found = [selective._policy(None, op, *given, *more) for more in ((), (0.1,))]
    found.append(selective._policy(None, op, *given, dropout_p=0.1))
    assert [one.name for one in found] == ["MUST_SAVE", "PREFER_RECOMPUTE", "PREFER_RECOMPUTE"]


def test_what_was_changed_in_place_is_rebuilt() -> None:
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b).mul_(2).tanh_().exp()

    a, b = leaves((3, 4), (4, 5))
    backward(forward, a, b)
    assert torch.equal(a.grad, torch.autograd.grad(forward(a, b).sum(), a)[0])


class Chunked(nn.Module):
    """Adds in place to a part of a product, without a new version."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(6, 12), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.wide(x).unsafe_chunk(2, -1)
        return self.out(first.add_(second.sigmoid()).tanh())


class Written(nn.Module):
    """Writes to `.data` of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        z = y.tanh()
        y.data.mul_(0.5)
        return self.out(z * y)


class First(nn.Module):
    """The first output of a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(6, 6, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "chunk and add": Chunked,
    ".data": Written,
    **{f"{kind.__name__}": partial(First, kind) for kind in (nn.GRU, nn.LSTM, nn.RNN)},
    "GRU of two layers": partial(First, nn.GRU, num_layers=2, dropout=0.3),
    "both directions": lambda: nn.Sequential(First(nn.GRU, bidirectional=True), nn.Linear(12, 6)),
    **{
        f"attention {p}": partial(nn.TransformerEncoderLayer, 6, 2, 12, p, batch_first=True)
        for p in (0.0, 0.2)
    },
    "in place": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Dropout(0.3), nn.Linear(9, 6)),
}


@needs_cpu  # the simulated device has no fused GRU
@pytest.mark.parametrize("policy", ["selective", "recompute", "offload"])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_policy_gives_the_same_bits(name: str, policy: str) -> None:
    found: list[list[Tensor | None]] = []
    for one in (None, {"1": policy}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), BLOCKS[name](), nn.Linear(6, 3)).double()
        batch = torch.randn(8, 5, 6).double(), torch.randn(8, 5, 3).double()
        options = ab.Options(check=False, recompute=one)
        torch.manual_seed(1)
        ab.BatchLoss(model, nn.MSELoss(), options=options)(batch).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None and b is not None)
