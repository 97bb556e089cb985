"""What transformers' Trainer writes to its process is undone."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def host_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Undo what the Trainer writes to the environment, and the state that accelerate keeps."""
    import huggingface_hub
    import transformers
    from accelerate.state import AcceleratorState

    transformers.logging.set_verbosity_error()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = dict(os.environ)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
