"""Trainings by a host on this rank, started by torchrun: a file for the results, modes, names of tasks."""

import sys
from importlib.util import find_spec

import torch
import transformers

from benchmarks.homes_transformers import BY_NAME, train


def main(path: str, modes: str, *names: str) -> None:
    """Save the last gradient and all logged losses of each run; micro-batches differ between ranks."""
    transformers.logging.set_verbosity_error()
    found = {}
    for name in names:
        if find_spec(BY_NAME[name].needs) is None:
            continue
        for mode in modes.split(","):
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            run = train(BY_NAME[name], mode, ranks=2, parts=2, micro_batch=2 + rank, ddp_backend="gloo")
            found[name, mode] = run.gradients[0], run.logged("loss")
    torch.save(found, f"{path}{torch.distributed.get_rank()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
