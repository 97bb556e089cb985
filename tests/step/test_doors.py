"""Every option is obeyed or refused by name at every door: a step, a window, `BatchLoss`, `foresee`."""

from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import tree
from anybatch.core.errors import AnybatchError
from tests.zoo import Made

DOORS = ("step", "window", "batch_loss", "foresee")
NOTHING_RUNS = "a plan runs no update, so there is nothing to hear or schedule"
X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3

LARGE = X.repeat(16, 1), Y.repeat(16)


def make_net() -> Any:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 3))

    def forward(self: Any, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.body(x if attention_mask is None else (x * attention_mask[..., None]).sum(1))

    return Made(forward, body=body, norm=body[1])


def play(
    door: str, *, batch: Any = (X, Y), training: bool = False, scheduler: Any = None, **given: Any
) -> Any:
    """Make one update, or a plan, through a door; return what was seen."""
    seen = SimpleNamespace(net=make_net(), report=None, plan=None, heard=[])
    seen.net.norm.train(training)
    optimizer = torch.optim.SGD(seen.net.parameters(), lr=1.0)
    seen.optimizer, before = optimizer, {name: p.detach().clone() for name, p in seen.net.named_parameters()}
    named = {one.name for one in fields(ab.Options)}
    options = {name: given.pop(name) for name in named & given.keys()}
    if scheduler is not None:
        options["scheduler"] = scheduler(optimizer)
    given |= {"options": ab.Options(**options)}
    if given.pop("listens", False):
        given["callbacks"] = [seen.heard.append]
    samples = [*zip(*batch, strict=True)] if isinstance(batch, tuple) and "collate" in given else None
    if door == "batch_loss":
        loss = ab.BatchLoss(seen.net, nn.CrossEntropyLoss(), **given)
        loss(samples or batch).backward()
        optimizer.step()
        seen.report = loss.report
    else:
        step = ab.Step(seen.net, nn.CrossEntropyLoss(), optimizer, **given)
        if door == "foresee":
            found = step.foresee(samples or batch)
            seen.plan, seen.notes = found.plan, found.notes
        elif door == "step":
            seen.report = step(samples or batch)
        else:
            with step.window() as window:
                rows = len(tree.flatten(batch).leaves[0])
                for half in (slice(rows // 2), slice(rows // 2, rows)):
                    part = tree.map_leaves(lambda one, half=half: one[half], batch)
                    window.add(samples[half] if samples else part)
            seen.report = window.report
    seen.moved = {name: p.detach() - before[name] for name, p in seen.net.named_parameters()}
    seen.size = torch.cat([one.flatten() for one in seen.moved.values()])
    return seen


def padded() -> Any:
    lengths = torch.arange(12) % 6 + 1
    mask = (torch.arange(6) < lengths[:, None]).long()
    return {"x": torch.randn(12, 6, 4), "attention_mask": mask, "labels": Y}


def faulty() -> Any:
    return X.where(torch.arange(12)[:, None] != 3, torch.nan), Y


def differs(door: str, **given: Any) -> bool:
    return not torch.equal(play(door, micro_batch=2, **given).size, play(door, micro_batch=2).size)


def by_pairs(samples: Any) -> Any:
    first, second = zip(*samples, strict=True)
    return torch.stack(first) * 2, torch.stack(second)


def halved(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


#: For each option: True if it was obeyed at a door. In a plan, what it says of it.
OBEYED: dict[str, Callable[[str], Any]] = {
    "micro_batch": lambda door: sizes(play(door, micro_batch=2)) == {2},
    "memory": lambda door: max(sizes(play(door, memory="90KB", batch=LARGE))) < 96,
    "precision": lambda door: (
        str(play(door, precision="bf16-mixed").plan.precision) == "bf16-mixed"
        if door == "foresee"
        else differs(door, precision="bf16-mixed")
    ),
    "clip_norm": lambda door: (
        play(door, clip_norm=0.01).plan.clip_norm == 0.01
        if door == "foresee"
        else play(door, clip_norm=0.01).size.norm() < 0.011
    ),
    "collate": lambda door: (
        play(door, collate=by_pairs).plan.rows == 12
        if door == "foresee"
        else differs(door, collate=by_pairs)
    ),
    "callbacks": lambda door: NOTHING_RUNS if door == "foresee" else play(door, listens=True).heard,
    "recompute": lambda door: (
        play(door, recompute="all", micro_batch=6).plan.blocks
        if door == "foresee"
        else recomputed(door)
    ),
    "scheduler": lambda door: (
        NOTHING_RUNS if door == "foresee" else rate(play(door, scheduler=halved)) == 0.5
    ),
    "order": lambda door: (
        any("order=" in one for one in play(door, order="length", batch=padded()).notes)
        if door == "foresee"
        else len(sizes(play(door, order="length", batch=padded(), micro_batch=2))) > 1
    ),
    "accumulate": lambda door: (
        play(door, accumulate=torch.float64).plan.accumulate == "float64"
        if door == "foresee"
        else differs(door, accumulate=torch.float64)
    ),
    "batch_norm": lambda door: (
        play(door, batch_norm="frozen", micro_batch=2, training=True).plan.batch_norm == "frozen"
        if door == "foresee"
        else not play(door, batch_norm="frozen", micro_batch=2, training=True).net.norm.num_batches_tracked
    ),
    "non_finite": lambda door: (
        play(door, non_finite="drop").plan.non_finite == "drop"
        if door == "foresee"
        else play(door, non_finite="drop", micro_batch=2, batch=faulty()).report.dropped > 0
    ),
    "check": lambda door: (
        NOTHING_RUNS
        if door == "foresee"
        else "check=False" in play(door, check=False, micro_batch=2).report.unchecked
    ),
    "strategy": lambda door: play(door, strategy="replicate") is None,
    "clip_value": lambda door: (
        play(door, clip_value=0.001).plan.clip_value == 0.001
        if door == "foresee"
        else play(door, clip_value=0.001).size.abs().max() < 0.0011
    ),
}  # fmt: skip


def rate(seen: Any) -> float:
    return seen.optimizer.param_groups[0]["lr"]


def sizes(seen: Any) -> set[int]:
    return {*(seen.report.cut if seen.plan is None else seen.plan.sizes)}


def recomputed(door: str) -> bool:
    """In the net's own forward each module runs once."""
    calls = list[int]()
    hook = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    try:
        play(door, recompute="all", check=False)
        again = len(calls)
        play(door, check=False)
        return again > len(calls) - again
    finally:
        hook.remove()


def test_every_option_is_in_the_table() -> None:
    given = {"model", "loss", "optimizer", "options", "self"}
    assert (
        OBEYED.keys()
        == {one.name for one in fields(ab.Options)} | signature(ab.Step).parameters.keys() - given
    )


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("option", OBEYED)
def test_an_option_is_obeyed_or_refused_by_name(option: str, door: str) -> None:
    told = ""
    try:
        is_obeyed = OBEYED[option](door)
    except (AnybatchError, TypeError) as error:
        is_obeyed, told = False, str(error)
    assert is_obeyed or option in told, told
