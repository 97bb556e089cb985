"""Blocks: the repeated parts of a model, found by structure or named by pattern."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, cast, get_args

import torch
from torch import nn

from anybatch.core import PlanError, torch_private as private
from anybatch.integrations import is_layer, recomputes_itself

#: Policies for the activations of a block; other blocks keep them.
Policy = Literal["recompute", "selective", "offload"]
POLICIES = get_args(Policy)
#: Values of the `recompute` option: see `choose_blocks`.
Asked = Literal["all"] | Policy | Sequence[str] | Mapping[str, Policy] | None

#: (module name, policy) of each block whose activations are not kept, in the order of the model.
Choice = tuple[tuple[str, str], ...]
#: One of a choice: all that is saved for backward, by the model and the loss, waits in host memory.
WHOLE = ("", "offload")

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_STACK = 0.75  # the least share of a stack's parameters in its blocks; 94 % in Swin's stages


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the repeated blocks, which run one after another.

    A block is a module with children and parameters whose class occurs at least twice in the model: GPT-2's
    layers, ResNet's bottlenecks. The outermost of nested ones counts, but stacks (mostly lists of blocks, as
    T5's encoder is) and torch's containers are searched, and a layer that holds experts, which run side by
    side, is the block. A layer of transformers is a block even if there is only one. Names are those of
    `named_modules`, in the order of the model; a compiled module counts as the module that it compiles.

    Example:
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3)
        >>> find_blocks(encoder)
        ('layers.0', 'layers.1', 'layers.2')
        >>> find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
        ()
    """
    modules = [_inner(module) for module in model.modules() if _inner(module) is module]
    counts = Counter(type(module) for module in modules if _may_be_block(module))
    repeated = {kind for kind, count in counts.items() if count > 1}
    repeated |= {type(module) for module in modules if is_layer(module)}
    lists = {type(one) for one in modules if not is_layer(one) and any(map(is_layer, one.modules()))}
    stacks = {kind for kind in repeated if _is_stack([m for m in modules if type(m) is kind], repeated)}
    found: dict[nn.Module, str] = {}
    for name, module in _outermost(model, "", repeated - stacks - lists):
        found.setdefault(module, name)
    return tuple(found.values())


def choose_blocks(model: nn.Module, asked: object) -> Choice:
    """Read the `recompute` option.

    Args:
        model: the model.
        asked: None for none; a policy for all blocks that `find_blocks` finds, "all" for "recompute";
            file patterns of module names, to recompute these (the outermost modules that a pattern matches;
            for a list of blocks its elements); or a mapping from pattern to policy, whose last match counts.

    Raises:
        PlanError: it is something else, a pattern matches no module, or blocks are within one another.

    Example:
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
        >>> choose_blocks(model, "selective")
        (('layers.0', 'selective'), ('layers.1', 'selective'))
        >>> choose_blocks(model, {"layers.*": "recompute", "*.1": "offload"})
        (('layers.0', 'recompute'), ('layers.1', 'offload'))
    """
    if asked is None:
        return ()
    if isinstance(asked, str):
        policy = "recompute" if asked == "all" else checked(asked)
        chosen = dict.fromkeys(find_blocks(model), policy)
        if not chosen:
            raise PlanError(
                f"Expected a model with repeated blocks for recompute={asked!r}, got none in "
                f"{type(model).__name__}. Name modules by pattern, as in recompute=['encoder.*']."
            )
    else:
        chosen = {
            name: policy for pattern, policy in _patterns(asked).items() for name in _matched(model, pattern)
        }
    choice = tuple((name, chosen[name]) for name, _ in model.named_modules() if name in chosen)
    for name, policy in choice:
        _check(model, name, policy, choice)
    return choice


def _inner(module: nn.Module) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):
        return module
    return private.compiled_from(module) or module


def _may_be_block(module: nn.Module) -> bool:
    return (
        type(module) not in _CONTAINERS
        and not _is_scripted(module)
        and any(True for _ in module.children())
        and any(True for _ in module.parameters())
    )


