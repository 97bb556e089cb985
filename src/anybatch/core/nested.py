"""Backward passes inside of a backward pass, as of reentrant checkpoints: found in the graph."""

from collections.abc import Iterable, Iterator
from inspect import unwrap
from types import CodeType

from torch import Tensor
from torch.autograd.graph import Node

from anybatch.core import torch_private as private


class IndivisibleError(RuntimeError):
    """A micro-batch cannot be sent into some parameters only, so it cannot be finished half-way."""


def runs_backward_inside(values: Iterable[Tensor]) -> bool:
    """Whether some function in the graph of these runs a backward of its own.

    Its parameters are not in the graph, and get their gradients in several parts where it is used more than
    once: nobody can ask for the gradients of some parameters, or tell which have theirs.

    Args:
        values: with their graph.

    Example:
        >>> import torch
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.ones(2, requires_grad=True)
        >>> runs_backward_inside([x.exp()])
        False
        >>> runs_backward_inside([checkpoint(torch.exp, x, use_reentrant=True)])
        True
    """
    nodes: list[Node] = [value.grad_fn for value in values if value.grad_fn is not None]
    seen = set(nodes)
    for node in nodes:  # which grows meanwhile
        if _may_run_backward(node):
            return True
        fresh = {one for one, _ in node.next_functions if one is not None} - seen
        nodes += fresh
        seen |= fresh
    return False


def _may_run_backward(node: Node) -> bool:
    kind = private.forward_class(node)  # a function written in Python
    if kind is None:
        return False
    code = getattr(unwrap(kind.backward), "__code__", None)
    return code is None or not {"backward", "grad"}.isdisjoint(_names(code))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
