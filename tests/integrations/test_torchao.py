"""Linear layers in 8-bit floats, emulated where torchao is installed; and what is refused without it."""

import sys

import pytest
import torch
from torch import nn

from anybatch import Precision, Step
from anybatch.core.errors import PlanError
from anybatch.integrations.torchao import with_float8_linear


def test_a_device_without_eight_bit_floats_is_refused_and_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match="8-bit floats"):
        Step(model, nn.MSELoss(), optimizer, precision=Precision(compute="float8"))
    assert type(model[0]) is nn.Linear
    assert not model._forward_pre_hooks


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(PlanError, match="pip install torchao"):
        with_float8_linear(nn.Linear(16, 16), ())


def test_emulated_layers_train_the_same_parameters() -> None:
    pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3), nn.Linear(16, 16))
    weight, kept = model[0].weight, model[3]
    with_float8_linear(model, [kept], emulate=True)
    assert model[0].weight is weight
    assert [type(one).__name__ for one in model] == ["Float8Linear", "Tanh", "Linear", "Linear"]
    step = Step(
        model[:3],
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        micro_batch=16,
        precision="bf16-mixed",
    )
    batch = torch.randn(32, 16), torch.randint(3, (32,))
    losses = [step(batch).loss for _ in range(20)]
    assert losses[-1] < losses[0]
