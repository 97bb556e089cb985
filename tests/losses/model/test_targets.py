"""Where targets come from."""

import pytest
import torch
from torch import Tensor

from anybatch.losses.model.intercept import Origin
from anybatch.losses.model.targets import Match, count, find, leaves_of, rows_of
from anybatch.losses.reductions import CLASSES, ELEMENTS

LABELS = torch.tensor([[1, 2, -100], [3, 9, -100]])


def origin(target: Tensor | None, ignored: int = -100, classes: int = 12) -> Origin:
    return Origin(kind=CLASSES, settings={"ignore_index": ignored}, target=target, classes=classes)


@pytest.mark.parametrize(
    ("target", "transform"),
    [
        (LABELS, "as they are"),
        (LABELS.flatten().int(), "as they are"),
        (torch.tensor([2, -100, -100, 9, -100, -100]), "next"),
        (LABELS[:, 1:], "shifted"),
    ],
)
def test_targets_are_found(target: Tensor, transform: str) -> None:
    leaves = {"x": torch.ones(2, 3), "mask": LABELS > 0, "ids": LABELS + 1, "y": LABELS}
    assert find(origin(target), leaves) == [Match("y", transform)]


def test_clamped_positions() -> None:
    labels = torch.tensor([0, 9, 4])
    (match,) = find(origin(labels.clamp(0, 5), ignored=5), {"y": labels})
    assert match == Match("y", "clamped")
    assert count(origin(None, ignored=5), [match], {"y": labels}) == 2


def test_other_targets_are_not_found() -> None:
    assert find(origin(LABELS + 1), {"y": LABELS}) == []
    assert find(origin(None), {"y": LABELS}) == []
    elements = Origin(kind=ELEMENTS, settings={}, target=LABELS)
    assert find(elements, {"y": LABELS}) == []
    assert count(origin(None), [], {"y": LABELS}) is None


def test_a_name_tells_labels_from_tokens() -> None:
    assert find(origin(LABELS), {"input_ids": LABELS, "labels": LABELS}) == [Match("labels", "as they are")]


def test_two_that_weigh_the_same_agree_and_two_that_do_not_wait() -> None:
    matches = [Match("a", "as they are"), Match("b", "as they are")]
    assert count(origin(None), matches, {"a": LABELS, "b": LABELS}) == 4
    assert count(origin(None), matches, {"a": LABELS, "b": LABELS.clamp(min=0)}) is None


def test_what_torch_would_refuse_cannot_be_the_target() -> None:
    matches = [Match("y", "as they are"), Match("y", "clamped")]
    labels = torch.tensor([0, 9, 4])
    assert count(origin(None, ignored=5, classes=5), matches, {"y": labels}) == 2


def test_leaves_and_rows() -> None:
    assert list(leaves_of({"x": (LABELS, None)})) == ["['x'][0]"]
    assert list(leaves_of([LABELS, "text"])) == ["0"]
    assert rows_of([LABELS, torch.ones(2)]) == 2
    assert rows_of([LABELS, torch.ones(())]) == rows_of([]) == 0


IGNORED = torch.full((2, 3), -100)


@pytest.mark.parametrize(
    ("target", "padded", "transforms"),
    [
        (IGNORED.clone(), False, ["as they are", "next"]),  # not to be told
        (IGNORED.clone(), True, ["next"]),
        (IGNORED.flatten(), True, ["as they are"]),  # the very same memory
    ],
)
def test_targets_that_are_all_ignored(target: Tensor, padded: bool, transforms: list[str]) -> None:
    found = find(origin(target), {"y": IGNORED}, padded=padded)
    assert [match.transform for match in found] == transforms


def test_bytes_hold_no_ignored_value_and_are_found() -> None:
    labels = LABELS.clamp(min=0).to(torch.uint8)
    target = torch.nn.functional.pad(labels.long(), (0, 1), value=-100)[:, 1:]
    (match,) = find(origin(target), {"y": labels})
    assert match.transform == "next"
    assert count(origin(None), [match], {"y": labels}) == 4
