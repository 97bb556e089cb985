"""Before the first comparison: float64 where it runs, the model itself where nothing else does."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.check import prepare as prepare_module
from anybatch.check.copies import Copied
from anybatch.check.prepare import Prepared, prepare
from anybatch.core.errors import BatchError, PlanError
from anybatch.testing import Perceptron


def ready(model: nn.Module, loss: object, batch: Any, **more: Any) -> Prepared:
    options = {"collate": None, "micro_batch": None, "rows": None, "batch_norm": None, "seed": 0} | more
    options.setdefault("start", time.perf_counter())
    return prepare(model, loss, batch, **options)


def rows(count: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 4), torch.randn(count, 1)


class Narrow(nn.Module):
    """Insists on float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Only float32."""
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return self.layer(x)


def test_float64_comes_first() -> None:
    found = ready(Perceptron(4, 1), nn.MSELoss(), rows())
    assert found.bench.subject.dtype == torch.float64
    assert found.notes == ()
    assert len(found.whole.part.rows) == 8


def test_a_model_that_cannot_be_widened_is_copied_as_it_is() -> None:
    found = ready(Narrow(), nn.MSELoss(), rows())
    assert isinstance(found.bench.subject, Copied)
    assert found.bench.subject.dtype is None
    assert "float32 only" in found.notes[0]


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = Perceptron(4, 1)
    model.last = model(torch.ones(1, 4))  # type: ignore[assignment]
    with pytest.raises(PlanError, match=r"copy\.deepcopy can copy, got RuntimeError: Only Tensors created"):
        ready(model, nn.MSELoss(), rows())


@pytest.mark.parametrize(
    ("options", "count"), [({"rows": 5}, 5), ({"micro_batch": 7}, 15), ({"rows": 100}, 20), ({}, 8)]
)
def test_rows_as_asked(options: dict[str, Any], count: int) -> None:
    assert len(ready(Perceptron(4, 1), nn.MSELoss(), rows(), **options).whole.part.rows) == count


def test_a_loss_that_holds_something_for_each_row_is_run_on_all_of_them() -> None:
    x, y = rows(12)
    loss = nn.BCEWithLogitsLoss(weight=torch.rand(12, 1))
    found = ready(Perceptron(4, 1), loss, (x, (y > 0).float()))
    assert len(found.whole.part.rows) == 12


def test_samples_are_collated_once_for_the_whole() -> None:
    samples = [torch.ones(length, 4) for length in (3, 1, 2, 3)]

    def collate(chosen: list[torch.Tensor]) -> Any:
        return nn.utils.rnn.pad_sequence(chosen, batch_first=True), torch.ones(len(chosen), 1, 1)

    def noisy(chosen: list[torch.Tensor]) -> Any:
        padded, target = collate(chosen)
        return padded + torch.rand_like(padded), target

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.sum(1, keepdim=True))

    found = ready(Mean(), nn.MSELoss(), samples, collate=collate)
    assert found.whole.data[0].shape == (4, 3, 4)
    assert found.samples is not None
    drawn = ready(Mean(), nn.MSELoss(), samples, collate=noisy)
    assert drawn.samples is None
    assert "random" in drawn.notes[0]


def test_error_of_the_model_itself_is_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        ready(Perceptron(3, 1), nn.MSELoss(), rows())
    with pytest.raises(BatchError, match="at least 2 rows"):
        ready(Perceptron(4, 1), nn.MSELoss(), rows(1))


def test_what_cannot_be_watched_or_trained_is_refused_in_words() -> None:
    with pytest.raises(PlanError, match="trainable parameters"):
        ready(nn.Identity(), nn.MSELoss(), rows())

    class Scripted(torch.jit.ScriptModule):
        pass

    with pytest.raises(PlanError, match="TorchScript at 1"):
        ready(nn.Sequential(nn.Linear(4, 1), Scripted()), nn.MSELoss(), rows())


def test_model_that_fails_as_a_copy_too_is_spared() -> None:
    seen: list[nn.Module] = []

    class Failing(Narrow):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self)
            raise RuntimeError("not today")

    model = Failing()
    with pytest.raises(RuntimeError, match="not today"):
        ready(model, nn.MSELoss(), rows())
    assert seen
    assert not any(one is model for one in seen)


def test_slow_float64_gives_way_and_two_rows_are_seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Narrow):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype == torch.float64:
                time.sleep(0.03)
            return self.layer(x)

    monkeypatch.setattr(prepare_module, "WIDE_S", 0.02)
    monkeypatch.setattr(prepare_module, "BUDGET_S", 0.0)
    found = ready(Slow(), nn.MSELoss(), rows())
    assert found.bench.subject.dtype is None
    assert "too long" in found.notes[0]
    assert len(found.whole.part.rows) == 2
    assert found.probed is not None
