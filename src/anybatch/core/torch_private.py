"""Private names of torch, each once, with what happens where it is missing."""

from typing import Any


def saved(node: Any, name: str) -> Any:
    """What a node of the graph saved under a name, such as "reduction". Where missing: None.

    Example:
        >>> import torch
        >>> score = torch.ones(2, requires_grad=True)
        >>> saved(torch.nn.functional.mse_loss(score, torch.zeros(2)).grad_fn, "reduction")
        1
    """
    return getattr(node, f"_saved_{name}", None)


def is_packed(node: Any, name: str) -> bool:
    """Whether hooks keep what a node saved under a name, as a checkpoint's do. Where missing: False.

    Example:
        >>> import torch
        >>> is_packed(torch.ones(2, requires_grad=True).exp().grad_fn, "result")
        False
    """
    return getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None
