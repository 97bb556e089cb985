"""Logs of runs that never were, for the report."""

import json
from pathlib import Path
from typing import Any

START: dict[str, Any] = {
    "event": "start", "format": 2, "time": "2026-11-23T08:00:00Z", "model": "GPT",
    "machine": {"python": "3.11", "device": "cpu"},
    "command": ["/bin/anybatch", "train", "gpt", "--memory", "2 GiB"],
    "total_updates": 40, "done_updates": 0, "done_epochs": 0,
}  # fmt: skip
NAMES = ["first", "blocks.0.<script>alert('a')</script>", 'blocks.1."last"', "unused", "far"]


def step(number: int, **more: Any) -> dict[str, Any]:
    """One update's line with everything a log may hold; layer i's figures are 10**-i * update."""
    factors: list[float | None] = [1.0, 0.1, 0.01, None, 1e-9]
    flow: dict[str, Any] = {
        name: [None if one is None else one * number for one in factors]
        for name in ("mean", "largest", "norm", "ratio")
    }
    slow = 1.0 + number / 1000
    flow["zeros"] = [None if one is None else 0.25 for one in factors]
    record = {"event": "step", "step": number, "loss": 5.0 / number, "rows": 64, "micro_batches": 4}
    record |= {"terms": {"a": slow, "b": 0.5}, "grad_norm": slow, "updated": True, "cut": [[16, 4]]}
    record |= {"learning_rate": 0.1 / slow, "seconds": 0.5 * number, "memory": 1 << 20, "scale": 1024.0}
    flow |= {"layers": NAMES, "classes": ["Linear"] * 5} if number == 1 else {}
    noise = {"scale": 100.0 * slow, "rows": 1}
    return record | {"observed": {"flow": flow, "noise": noise, "mine": {"x": number}}} | more


def lines(updates: int) -> list[dict[str, Any]]:
    rare = {5: {"redone": 2}, 6: {"scale": 512.0}, 7: {"loss": None, "updated": False}, 8: {"dropped": 3}}
    epoch: dict[str, Any] = {"event": "epoch", "epoch": 1, "updates": updates, "loss": 0.5}
    epoch |= {"learning_rate": 0.1}
    epoch |= {"validation": {"loss": 0.25, "accuracy": 0.875}, "seconds": 2.0, "samples_per_second": 9.0}
    plan = {"event": "plan", "step": 1, "text": "micro_batch 16 rows <", "bytes": {"parameters": 1 << 20}}
    test = {"event": "test", "updates": updates, "loss": 0.3125, "accuracy": 0.75}
    first = epoch | {"updates": 1, "validation": {"loss": 2.0, "accuracy": 0.5}}
    steps = [step(number, **rare.get(number, {})) for number in range(1, updates + 1)]
    return [START, plan, first, *steps, epoch, {"event": "later"}, {"event": "stop"}, test]


def write(folder: Path, records: list[dict[str, Any]], end: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records) + end)
    return folder
