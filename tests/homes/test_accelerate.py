"""A model that accelerate shards makes the update of one process."""

import pytest

from tests.parallel.spawned import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("accelerate")

from tests.homes.accelerates import shards_on_rank  # noqa: E402


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the variables that accelerate sets."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_that_accelerate_shards_makes_the_update_of_one_process(two: Ranks, accumulate: int) -> None:
    """With 2, accelerate turns FSDP's reduction off in every other call."""
    for errors in two.run(shards_on_rank, accumulate, seconds=120.0):
        assert max(errors) < 1e-12
