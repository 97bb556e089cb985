"""Cuts: their parts, in rows and in words, and a batch that is nobody else's."""

import torch

from anybatch.check.rows import Cut, Part

BATCH = torch.arange(40.0).view(8, 5), torch.arange(8)


def cut(micro_batch: int) -> Cut:
    return Cut(given=BATCH, micro_batch=micro_batch, part=Part.whole(8))


def test_cut_says_its_parts_in_rows_and_words() -> None:
    assert [part.rows for part in cut(3).parts] == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert (cut(3).words, cut(1).words) == ("3+3+2", "1 by 1")
    some = cut(3).only([6, 2])
    assert some.part == Part((6, 2), 8)
    assert some.given[0].equal(BATCH[0][[6, 2]])


def test_batch_is_of_its_own_and_in_the_dtype_that_is_asked_for() -> None:
    for dtype in (None, torch.float64):
        batch = cut(8).batch(dtype)
        x, y = next(iter(batch.cut(8)))
        assert (x.dtype, y.dtype) == (dtype or torch.float32, torch.int64)
        x.zero_()
    assert BATCH[0].any()


def test_samples_are_collated_part_by_part() -> None:
    samples = Cut(given=[1.0, 2.0, 3.0], micro_batch=2, part=Part.whole(3), collate=torch.tensor)
    found = list(samples.batch(torch.float64).cut(2))
    assert [micro.tolist() for micro in found] == [[1, 2], [3]]
    assert found[0].dtype == torch.float64
