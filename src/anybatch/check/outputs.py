"""A loss by itself: evaluated on the outputs of the whole batch, so that only the loss can differ."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.check.compare import Comparison, Verdict
from anybatch.check.passes import Bench, Call, tensors
from anybatch.check.rows import Axis, Cut, Part, find_axis, select, take
from anybatch.core import torch_private as private
from anybatch.core import tree
from anybatch.losses import resolve
from anybatch.state import rng


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """The terms of one micro-batch."""

    part: Part  # its rows
    sums: Mapping[str, float]  # by the term's name
    weights: Mapping[str, float]  # by the term's name
    # by the term's name, gradients of the sum with respect to the model's outputs
    gradients: Mapping[str, Sequence[Tensor]]
    leaves: Sequence[Tensor]  # the tensors of the micro-batch
    unreplayed: int  # random draws that were not replayed

    def mean(self, name: str) -> float:
        """Sum over weight; NaN without weight."""
        return self.sums[name] / self.weights[name] if self.weights[name] else math.nan


def evaluate(
    bench: Bench, outermost: Sequence[Call], cuts: Sequence[Cut], *, pooled: bool
) -> list[Evaluation]:
    """The terms of each micro-batch of these cuts, one after the other on one copy of model and loss.

    Args:
        bench: where the loss is run.
        outermost: the calls of the model in a pass over the whole batch.
        cuts: what is evaluated.
        pooled: whether outputs are given too that belong to no row, such as a loss that the model computes.
    """
    found: list[Evaluation] = []
    batches = [cut.batch(bench.subject.dtype) for cut in cuts]  # before draws look on: they note dtypes
    with bench.fresh() as (model, loss):
        stub = Stub(model, outermost, pooled=pooled)
        for cut, batch in zip(cuts, batches, strict=True):
            for part, micro in zip(cut.parts, batch.cut(cut.micro_batch), strict=True):
                bench.draws.begin(part)
                stub.begin(part)
                terms = resolve(loss).evaluate(model, micro)
                found.append(
                    Evaluation(
                        part=part,
                        unreplayed=bench.draws.unreplayed,  # before backward
                        sums={name: value.item() for name, value in terms.sums.items()},
                        weights={name: float(weight) for name, weight in terms.weigh().items()},
                        gradients={name: stub.gradients(value) for name, value in terms.sums.items()},
                        leaves=tree.flatten(micro).leaves,
                    )
                )
    return found


def mark_replayable(comparison: Comparison, worst: Verdict) -> None:
    """Mark calls whose outputs can be replayed, if the loss needs nothing else of the model."""
    outermost = comparison.outermost
    parts = worst.cut.parts
    tables = [worst.result.calls.table(part) for part in parts]
    for call in outermost:
        peers = [table[call.key] for table in tables if call.key in table]
        if len(peers) == len(parts):
            call.axes = _axes_of(call, peers, parts)
    if not _is_enough(comparison, outermost):
        for call in outermost:
            call.axes = None


def _is_enough(comparison: Comparison, outermost: Sequence[Call]) -> bool:
    """Whether the loss comes to the same from what the model has given back alone."""
    means = comparison.reference.means
    try:
        found = evaluate(comparison.bench, outermost, [comparison.whole], pooled=True)[0]
    except Exception:  # a loss that reads what the model has left behind, for one
        return False
    return found.sums.keys() == means.keys() and all(
        math.isnan(mean) or math.isclose(found.mean(name), mean, rel_tol=comparison.limit)
        for name, mean in means.items()
    )


def _axes_of(
    call: Call, peers: Sequence[Call], parts: Sequence[Part]
) -> tuple[Sequence[Axis | None], Sequence[Axis | None]] | None:
    if call.returned is None or not all(
        leaf is None or isinstance(leaf, int | float | str) for leaf in call.returned.leaves
    ):
        return None
    inputs = _common_axes(call.inputs, [peer.inputs for peer in peers], parts)
    outputs = _common_axes(call.outputs, [peer.outputs for peer in peers], parts)
    return None if inputs is None or outputs is None else (inputs, outputs)


def _common_axes(
    whole: Sequence[Tensor], peers: Sequence[Sequence[Tensor]], parts: Sequence[Part]
) -> Sequence[Axis | None] | None:
    """On which axes rows lie, if the tensors of all micro-batches have the shapes that follow from it."""
    if any(len(values) != len(whole) for values in peers):
        return None
    axes = [find_axis(a.shape, b.shape, parts[0]) for a, b in zip(whole, peers[0], strict=True)]
    for values, part in zip(peers, parts, strict=True):
        if [value.shape for value in values] != _shapes(whole, axes, part):
            return None
    return axes


def _shapes(whole: Sequence[Tensor], axes: Sequence[Axis | None], part: Part) -> list[torch.Size]:
    """The shapes of a part's rows."""
    found: list[torch.Size] = []
    for value, axis in zip(whole, axes, strict=True):
        sizes = list(value.shape)
        if axis is not None:
            sizes[axis.place] = axis.per_row * len(part.rows)
        found.append(torch.Size(sizes))
    return found


