"""Means and sums that a model's loss consists of, found in autograd's graph with their factors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from anybatch.core import LossError, torch_private as private
from anybatch.integrations import RouterLoss
from anybatch.losses.cotangents import nodes_behind
from anybatch.losses.inputs import call
from anybatch.losses.model.intercept import Reduction, Watch, widened
from anybatch.losses.model.targets import rows_of

WAYS_OUT = (
    "Turn that part off, do not cut the batch, or write the loss yourself: a function (model, micro) that "
    "returns an ab.Total for each mean, ab.PerRow for values of rows, ab.WholeBatch where rows meet."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The terms of one micro-batch's loss."""

    terms: Mapping[str, Reduction]  # the means and sums, by name
    routers: Mapping[str, RouterLoss]  # the router losses, by name
    factors: Mapping[str, float]  # the factor of each term and router loss
    leaves: Mapping[str, Tensor]  # the tensors of the micro-batch
    rows: int  # rows of the micro-batch; 0 if its tensors disagree
    divides: bool  # True if the loss divides its terms
    padded: bool  # True if the model padded labels
    constant: Tensor | None = None  # what the loss has beside them, without gradient; None for nothing

    def forgotten(self) -> "LossTerms":
        """Return a copy without graphs, with a snapshot of the settings."""
        terms = {name: one.forgotten() for name, one in self.terms.items()}
        routers = {name: call.detached() for name, call in self.routers.items()}
        return replace(self, terms=terms, routers=routers, leaves={})


def call_model(model: nn.Module, micro: Any) -> Any:
    """Call a model that computes its own loss on a micro-batch; a dataclass gives keyword arguments."""
    if is_dataclass(micro) and not isinstance(micro, Mapping):
        return call(model, {field.name: getattr(micro, field.name) for field in fields(micro)})
    return call(model, micro)


def loss_of(model: nn.Module, output: Any) -> Tensor:
    """Return the loss in a model's output: `.loss`, `["loss"]`, a scalar, or the only scalar in a tuple."""
    loss = _pick(output)
    is_scalar = isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()
    if is_scalar and (loss.requires_grad or not torch.is_grad_enabled()):
        return loss
    came = f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else repr(loss)
    if isinstance(loss, Tensor) and not loss.requires_grad:
        came += " without gradient"
    raise LossError(
        f"Expected {type(model).__name__} to return its loss (as .loss, ['loss'], a scalar, or one scalar "
        f"in a tuple), got {came} in a {type(output).__name__}. Put the labels into the batch under the name "
        "that the model's forward takes, or pass another loss than ab.ModelLoss(): one of torch, "
        "ab.ModelLoss(call=...) for a function that returns a mean, or ab.WholeBatch where rows meet, as in "
        "CLIP."
    )


def adds_nothing(output: Any) -> bool:
    """Return True if a model returned a constant 0, as some do if every row is ignored."""
    loss = _pick(output)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        return False
    return not loss.requires_grad and loss.item() == 0


def factors_of(
    model: nn.Module, loss: Tensor, stops: Sequence[Reduction | RouterLoss]
) -> tuple[Mapping[int, float], bool]:
    """Return the factor of each stop in the loss by index, and True if a division lies between.

    Raises:
        LossError: the loss has another part, or is not linear in the stops.
    """
    index_of = {stop.node: index for index, stop in enumerate(stops) if stop.node is not None}
    reached, nodes = _walk(model, loss, index_of)
    divides = any(node.name().startswith("Div") for node in nodes)
    if len(reached) == 1 and all(node.name() == "CloneBackward0" for node in nodes):  # the mean itself
        return {reached[0]: 1.0}, divides
    values = [stops[index].value for index in reached]
    factors = torch.autograd.grad(loss, values, create_graph=True)
    if any(factor.requires_grad for factor in factors):
        raise LossError(
            f"Expected the loss of {type(model).__name__} to be a sum of means with constant factors, got "
            f"{loss.grad_fn.name() if loss.grad_fn else loss} over {len(values)} of them (a quotient as of "
            f"Dice, a product, a root). {WAYS_OUT}"
        )
    # A fake has no value.
    known = [1.0 if isinstance(factor, private.FakeTensor) else float(factor) for factor in factors]
    return dict(zip(reached, known, strict=True)), divides


