"""Policies applied to the blocks of a model for a while"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial, wraps
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn, set_checkpoint_early_stop

from anybatch.core import PlanError, torch_private as private
from anybatch.integrations import with_empty_cache, with_own_cache
from anybatch.recompute import selective
from anybatch.recompute.blocks import WHOLE, Choice, checked
from anybatch.recompute.checkpoint import BlockCall, is_readable
from anybatch.recompute.offload import Offload
from anybatch.state import Reachable

Forward = Callable[..., Any]

#: (policy, training mode) of verified recomputations of each block in this process.
_VERIFIED: WeakKeyDictionary[nn.Module, set[tuple[str, bool]]] = WeakKeyDictionary()


@contextmanager
def apply_policies(model: nn.Module, choice: Choice, *, verify: bool = True) -> Generator[None]:
    """Evaluate the named blocks under their policies for a while; the result is bit-identical.

    "recompute" keeps only the arguments of a block and runs all of it again in backward; "selective" keeps
    the results of matrix products, convolutions and attention as well; "offload" moves what the block saves
    to the host and back; `WHOLE` moves all that is saved, by the loss as well. Without gradients nothing
    changes. Call backward inside, too.

    A recomputation starts from the buffers, attributes and random streams of the first run, and everything
    it writes is put back: BatchNorm's statistics are updated once, dropout repeats its masks. Its outputs are
    compared bit for bit with those of the first run, until they were equal once under this policy. Hooks of
    the block itself run once; those of modules inside it run again.

    Raises:
        PlanError: there is no such block or policy, a module around a block is compiled, or a block that is
            to run again changes its arguments in place.
        BlockError: the second run of a block has other outputs, or its first one writes to a parameter, or to
            a tensor that is no buffer.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Linear(2, 1))
        >>> with apply_policies(model, (("0", "recompute"),)):
        ...     model(torch.ones(1, 2)).sum().backward()

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.
    """
    if not choice:
        yield
        return
    blocks = [(name, _block(model, name), checked(policy)) for name, policy in choice if name]
    is_all = WHOLE in choice
    # Blocks that run again need room for all that one of them saves; copies that come early fit in there.
    offload = Offload((*model.parameters(), *model.buffers()), is_tight=is_all and not blocks)
    with ExitStack() as stack:
        stack.callback(offload.close)
        for name, block, policy in blocks:
            # A compiled block has another method, and stays compiled.
            slot = "forward" if private.compiled_call_of(block) is None else private.COMPILED_CALL
            evaluate, attributes = getattr(block, slot), vars(block)
            if policy == "offload":
                evaluate = _moved(block, evaluate, offload)
            else:
                evaluate = _rebuilt(policy, name, block, evaluate, verify)
            if slot in attributes:
                stack.callback(attributes.__setitem__, slot, attributes[slot])
            else:
                stack.callback(attributes.pop, slot, None)
            attributes[slot] = evaluate
        if is_all:
            stack.enter_context(offload.saving(_kind(model)))
        yield


def _rebuilt(policy: str, name: str, block: nn.Module, forward: Forward, verify: bool) -> Forward:
    contexts = selective.contexts if policy == "selective" else noop_context_fn
    look = partial(Reachable, [block], is_block=True)
    look_once = cache(look)
    # RReLU saves its noise before filling it, so a run that stops early has none.
    is_filled_late = any(isinstance(module, nn.RReLU) for module in block.modules())

    def once(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_own_cache(args, kwargs)
        return forward(*args, **kwargs)

    @wraps(forward)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        arguments = with_empty_cache(block, args, kwargs)
        done, way = _VERIFIED.setdefault(block, set()), (policy, block.training)
        call = BlockCall(name, once, look_once() if way in done else look(), arguments)
        # A traced step has fake tensors, which cannot be compared.
        if (verify or way not in done) and any(map(is_readable, call.tensors or block.parameters())):
            call.verified = partial(done.add, way)
        return _run(call, contexts, stops=not is_filled_late)

    return evaluate


@private.not_compiled
def _run(call: BlockCall, contexts: Callable[[], Any], *, stops: bool) -> Any:
    # `BlockCall` replays random streams; torch would replay only those of the arguments' devices.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    runs, failed = count(), list[BaseException]()

    def run(*tensors: Tensor) -> Any:
        if next(runs):
            return call(*tensors)
        try:
            return call(*tensors)
        except BaseException as error:  # torch 2.6 would leave its contexts open
            failed.append(error)

    with nullcontext() if stops else set_checkpoint_early_stop(False):
        outputs = checkpoint(run, *call.tensors, **options)
    if failed:
        raise failed.pop()
    return outputs


def _moved(block: nn.Module, forward: Forward, offload: Offload) -> Forward:
    kind = _kind(block)

    @wraps(forward)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        with offload.saving(kind) if torch.is_grad_enabled() else nullcontext():
            return forward(*args, **kwargs)

    return evaluate


def _kind(module: nn.Module) -> str:
    return next(iter({parameter.device.type for parameter in module.parameters()} - {"cpu"}), "cpu")


def _block(model: nn.Module, name: str) -> nn.Module:
    block = model
    for part in name.split(".") if name else ():
        if private.compiled_call_of(block) is not None or private.compiled_from(block) is not None:
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