class Stub:
    """Puts the outputs of a pass over the whole batch in place of a model's own, by hooks.

    Args:
        model: what the outermost of its modules return is replaced; they run only where it is not known
            beforehand in which form.
        outermost: the calls of the pass.
        pooled: whether outputs that belong to no row are replaced too.
    """

    def __init__(self, model: nn.Module, outermost: Sequence[Call], *, pooled: bool) -> None:
        self._pooled = pooled
        self._calls: defaultdict[str, list[Call]] = defaultdict(list)
        for call in outermost:
            self._calls[call.key[0]].append(call)
        self.begin(Part.whole(1))
        for name, module in model.named_modules():
            if any(call.axes is not None for call in self._calls[name]):
                module.forward = self._instead(name, module.forward)
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leaving(name))

    def begin(self, part: Part) -> None:
        """A micro-batch of these rows begins."""
        self._part, self._depth, self._leaves = part, 0, list[Tensor]()
        self._counts: Counter[str] = Counter()

    def gradients(self, value: Tensor) -> list[Tensor]:
        """Gradients of a scalar with respect to the outputs that were given."""
        leaves = [leaf for leaf in self._leaves if leaf.requires_grad]
        if not leaves or not value.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves]
        found = torch.autograd.grad(
            value, leaves, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return list(found)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth += 1

    def _instead(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that gives back what is known, in the place of this one."""

        def known(*args: Any, **kwargs: Any) -> Any:
            count, calls = self._counts[name], self._calls[name]
            call = calls[count] if self._depth == 1 and count < len(calls) else None
            if call is None or call.axes is None or call.returned is None:
                return forward(*args, **kwargs)
            inputs, outputs = call.axes
            if not self._pooled and None in outputs:  # what belongs to no row comes out of all of them
                return forward(*args, **kwargs)
            if [value.shape for value in tensors((args, kwargs))] != _shapes(call.inputs, inputs, self._part):
                return forward(*args, **kwargs)
            values = [
                select(value, axis, self._part).clone().requires_grad_(flows)
                for value, axis, flows in zip(call.outputs, outputs, call.returned.flows, strict=True)
            ]
            rng.restore(call.returned.state)
            return call.returned.join(values)

        return known

    def _leaving(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            self._depth -= 1
            if self._depth:
                return output
            count = self._counts[name]
            self._counts[name] += 1
            known = self._calls[name]
            return self._replace(output, known[count].outputs) if count < len(known) else output

        return hook

    def _replace(self, output: Any, outputs: Sequence[Tensor]) -> Any:
        leaves, form = private.pytree.tree_flatten(output)
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(places) != len(outputs):
            return output
        for place, whole in zip(places, outputs, strict=True):
            value = take(whole, leaves[place].shape, self._part)
            is_pooled = whole.shape == leaves[place].shape and len(self._part.rows) < self._part.total
            if value is not None and (self._pooled or not (is_pooled or whole.dim() == 0)):
                own = value.detach().clone().requires_grad_(leaves[place].requires_grad)
                self._leaves.append(own)
                # Not the leaf itself, which nothing may be written into.
                leaves[place] = own * 1 if own.requires_grad else own
        return private.pytree.tree_unflatten(leaves, form)
