"""What may be chosen, and in which steps."""

import pytest
import torch

from anybatch import Plan
from anybatch.core.batch import cut_sizes
from anybatch.memory.device import find_device
from tests.budgets import Build, adamw, foreach, make, question, rows_of, sgd


@pytest.mark.parametrize("rows", [1, 2, 7, 24, 1000, 10**6])
def test_sizes_fall_from_all_rows_to_one_and_each_makes_another_number(rows: int) -> None:
    sizes = question(make(), rows_of(2), rows).all_sizes
    counts = [-(-rows // size) for size in sizes]
    assert (sizes[0], sizes[-1]) == (rows, 1)
    assert sizes == sorted(set(sizes), reverse=True)
    assert counts == sorted(set(counts))
    assert len(sizes) < 80
    # The fewest rows that make so many micro-batches: with one row less there would be one more.
    assert all(
        len(cut_sizes(rows, size - 1)) > count for size, count in zip(sizes, counts, strict=True) if size > 1
    )


def test_sizes_that_are_settled_or_refused() -> None:
    step, batch = make(), rows_of(24)
    assert question(step, batch, sizes=(5,)).all_sizes == [5]
    assert question(step, batch, cut_refused="rows meet").all_sizes == [24]


def test_offload_is_no_choice_where_the_device_is_the_host() -> None:
    step, batch = make(), rows_of()
    assert question(step, batch).policies == ("recompute", "selective")
    assert question(step, batch, device=find_device("cuda:a100")).policies == (
        "recompute",
        "selective",
        "offload",
    )
    assert question(step, batch, blocks=()).policies == ()


def test_uniform_plans_keep_what_is_settled() -> None:
    step, batch = make(), rows_of(24)
    found = question(step, batch).uniform(6, "selective")
    assert (found.rows, found.micro_batch) == (24, 6)
    assert found.blocks == tuple((f"blocks.{index}", "selective") for index in range(3))
    assert question(step, batch).uniform(6, "keep").blocks == ()
    settled = Plan(rows=24, micro_batch=24, blocks=(("blocks.1", "recompute"),))
    assert question(step, batch, like=settled, blocks=()).uniform(6, "keep").blocks == settled.blocks


def fused(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)  # type: ignore[arg-type]


def scarcely(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "device", "expected"),
    [
        (adamw, "cpu", False),
        (adamw, "cuda:t4", True),
        (foreach, "cpu", True),
        (scarcely, "cuda:t4", False),
        (fused, "cpu", False),
        (fused, "cuda:t4", False),
        (sgd, "cuda:t4", True),
    ],
)
def test_optimizers_that_could_go_one_by_one(optimizer: Build, device: str, expected: bool) -> None:
    assert question(make(optimizer=optimizer), rows_of(), device=find_device(device)).may_spare is expected