def _is_scripted(module: nn.Module) -> bool:
    """Return True if torch.jit has compiled a part of it, whose state is out of reach."""
    return any(isinstance(one, torch.jit.ScriptModule) for one in module.modules())


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of a module's lists, or its own if its class derives from a list."""
    for name, child in module.named_children():
        if "expert" not in name and type(child) in _CONTAINERS:
            yield from child.children()
            yield from _elements(child)
        elif isinstance(module, _CONTAINERS) and type(module) not in _CONTAINERS:
            yield child


def _is_stack(modules: Sequence[nn.Module], repeated: set[type[nn.Module]]) -> bool:
    """Return True if modules of one class are mostly lists of blocks of another."""
    inside = 0
    for module in modules:
        elements = list(_elements(module))
        kinds = Counter(type(_inner(element)) for element in elements)
        several = {kind for kind in repeated if kinds[kind] > 1}
        inside += sum(_size(element) for element in set(elements) if type(_inner(element)) in several)
    return inside > 0 and inside >= _STACK * sum(map(_size, modules))


def _size(module: nn.Module) -> int:
    tables = {p for one in module.modules() if isinstance(one, nn.Embedding) for p in one.parameters()}
    return sum(parameter.numel() for parameter in module.parameters() if parameter not in tables)


def _outermost(module: nn.Module, name: str, kinds: set[type[nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        dotted = f"{name}.{child_name}" if name else child_name
        if type(_inner(child)) in kinds and _may_be_block(_inner(child)):
            yield dotted, child
        elif "expert" not in child_name:
            yield from _outermost(child, dotted, kinds)


def _patterns(asked: object) -> dict[str, str]:
    if isinstance(asked, Mapping):
        return {str(p): checked(policy) for p, policy in cast(Mapping[object, object], asked).items()}
    if isinstance(asked, Sequence):
        return {str(pattern): "recompute" for pattern in cast(Sequence[object], asked)}
    raise PlanError(
        f"Expected recompute to be None, 'all', one of {POLICIES}, patterns of module names or a mapping "
        f"from pattern to policy, got {asked!r}. Pass 'all' to recompute every repeated block."
    )


def checked(policy: object) -> str:
    """Return the policy; raise PlanError if it is none of `POLICIES`."""
    if policy not in POLICIES:
        raise PlanError(
            f"Expected a policy, one of {POLICIES}, got {policy!r}. Pass one of them, or a list of patterns "
            "to recompute the modules of these names."
        )
    return str(policy)


def _matched(model: nn.Module, pattern: str) -> list[str]:
    found: list[str] = []
    lists: set[str] = set()
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        is_matched = fnmatchcase(name, pattern) or name.rpartition(".")[0] in lists
        if not name or is_inside or not is_matched:
            continue
        is_list = name == pattern and type(module) is nn.Sequential and len(module) > 0
        is_list = is_list and all(map(_may_be_block, module.children()))
        if isinstance(module, nn.ModuleList | nn.ModuleDict) or is_list:
            lists.add(name)
        else:
            found.append(name)
    if not found:
        some = ", ".join(name for name, _ in list(model.named_modules())[1:6])
        raise PlanError(
            f"Expected a pattern that matches a module, got {pattern!r}. Names are as in "
            f"model.named_modules(): {some or 'this model has no submodules'}."
        )
    return found


def _check(model: nn.Module, name: str, policy: str, choice: Choice) -> None:
    """Refuse a block that contains another, that is recomputed already, or that is scripted."""
    block = model.get_submodule(name)
    inner = next((other for other, _ in choice if other.startswith(f"{name}.")), None)
    if inner:
        raise PlanError(
            f"Expected blocks that are not within one another, got {name!r} and {inner!r}. Name one of the "
            "two."
        )
    if any(map(recomputes_itself, block.modules())):
        raise PlanError(
            f"Expected blocks that keep their activations, got {name!r}, which transformers recomputes "
            "already. Call model.gradient_checkpointing_disable()."
        )
    if policy != "offload" and _is_scripted(block):
        raise PlanError(
            f"Expected blocks that Python runs for {policy!r}, got {name!r} with a ScriptModule in it, of "
            'which nothing can be put back. Choose "offload", or leave it out of `recompute`.'
        )
