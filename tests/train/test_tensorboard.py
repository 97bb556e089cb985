"""TensorBoard: what is written can be read again; without the package the error names the extra."""

import sys
from pathlib import Path

import pytest
import torch

import anybatch as ab
from anybatch.core.errors import PlanError
from anybatch.train.tensorboard import TensorBoard
from tests.train.runs import UPDATES, make_step, make_trainer


def test_without_the_package_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PlanError, match=r"anybatch\[tensorboard\]"):
        make_trainer(callbacks=[TensorBoard(tmp_path)]).fit(epochs=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_figures_are_there_once_for_each_update(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore
        EventAccumulator,
    )

    flow = ab.GradientFlow(torch.nn.Linear(1, 1), every=2)
    step = make_step(callbacks=[flow])
    flow.model = step.model
    board = TensorBoard(tmp_path / "board", every=1)
    trainer = make_trainer(tmp_path / "run", step=step, callbacks=[board], save_every=1)
    trainer.fit(epochs=1)
    trainer.resume(tmp_path / "run")
    trainer.fit(epochs=2)
    found = EventAccumulator(str(tmp_path / "board")).Reload()
    for name in ("loss", "learning rate", "rows per second", "rows of a micro-batch", "gradient norm"):
        assert [event.step for event in found.Scalars(name)] == [*range(1, 2 * UPDATES + 1)], name
    assert [event.value for event in found.Scalars("rows of a micro-batch")] == [3, 3, 2] * 2
    norms = found.Scalars("flow norm/4")
    assert [event.step for event in norms] == [1, 3, 5]
    assert f"{norms[-1].value:.4g}" == f"{flow.history[-1].norm[-1]:.4g}"
    assert [event.step for event in found.Scalars("validation/accuracy")] == [UPDATES, 2 * UPDATES]
