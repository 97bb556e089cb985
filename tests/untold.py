"""Every way to train and to plan, on a device or a system that does not tell how much memory it has.

`python -m tests.untold` runs them on the CPU of a system without /proc and `os.sysconf`, as Windows.
"""

import io
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import anybatch as ab

ROWS, FEATURES, CLASSES = 64, 16, 5


def wrong(kind: str) -> list[str]:
    """Return what does not run on this kind of device, and what asks it for its size unrefused."""
    torch.manual_seed(0)
    batch = torch.randn(ROWS, FEATURES).to(kind), torch.randint(CLASSES, (ROWS,)).to(kind)
    model = nn.Sequential(nn.Linear(FEATURES, 512), nn.Tanh(), nn.Linear(512, CLASSES)).to(kind)
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)

    def step(**options: Any) -> None:
        made = ab.Step(model, loss, optimizer, **options)
        assert [made(batch).updated for _ in range(3)] == [True] * 3

    def window() -> None:
        with ab.Step(model, loss, optimizer, micro_batch=24).window() as opened:
            opened.add(batch)

    def batch_loss() -> None:
        ab.BatchLoss(model, loss, micro_batch=24)(batch).backward()

    def plan(**options: Any) -> None:
        assert ab.plan(model, loss, optimizer, batch, **options).plan.micro_batch

    ways: dict[str, Callable[[], object]] = {
        "step": step,
        "micro_batch": lambda: step(micro_batch=24),
        "budget": lambda: step(memory="600kB"),
        "window": window,
        "BatchLoss": batch_loss,
        "check": lambda: ab.check(model, loss, batch),
        "plan": plan,
        "plan of a budget": lambda: plan(memory="2MB"),
        "plan of a card": lambda: plan(memory="auto", device="cuda:a100"),
        "auto": lambda: step(memory="auto"),
        "share": lambda: step(memory="80%"),
    }
    found = list[str]()
    for name, run in ways.items():
        expected = "does not tell how much memory it has" if name in ("auto", "share") else ""
        try:
            run()
            said = ""
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        if expected not in said or bool(expected) != bool(said):
            found.append(f"{name}: {said}")
    return found


def hide() -> None:
    """Take away what a system tells of its memory."""
    for name in {"sysconf", "sysconf_names"} & {*vars(os)}:
        delattr(os, name)
    sys.modules["resource"] = None  # type: ignore[assignment]
    real = io.open

    def opened(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(path)
        return real(path, *args, **options)

    io.open = opened


if __name__ == "__main__":
    warnings.simplefilter("error")
    hide()
    sys.exit("\n".join(wrong("cpu")) or 0)
