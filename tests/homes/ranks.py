"""A training by a host on one of several ranks."""

import os
from typing import Any

import transformers
from torch import Tensor

from benchmarks.homes_transformers import BY_NAME, train


def on_two_ranks(rank: int, size: int, name: str, mode: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Return the last gradient and all logged losses, with micro-batches of two rows."""
    transformers.logging.set_verbosity_error()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    run = train(BY_NAME[name], mode, ranks=size, parts=2, micro_batch=2 + rank, ddp_backend="gloo")
    return run.gradients[-1], run.logged("loss")