def found_in(
    model: nn.Module, loss: Tensor, watch: Watch, routers: Sequence[RouterLoss], leaves: Mapping[str, Tensor]
) -> LossTerms:
    """Return the recorded reductions and router losses that the loss depends on, by name."""
    factors, divides = factors_of(model, loss, [*watch.found, *routers])
    noted = len(watch.found)
    indices = [index for index, factor in factors.items() if index < noted or factor]
    names = numbered([watch.found[index].name if index < noted else "router" for index in indices])
    index_of = dict(zip(names, indices, strict=True))
    return LossTerms(
        terms={name: watch.found[index] for name, index in index_of.items() if index < noted},
        routers={name: routers[index - noted] for name, index in index_of.items() if index >= noted},
        factors={name: factors[index] for name, index in index_of.items()},
        leaves=leaves,
        rows=rows_of(leaves.values()),
        divides=divides,
        padded=watch.padded,
        constant=_constant_of(loss, [*watch.found, *routers], factors),
    )


def _constant_of(
    loss: Tensor, stops: Sequence[Reduction | RouterLoss], factors: Mapping[int, float]
) -> Tensor | None:
    """Return what is left of a loss without its terms: constants and detached parts."""
    node = loss.grad_fn
    while node is not None and node.name() == "CloneBackward0":  # of a mean as it is
        node = node.next_functions[0][0]
    if [stops[index].node for index in factors] == [node]:
        return None
    with torch.no_grad():
        whole = widened(loss)
        known = torch.zeros_like(whole)
        for index, factor in factors.items():
            known = torch.add(known, stops[index].value, alpha=factor)
        return (whole - known).masked_fill(known.isnan(), 0)  # a mean over nothing: its weight is 0


def numbered(names: Sequence[str]) -> list[str]:
    """Return `loss` for a single name; else the names, with numbers for repeated ones."""
    if len(names) == 1:
        return ["loss"]
    nth = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return [name if number == 1 else f"{name} {number}" for name, number in zip(names, nth, strict=True)]


def _walk(
    model: nn.Module, loss: Tensor, index_of: Mapping[Node, int]
) -> tuple[Sequence[int], Sequence[Node]]:
    reached: list[int] = []
    before: list[Node] = []
    for node in nodes_behind(loss.grad_fn, index_of):
        if node in index_of:
            reached.append(index_of[node])
        elif node.name().startswith("CompiledFunction"):
            raise LossError(
                f"Expected the loss of {type(private.compiled_from(model) or model).__name__} outside of "
                "compiled code, to read its means, got it inside (torch.compile). Leave out torch_compile or "
                "torch.compile(model), or compile its blocks: for block in blocks: block.compile()."
            )
        elif hasattr(node, "variable"):
            raise _around(model, cast("Any", node).variable)
        else:
            before.append(node)
    if not reached:
        raise LossError(
            f"Expected the loss of {type(model).__name__} to be made of means that torch computes, got none "
            f"behind {loss.grad_fn.name() if loss.grad_fn else loss}. {WAYS_OUT}"
        )
    return sorted(reached), before


def _around(model: nn.Module, leaf: Tensor) -> LossError:
    named = [private.plain_name(name) for name, parameter in model.named_parameters() if parameter is leaf]
    what = f"parameter {named[0]!r}" if named else f"a tensor of shape {tuple(leaf.shape)}"
    return LossError(
        f"Expected the loss of {type(model).__name__} to reach its parameters only through means that torch "
        f"computes, got a part that reaches {what} without one. {WAYS_OUT}"
    )


def _pick(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return cast("Mapping[str, Any]", output)["loss"]
    named: Any = getattr(cast("Any", output), "loss", None)
    if named is not None:
        return named
    if isinstance(output, tuple | list):
        parts = cast("Sequence[Any]", output)
        scalars = [one for one in parts if isinstance(one, Tensor) and one.dim() == 0 and one.requires_grad]
        return scalars[0] if len(scalars) == 1 else f"{len(scalars)} scalars with gradient"
    return None
