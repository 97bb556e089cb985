"""A step's own state: with it a resumed loop has the bits of the unbroken one; warnings of use; asdict."""

import io
import json
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core import CheckpointError
from tests.zoo import Limited, dropout

DRAW = torch.Generator().manual_seed(0)
DATA = [(torch.randn(12, 4, generator=DRAW), torch.randn(12, 1, generator=DRAW)) for _ in range(6)]


def made(precision: Any, **options: Any) -> ab.Step:
    """A step in which more than five rows run out of memory."""
    torch.manual_seed(0)
    model = Limited(5, dropout(4, 1, p=0.1))
    optimizer = torch.optim.AdamW(model.parameters())
    return ab.Step(model, nn.MSELoss(), optimizer, precision=precision, **options)


@pytest.mark.filterwarnings("ignore:Expected to find the same loss")
@pytest.mark.parametrize("precision", ["float32", "bf16-true", "fp16-mixed"])
def test_loop_that_was_saved_and_loaded_is_the_unbroken_one(precision: str) -> None:
    whole, file, cuts = made(precision, micro_batch=6), io.BytesIO(), list[tuple[int, ...]]()
    for number, batch in enumerate(DATA):
        if number == 3:
            parts = whole.model.state_dict(), whole.optimizers[0].state_dict(), whole.state_dict()
            torch.save(parts, file)
        cuts.append(whole(batch).cut)
    again = made(precision, micro_batch=6)
    file.seek(0)
    model, optimizer, own = torch.load(file, weights_only=True)
    again.model.load_state_dict(model)
    again.optimizers[0].load_state_dict(optimizer)
    again.load_state_dict(own)
    reports = [again(batch) for batch in DATA[3:]]
    assert [report.cut for report in reports] == cuts[3:]  # what did not fit is known
    assert reports[-1].update == 6
    assert not any(report.redone for report in reports)
    assert again.scale.value == whole.scale.value
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
        full = whole.masters.of(one), again.masters.of(other)
        assert full == (None, None) or torch.equal(*full)  # pyright: ignore


def test_report_as_a_dict_goes_into_a_log() -> None:
    report = made("float32", micro_batch=4)(DATA[0])
    found = report.asdict()
    assert json.loads(json.dumps(found))["cut"] == [4, 4, 4]
    assert found["loss"] == report.loss
    assert found["checked"] is report.checked


def test_another_state_is_refused_before_anything_is_loaded() -> None:
    model = nn.Linear(4, 1)
    step = ab.Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    step(DATA[0])
    for state in ({}, model.state_dict(), {**step.state_dict(), "updates": 9} | {"random": None}):
        state = {name: one for name, one in state.items() if one is not None}
        with pytest.raises(CheckpointError, match=r"Expected the result of step.state_dict\(\), got one wi"):
            step.load_state_dict(state)
    assert step.state_dict()["updates"] == 1
