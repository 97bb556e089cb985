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
from tests.options import flat
from tests.zoo import Made

DOORS = ("step", "window", "batch_loss", "foresee")
X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
LARGE = X.repeat(16, 1), Y.repeat(16)
FAULTY = X.where(torch.arange(12)[:, None] != 3, torch.nan), Y
MASK = (torch.arange(6) < (torch.arange(12) % 6 + 1)[:, None]).long()
PADDED = {"x": torch.randn(12, 6, 4), "attention_mask": MASK, "labels": Y}


def make_net() -> Any:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 3))

    def forward(self: Any, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.body(x if attention_mask is None else (x * attention_mask[..., None]).sum(1))

    net: Any = Made(forward, body=body, norm=body[1], calls=[])
    body[0].register_forward_hook(lambda *_: net.calls.append(1))
    return net


def play(door: str, *, batch: Any = (X, Y), training: bool = False, scheduler: Any = None, **of: Any) -> Any:
    """Make one update, or a plan, through a door; return what was seen."""
    seen = SimpleNamespace(net=make_net(), door=door, report=None, plan=None, heard=[])
    seen.net.norm.train(training)
    seen.optimizer = optimizer = torch.optim.SGD(seen.net.parameters(), lr=1.0)
    before = [p.detach().clone() for p in seen.net.parameters()]
    given = flat(of, **({} if scheduler is None else {"scheduler": scheduler(optimizer)}))
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
    moved = [p.detach() - old for p, old in zip(seen.net.parameters(), before, strict=True)]
    seen.size = torch.cat([one.flatten() for one in moved])
    return seen


def differs(seen: Any) -> bool:
    return not torch.equal(seen.size, play(seen.door, micro_batch=2).size)


def by_pairs(samples: Any) -> Any:
    first, second = zip(*samples, strict=True)
    return torch.stack(first) * 2, torch.stack(second)


def halved(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def nothing_runs(seen: Any) -> bool:
    return seen.report is None


#: For each option: how it is given, and what tells from a plan, and from an update, that it was obeyed.
OBEYED: dict[str, tuple[dict[str, Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "micro_batch": ({"micro_batch": 2}, lambda it: {*it.plan.sizes} == {2},
                    lambda it: {*it.report.cut} == {2}),
    "memory": ({"memory": "90KB", "batch": LARGE}, lambda it: max(it.plan.sizes) < 96,
               lambda it: max(it.report.cut) < 96),
    "precision": ({"precision": "bf16-mixed", "micro_batch": 2},
                  lambda it: str(it.plan.precision) == "bf16-mixed", differs),
    "clip_norm": ({"clip_norm": 0.01}, lambda it: it.plan.clip_norm == 0.01,
                  lambda it: it.size.norm() < 0.011),
    "clip_value": ({"clip_value": 0.001}, lambda it: it.plan.clip_value == 0.001,
                   lambda it: it.size.abs().max() < 0.0011),
    "collate": ({"collate": by_pairs, "micro_batch": 2}, lambda it: it.plan.rows == 12, differs),
    "callbacks": ({"listens": True}, nothing_runs, lambda it: it.heard),
    "recompute": ({"recompute": "all", "check": False}, lambda it: it.plan.blocks,
                  lambda it: len(it.net.calls) > len(play(it.door, check=False).net.calls)),
    "scheduler": ({"scheduler": halved}, nothing_runs, lambda it: it.optimizer.param_groups[0]["lr"] == 0.5),
    "order": ({"order": "length", "batch": PADDED, "micro_batch": 2},
              lambda it: any("order=" in one for one in it.notes), lambda it: len({*it.report.cut}) > 1),
    "accumulate": ({"accumulate": torch.float64, "micro_batch": 2},
                   lambda it: it.plan.accumulate == "float64", differs),
    "batch_norm": ({"batch_norm": "frozen", "micro_batch": 2, "training": True},
                   lambda it: it.plan.batch_norm == "frozen", lambda it: not it.net.norm.num_batches_tracked),
    "non_finite": ({"non_finite": "drop", "micro_batch": 2, "batch": FAULTY},
                   lambda it: it.plan.non_finite == "drop", lambda it: it.report.dropped > 0),
    "check": ({"check": False, "micro_batch": 2}, nothing_runs,
              lambda it: "check=False" in it.report.unchecked),
    "strategy": ({"strategy": "replicate"}, lambda it: False, lambda it: False),
}  # fmt: skip


def test_every_option_is_in_the_table() -> None:
    of_step = signature(ab.Step).parameters.keys() - {"model", "loss", "optimizer", "options", "self"}
    assert OBEYED.keys() == {one.name for one in fields(ab.Options)} | of_step


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("option", OBEYED)
def test_an_option_is_obeyed_or_refused_by_name(option: str, door: str) -> None:
    given, of_plan, of_update = OBEYED[option]
    told = ""
    try:
        is_obeyed = (of_plan if door == "foresee" else of_update)(play(door, **given))
    except (AnybatchError, TypeError) as error:
        is_obeyed, told = False, str(error)
    assert is_obeyed or option in told, told
