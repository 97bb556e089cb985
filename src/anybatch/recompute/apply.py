"""Policies put on the blocks of a model for a while, without a trace afterwards."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from anybatch.core import PlanError
from anybatch.integrations import with_empty_cache, with_own_cache
from anybatch.recompute import selective
from anybatch.recompute.blocks import POLICIES, Choice, find_blocks
from anybatch.recompute.checkpoint import Call
from anybatch.recompute.offload import Offload
from anybatch.recompute.trust import Believed, Proof, is_fake, trust_in
from anybatch.state import Inside

Forward = Callable[..., Any]

_ABSENT = object()
_FOUND: WeakKeyDictionary[nn.Module, dict[Choice, list[str]]] = WeakKeyDictionary()


def apply_policies(model: nn.Module, choice: Choice) -> AbstractContextManager[None]:
    """For a while the named blocks evaluate under their policies; the result is the same to the bit.

    "recompute" keeps only the arguments of a block and runs all of it again in backward; "selective" keeps
    the results of matrix products, convolutions and attention as well; "offload" moves what the block saves
    to the host and back. Where gradients are off a block evaluates as ever.

    A block that runs again starts from the buffers, attributes and random streams that it started from, and
    all it writes is put back, so that BatchNorm's statistics are updated once and dropout repeats its masks.
    The first two times that a block runs again, all that it saves is compared with what it saved before, bit
    for bit; then it is trusted, in this process, under this policy.
    Hooks of the block itself run once; those of modules inside it run again with it.

    Backward belongs inside too. The model's code stays as it is: for the time a block has a `forward` of its
    own.

    Args:
        model: whose blocks are meant.
        choice: (name, policy) of each block, as `choose` makes it; nothing happens where it is empty.

    Raises:
        PlanError: there is no such block or policy, or a module around a block is compiled. While a block
            runs: it cannot be run again, because it changes its arguments in place.
        BlockError: in backward, a block that is not yet trusted does not do again what it did.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Linear(2, 1))
        >>> with apply_policies(model, (("0", "recompute"),)):
        ...     model(torch.ones(1, 2)).sum().backward()

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.
    """
    return _applied(model, choice) if choice else nullcontext()


@contextmanager
def _applied(model: nn.Module, choice: Choice) -> Generator[None]:
    blocks = [(name, _block(model, name), policy) for name, policy in choice]
    offload = None
    if any(policy == "offload" for _, policy in choice):
        offload = Offload((*model.parameters(), *model.buffers()))
        blocks += [(name, _block(model, name), "keep") for name in _beside(model, choice)]
    found: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, block, policy in blocks:
            # A compiled block is called by another name, and stays compiled.
            slot = "forward" if _compiled(block) is None else "_compiled_call_impl"
            forward = getattr(block, slot)
            found.append((vars(block), slot, vars(block).get(slot, _ABSENT)))
            vars(block)[slot] = _under(policy, name, block, forward, offload)
        yield
    finally:
        for attributes, slot, value in reversed(found):
            if value is _ABSENT:
                attributes.pop(slot, None)
            else:
                attributes[slot] = value
        if offload is not None:
            offload.close()


def _under(policy: str, name: str, block: nn.Module, forward: Forward, offload: Offload | None) -> Forward:
    """A forward that evaluates under a policy, and of which those that are moved take notice."""
    match policy:
        case "recompute" | "selective":
            evaluate = _rebuilt(policy, name, block, forward)
        case "offload" | "keep":
            evaluate = forward
        case _:
            raise PlanError(f"Expected a policy, one of {POLICIES}, got {policy!r}. Pass one of them.")
    return evaluate if offload is None else _watched(policy, block, evaluate, offload)


def _beside(model: nn.Module, choice: Choice) -> list[str]:
    """What `_others` found, as long as it is there: to look for it takes longer than all the rest."""
    known = _FOUND.setdefault(model, {})
    names = known.get(choice)
    if names is None or not all(_is_there(model, name) for name in names):
        names = known[choice] = _others(model, choice)
    return names


def _is_there(model: nn.Module, name: str) -> bool:
    try:
        _block(model, name)
    except PlanError:
        return False
    return True


def _others(model: nn.Module, choice: Choice) -> list[str]:
    """Blocks that stand beside those named, keep what they save, and can be watched."""
    named = [_block(model, name) for name, _ in choice]
    taken = {module for block in named for module in block.modules()}
    apart = [
        name for name in find_blocks(model) if not taken.intersection(model.get_submodule(name).modules())
    ]
    return [name for name in apart if _is_there(model, name)]


def _rebuilt(policy: str, name: str, block: nn.Module, forward: Forward) -> Forward:
    contexts = selective.contexts if policy == "selective" else noop_context_fn
    look = partial(Inside.of, block)
    known = cache(look)  # once a block is trusted it is looked at once, when first called

    def once(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_own_cache(args, kwargs)
        return forward(*args, **kwargs)

    @wraps(forward)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        arguments = with_empty_cache(block, args, kwargs)
        trust = trust_in(block, policy)
        if trust.left == 0 or is_fake():
            return _run(Call(name, once, known(), arguments, Believed(name, trust)), contexts)
        return _run(Call(name, once, look(), arguments, Proof(name, trust)), contexts)

    return evaluate


@torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
def _run(call: Call, contexts: Callable[[], Any]) -> Any:
    # `Call` replays random streams: torch does so only on the devices of the arguments.
    return checkpoint(call, *call.tensors, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _watched(policy: str, block: nn.Module, forward: Forward, offload: Offload) -> Forward:
    """A forward of which what is moved takes notice: of the block itself, or of the one before it."""
    kinds = {parameter.device.type for parameter in block.parameters()}
    kind = next(iter(kinds - {"cpu"}), "cpu") if policy == "offload" else ""

    @wraps(forward)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with offload.saving(kind) as visit:
            outputs = forward(*args, **kwargs)
        offload.watch(visit, outputs)
        return outputs

    return evaluate


def _block(model: nn.Module, name: str) -> nn.Module:
    """The module of this name; none on the way to it may be compiled."""
    block = model
    for part in name.split(".") if name else ():
        if _compiled(block) is not None or hasattr(block, "_orig_mod"):
            raise PlanError(
                f"Expected {name!r} to be in a module that is not compiled, got a compiled "
                f"{type(block).__name__} around it. Compile the blocks: "
                "`for block in blocks: block.compile()` in place of torch.compile(model)."
            )
        inner = getattr(block, part, None)
        if not isinstance(inner, nn.Module):
            raise PlanError(
                f"Expected the name of a module, got {name!r}: {type(block).__name__} has no {part!r}. Take "
                "one of model.named_modules()."
            )
        block = inner
    return block


def _compiled(module: nn.Module) -> Any:
    return module._compiled_call_impl  # pyright: ignore[reportPrivateUsage]
