"""Tests of what contestants under a limit are counted by: rows, updates, and what was for nothing."""

import torch
from torch import nn

from benchmarks.memory_contestants import IGNORE, ROWS, UPDATES, Job, Tally, planned, rows_of, surviving


class Words(nn.Module):
    """Predicts each token from itself; computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(self.embed(input_ids)).flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(scores, labels.flatten(), ignore_index=IGNORE)}


def job() -> Job:
    return Job(build=Words, rows=rows_of(7), num_bytes=2**30, tally=Tally())


def test_ours_make_every_update() -> None:
    for contestant in (planned, surviving):
        work = job()
        contestant(work)
        assert work.tally.made == [ROWS] * UPDATES
        assert work.tally.lost == 0
        assert work.tally.rows >= ROWS * UPDATES  # planning sends some through the model, too
        assert 0 < work.tally.first_s < work.tally.seconds


def test_what_was_made_before_a_restart_is_lost() -> None:
    work = job()
    model, optimizer = work.prepare()
    batch = next(work.batches(ROWS))
    for _ in range(2):
        model(**batch)["loss"].backward()
        optimizer.step()
    assert (work.tally.made, work.tally.lost) == ([ROWS, ROWS], 0)
    model, optimizer = work.prepare()
    assert (work.tally.made, work.tally.lost, work.tally.rows) == ([], 2, 2 * ROWS)
    assert work.tally.model is model
