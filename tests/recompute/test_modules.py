"""Every policy on modules of many kinds: the same bits as without it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.recompute import POLICIES, offload as offload_module
from tests.recompute.models import run
from tests.snapshots import changes
from tests.zoo import Made

WIDTH, LENGTH = 8, 5
pytestmark = pytest.mark.filterwarnings("ignore:.*weights are not part of single contiguous chunk")


def function(of: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a linear layer in front of a function."""
    return Made(lambda self, x: of(self.linear(x)), linear=nn.Linear(WIDTH, WIDTH))


def first(inner: nn.Module, given: int = 1) -> nn.Module:
    """Return the first output of a module that has several; attention is given its arguments thrice."""
    return Made(lambda self, x: self.inner(*[x] * given)[0], inner=inner)


def add_to_chunk(y: Tensor) -> Tensor:
    left, right = y.unsafe_chunk(2, -1)
    return left.add_(right).sin()


def add_to_view(y: Tensor) -> Tensor:
    y[..., :2] += 1
    return y.tanh()


def attend(dropout: float) -> Callable[[Tensor], Tensor]:
    return lambda y: F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None], dropout_p=dropout)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: first(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "GRU of two layers": lambda: first(nn.GRU(WIDTH, WIDTH, 2, dropout=0.3, bidirectional=True)),
    "LSTM": lambda: first(nn.LSTM(WIDTH, WIDTH, bidirectional=True)),
    "RNN": lambda: first(nn.RNN(WIDTH, WIDTH, 2, dropout=0.3, nonlinearity="relu")),
    "attention": lambda: function(attend(0.0)),
    "attention with dropout": lambda: function(attend(0.3)),
    "heads with dropout": lambda: first(nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True), 3),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True),
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(True), nn.Dropout(0.3)),
    "RReLU in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU(inplace=True)),
    "convolution in place": lambda: nn.Sequential(nn.Conv1d(LENGTH, 4, 3), nn.SiLU(inplace=True)),
    "chunk and add": lambda: function(add_to_chunk),
    "view and add": lambda: function(add_to_view),
    "rows of a view": lambda: function(lambda y: y.view(-1, 4).mul_(2).view_as(y).sigmoid()),
    "transposed": lambda: function(lambda y: (y.transpose(1, 2) @ y).add_(1).softmax(-1)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", MODULES)
def test_the_same_bits(kind: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_module, "SMALLEST", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MODULES[kind]())
    x = torch.randn(4, LENGTH, WIDTH)
    assert changes(run(model, x, ()), run(model, x, (("1", policy),))) == []
