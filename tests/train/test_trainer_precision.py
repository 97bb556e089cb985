"""Training in 16 bits: checkpoints in float32, and nothing lost without a word."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step, Total, WholeBatch
from anybatch.core.errors import CheckpointError
from anybatch.train import checkpoint
from anybatch.train.trainer import LAST
from tests.snapshots import same
from tests.train.runs import TRAIN, UPDATES, make_rows, make_step, make_trainer, stopped


@pytest.mark.parametrize("precision", ["bf16-true", "fp16-true"])
def test_checkpoints_hold_the_float32_weights(precision: str, tmp_path: Path) -> None:
    one = make_trainer(tmp_path, step=make_step("AdamW", precision=precision))
    one.fit(epochs=1)
    found = checkpoint.load(tmp_path / LAST)
    assert {value.dtype for value in found.model.values()} == {torch.float32, torch.int64}
    for name, parameter in one.step.model.named_parameters():
        if name.startswith("1."):  # BatchNorm stays in float32
            continue
        assert parameter.dtype == getattr(torch, str(one.step.precision.store))
        assert not torch.equal(found.model[name], parameter.float())  # there are more digits in it
        assert torch.equal(found.model[name].to(parameter.dtype), parameter)
    plain = make_step("AdamW").model
    checkpoint.restore(found, model=plain)  # into a float32 model, too
    assert same(dict(plain.state_dict()), found.model)
    state = found.optimizers[0][1]["state"]
    assert {value.dtype for entry in state.values() for value in entry.values()} == {torch.float32}


class Frozen(nn.Module):
    """A frozen layer and a buffer of numbers: both are stored short, and no float32 stands behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(3, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("factor", torch.full((4,), 1.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.trained(x)) * self.factor


def test_what_is_frozen_or_a_buffer_widens_where_only_the_model_is_restored(tmp_path: Path) -> None:
    model, other = Frozen(), Frozen()
    step = Step(
        model, nn.MSELoss(), torch.optim.SGD(model.trained.parameters(), lr=0.1), precision="bf16-true"
    )
    checkpoint.save(tmp_path / "a", model=model, optimizers=step.optimizers, masters=step.masters)
    found = checkpoint.load(tmp_path / "a")
    assert found.model["frozen.weight"].dtype == found.model["factor"].dtype == torch.bfloat16
    checkpoint.restore(found, model=other)
    assert torch.equal(other.factor, model.factor.float())
    assert torch.equal(other.trained.weight, step.masters.of(model.trained.weight))
    optimizer = torch.optim.SGD(other.trained.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=r"factor: bfloat16 \(4,\) there, float32 \(4,\) here"):
        checkpoint.restore(found, model=other, optimizers=[optimizer])
    with pytest.raises(CheckpointError, match=r"bias: float32 \(4,\) there, bfloat16 \(4,\) here"):
        checkpoint.restore(found, model=Frozen().bfloat16())


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("float32", torch.float32), ("bf16-mixed", torch.bfloat16), ("bf16-true", torch.float32)],
)
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), "whole"])
def test_validation_computes_as_training_does_and_metrics_as_they_like(
    loss: Any, precision: str, dtype: torch.dtype
) -> None:
    found: list[tuple[torch.dtype, bool]] = []

    def look(outputs: Tensor, targets: Tensor) -> Total:
        found.append((outputs.dtype, torch.is_autocast_enabled("cpu")))
        return Total(0.0, 1)

    if loss == "whole":
        loss = WholeBatch(lambda outputs, targets: nn.functional.cross_entropy(outputs.float(), targets))
    step = make_step(precision=precision, loss=loss)
    one = make_trainer(step=step, metrics={"look": look})
    one.evaluate(make_rows(7, seed=1))
    assert found
    assert set(found) == {(dtype, False)}


def spoiled(values: tuple[Tensor, Tensor], row: int) -> tuple[Tensor, Tensor]:
    values[0][row] = math.nan
    return values


@pytest.mark.parametrize(("policy", "dropped", "skipped"), [("drop", 3, 0), ("skip", 0, 1)])
def test_what_is_not_finite_is_counted_and_told(
    policy: str, dropped: int, skipped: int, tmp_path: Path
) -> None:
    step = make_step(non_finite=policy, precision="fp16-mixed")
    one = make_trainer(tmp_path, step=step, train=spoiled(make_rows(TRAIN), 4), save_every=1)
    (report,) = one.fit(epochs=1)
    assert (report.dropped, report.skipped) == (dropped, skipped)
    assert report.updates == UPDATES - skipped
    assert math.isfinite(report.loss)
    assert all(map(math.isfinite, report.validation.values()))
    text = (tmp_path / "log.txt").read_text()
    assert (" rows left out" in text, " steps without update" in text) == (bool(dropped), bool(skipped))
    steps = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [line for line in steps if line["event"] == "step"]
    assert sum(line.get("dropped", 0) for line in steps) == dropped
    assert sum(not line["updated"] for line in steps) == skipped
    assert all(line["scale"] > 1 for line in steps)


def test_counts_go_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train": spoiled(make_rows(TRAIN), 4), "save_every": 1}
    make_it = lambda *out, **more: make_trainer(*out, step=make_step(non_finite="drop"), **options, **more)  # noqa: E731
    (whole,) = make_it().fit(epochs=1)
    with pytest.raises(ZeroDivisionError):
        make_it(tmp_path, watchers=[stopped(("step", UPDATES), ZeroDivisionError())]).fit(epochs=1)
    again = make_it(tmp_path)
    again.resume(tmp_path)
    (found,) = again.fit(epochs=1)
    assert found.dropped == whole.dropped > 0
    assert found.loss == whole.loss
