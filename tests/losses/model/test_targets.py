"""Where targets come from."""

import pytest
import torch
from torch import Tensor

from anybatch.losses.model.intercept import Origin
from anybatch.losses.model.targets import Match, count, find
from anybatch.losses.reductions import CLASSES

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


def test_a_name_tells_labels_from_tokens() -> None:
    assert find(origin(LABELS), {"input_ids": LABELS, "labels": LABELS}) == [Match("labels", "as they are")]


def test_what_torch_would_refuse_cannot_be_the_target() -> None:
    matches = [Match("y", "as they are"), Match("y", "clamped")]
    labels = torch.tensor([0, 9, 4])
    assert count(origin(None, ignored=5, classes=5), matches, {"y": labels}) == 2


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
