"""What the commands do, as far as `test_cli.py` does not go through it."""

from pathlib import Path

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)
import torch

from anybatch.cli import main as cli
from anybatch.cli import train as actions
from anybatch.core.errors import PlanError
from anybatch.train.trainer import Trainer


def test_devices_by_name() -> None:
    assert actions.find_device("cpu") == torch.device("cpu")
    assert actions.find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(PlanError, match="meta"):
        actions.find_device("meta")


def test_interrupted_training_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(self: Trainer, *, epochs: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "fit", stop)
    out = tmp_path / "run"
    assert cli.main(["train", "lenet5", "--out", str(out), "--quiet", "--device", "cpu"]) == 130
    assert f"stopped after 0 updates; go on with: anybatch train --resume {out}" in capsys.readouterr().err
