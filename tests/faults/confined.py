"""A program that trains under a limit of memory: `python -m tests.faults.confined SPARE_BYTES CUT`.

Without spare bytes (0) there is no limit. A cut, sizes joined by commas, is carried out as it is; "none"
leaves it to the step. It prints the cut of each update and a digest of the parameters, as JSON.
"""

import hashlib
import json
import resource
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from anybatch import Step
from anybatch.engine import admit, carry_out

ROWS, WIDTH = 64, 2048


def main(spare_bytes: int, cut: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 64))]
    model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(64, 10))
    model.register_forward_hook(lambda module, inputs, output: output.transpose(1, 2))  # classes second
    step = Step(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-3))
    batch = torch.randn(ROWS, 32, 64), torch.randint(10, (ROWS, 32))
    if spare_bytes:
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + spare_bytes, resource.RLIM_INFINITY))
    if cut:
        task = step.task()
        plan = replace(step.plan(ROWS), cut=cut)
        report = carry_out(plan, task, admit(batch, task, None))
    else:
        report = step(batch)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(json.dumps({"cut": report.cut, "redone": report.redone, "digest": digest}))


if __name__ == "__main__":
    main(int(sys.argv[1]), () if sys.argv[2] == "none" else tuple(map(int, sys.argv[2].split(","))))
