"""Tests of recordings: owners told from beginnings and ends, rounding, and what is continued."""

from array import array

import pytest

from anybatch.memory.recording import (
    ACTIVATIONS,
    GRADIENTS,
    OTHER,
    PARAMETERS,
    WORKSPACE,
    Mark,
    Recording,
    continued,
    find_owners,
)


def mark(event: int, phase: str, micro_batch: int = 0, operations: int = 0) -> Mark:
    return Mark(event, phase, micro_batch, "", operations, 0, 0)


def recording(events: list[tuple[int, int, int]], marks: list[Mark]) -> Recording:
    storages, before, after = zip(*events, strict=True)
    count = max(storages) + 1
    return Recording(
        storages=array("q", storages),
        before=array("q", before),
        after=array("q", after),
        marks=tuple(marks),
        owners=(OTHER,) * count,
        places=("",) * count,
    )


def test_sizes_are_rounded_up_to_the_granule() -> None:
    one = recording([(0, 0, 1), (1, 0, 513), (0, 1, 512), (0, 512, 0)], [mark(0, "start")])
    assert one.alive() == [1, 514, 1025, 513]
    assert one.alive(512) == [512, 1536, 1536, 1024]
    assert (one.peak(), one.peak(512)) == (1025, 1536)


def test_owners_are_told_from_when_storages_begin_and_end() -> None:
    phases = ["start", "forward", "loss", "backward", "recompute", "backward", "update"]
    marks = [mark(2 * index, phase) for index, phase in enumerate(phases)]
    told = {  # the event of its beginning and of its end, and whose it is
        0: (0, None, PARAMETERS),
        1: (2, 3, WORKSPACE),  # gone in forward
        2: (4, 7, ACTIVATIONS),  # kept for backward
        3: (6, 11, WORKSPACE),  # gone in backward
        4: (8, 10, ACTIVATIONS),  # rebuilt
        5: (9, None, ACTIVATIONS),  # kept by backward, but begun in a forward that was rebuilt
        6: (12, 13, WORKSPACE),  # gone in the update
    }
    events = {begin: (name, 8) for name, (begin, _, _) in told.items()}
    events |= {end: (name, 0) for name, (_, end, _) in told.items() if end is not None}
    storages, sizes = zip(*[events.get(at, (0, 8)) for at in range(14)], strict=True)
    found = find_owners(list(storages), list(sizes), marks, [12], {0: PARAMETERS})
    assert list(found) == [owner for _, _, owner in told.values()]


@pytest.mark.parametrize(("ends", "owner"), [([3], GRADIENTS), ([], WORKSPACE)])
def test_what_outlives_a_backward_is_a_gradient(ends: list[int], owner: int) -> None:
    marks = [mark(0, "start"), mark(1, "backward"), mark(3, "update")]
    found = find_owners([0, 1, 0, 1], [8, 8, 8, 0], marks, ends, {})
    assert found == [OTHER, owner]


def test_further_micro_batches_leave_what_the_middle_one_left() -> None:
    phases = [mark(0, "start", -1), mark(1, "forward", 0), mark(3, "forward", 1, 5), mark(6, "forward", 2, 9)]
    events = [(0, 0, 100), (1, 0, 8), (1, 8, 4), (2, 0, 16), (2, 16, 4), (3, 0, 2), (4, 0, 16), (4, 16, 4)]
    run = recording(events, phases)
    many = continued(run, 3, 10)
    assert many.alive()[-1] == run.alive()[-1] + 7 * (4 + 2)
    assert [one.micro_batch for one in many.marks] == [-1, 0, 1, 9]
    assert many.marks[-1].operations == 9 + 7 * 4
    assert many.alive()[:3] == run.alive()[:3]


def test_a_micro_batch_may_be_several_forwards() -> None:
    """The first of two leaves what the second lets go."""
    phases = [mark(0, "start", -1), *[mark(3 * one + 1, "forward", 2 * one, one) for one in range(3)]]
    phases += [mark(3 * one + 2, "forward", 2 * one + 1, one) for one in range(3)]
    events = [(0, 0, 100)]
    for one in range(3):
        events += [(2 * one + 1, 0, 50), (2 * one + 2, 0, 4), (2 * one + 1, 50, 0)]
    run = recording(events, sorted(phases))
    assert run.forwards == 6
    many = continued(run, 3, 10)
    assert many.alive()[-1] == 100 + 10 * 4
    assert many.peak() == 100 + 10 * 4 + 50
    assert [one.micro_batch for one in many.marks] == [-1, 0, 1, 2, 3, 18, 19]
