"""Hosts alone and with anybatch: `python -m benchmarks.homes` compares gradients with the whole batch's.

The gradient of a host that accumulates over 4 micro-batches, and of the same host with anybatch in 4
micro-batches or so, each before clipping, relative to the gradient of the host with the whole batch at once.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

HOSTS = {"transformers": "peft", "loops": "accelerate"}  # what each module needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    host: str
    task: str
    alone: float  # relative error of the gradient of the host with gradient accumulation
    home: float  # relative error of the gradient with anybatch
    losses: tuple[float, float, float]  # logged: the whole batch's, the host's alone, with anybatch

    def __str__(self) -> str:
        losses = " | ".join(f"{loss:.3f}" for loss in self.losses)
        return f"| {self.host} | {self.task} | {self.alone:.1e} | {self.home:.1e} | {losses} |"


def main() -> None:
    """Print the table, row by row."""
    print("| host | task | alone, accumulation 4 | with anybatch | loss: whole | alone | with anybatch |")
    print("|---|---|---|---|---|---|---|")
    for host, needs in HOSTS.items():
        name = f"benchmarks.homes_{host}"
        if find_spec(name) is None or find_spec(needs) is None:
            continue
        for row in import_module(name).measured():
            print(row, flush=True)


if __name__ == "__main__":
    main()
