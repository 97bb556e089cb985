"""The study of gradient compression: a small run trains every way, counts bytes and writes its report."""

from pathlib import Path

import pytest
import torch

from anybatch.data import Dataset, DataSplit
from benchmarks import compression


def made_up(count: int) -> Dataset:
    inputs, targets = torch.randn(count, 1, 32, 32), torch.arange(count) % 10
    return Dataset(inputs=inputs, targets=targets, name="made up", classes=tuple("0123456789"))


def test_a_small_run_trains_every_way_and_writes_a_report_that_can_be_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compression, "load", lambda source: DataSplit(train=made_up(64), test=made_up(20)))
    monkeypatch.setattr(compression, "WARMUP", 1)
    monkeypatch.setattr(compression, "WORST", 100.0)
    monkeypatch.setattr(compression, "POINTS", 100.0)
    arguments = ["--folder", str(tmp_path)]
    assert compression.main([*arguments, "--epochs", "2", "--seeds", "2"]) == 0
    (path,) = tmp_path.glob("compression-*.md")
    text = path.read_text()
    for way in compression.WAYS:
        assert f"| {way}" in text
    assert "246,824" in text
    assert "1,480" in text
    assert compression.main([*arguments, "--raw", str(path.with_suffix(".json"))]) == 0
    assert path.read_text() == text
    monkeypatch.setattr(compression, "RATIO", 1 / 200)
    assert compression.main([*arguments, "--raw", str(path.with_suffix(".json"))]) == 1
    assert "FAILED: DGC: bytes" in capsys.readouterr().out
