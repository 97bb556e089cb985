"""SyncBatchNorm over ranks: one micro-batch per rank is exact; what would split rows further is refused."""

from typing import Any

import pytest
import torch

from anybatch.testing import relative_error, tolerance
from tests.faults.faulty import NO_MEMORY
from tests.parallel import synced
from tests.parallel.spawned import Ranks

FLOAT64 = tolerance(torch.float64, 4)


@pytest.mark.parametrize("loss", synced.LOSSES)
@pytest.mark.parametrize("sizes", [(5, 3), (7, 1), (2, 6)])
def test_one_micro_batch_per_rank_is_the_whole_batch(two: Ranks, sizes: Any, loss: str) -> None:
    first, second = two.run(synced.train, sizes, loss, {"clip_norm": 0.5})
    alone = synced.train(0, 1, [8], loss, {"clip_norm": 0.5})
    assert [*map(str, first["parameters"])] == [*map(str, second["parameters"])]
    for part in ("parameters", "buffers"):
        assert relative_error(first[part], alone[part]) <= FLOAT64
    for one, other in zip(first["reports"], alone["reports"], strict=True):
        assert one == pytest.approx(other, rel=FLOAT64)
    assert "SyncBatchNorm" in first["unchecked"]


def test_what_would_split_rows_further_is_refused(two: Ranks) -> None:
    for told in two.run(synced.refused):
        assert "got [2, 1] on ranks 0 to 1: the batch is split over ranks" in told["cut"]
        assert "got [1, 0] on ranks" in told["empty"]
        for name in ("memory", "recompute", "precision='fp16-mixed'", "non_finite='drop'"):
            assert f"got {name}, which may run" in told[name.partition("=")[0]]
        assert "another process group in 1, 4" in told["group"]
        assert "in training on ranks [0] only" in told["mode"]
        assert "split over ranks, got module 1:" in told["plain"]
        assert "split over ranks, got module 1" in told["window"]
        assert "split over ranks, got module 1" in told["plain window"]
        assert told["after"] == "no error"


@pytest.mark.parametrize("error", [NO_MEMORY, KeyboardInterrupt()])
def test_a_rank_that_fails_in_the_layer_leaves_all_as_it_was_and_ends_the_run(
    error: BaseException, two: Ranks
) -> None:
    first, second = two.run(synced.interrupted, error)
    expected = "OutOfMemoryError: " if error is NO_MEMORY else type(error).__name__
    assert second[0].startswith(expected)
    assert (error is not NO_MEMORY) or "it was not run again" in second[0]
    for said in (first, second):
        assert said[1].startswith("RankError: Expected all ranks at the same step")
