"""A loss by itself: evaluated on the outputs of the whole batch, so that only the loss can differ."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from anybatch.check.passes import Bench, Call
from anybatch.check.rows import RowCut, RowPart, take
from anybatch.core import torch_private as private
from anybatch.losses import resolve


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """The terms of one micro-batch."""

    part: RowPart  # its rows
    sums: Mapping[str, float]  # by the term's name
    weights: Mapping[str, float]  # by the term's name
    micro: Any  # the micro-batch
    unreplayed: int  # random draws that were not replayed

    def mean(self, name: str) -> float:
        """Return sum over weight; NaN without weight."""
        return self.sums[name] / self.weights[name] if self.weights[name] else math.nan


def evaluate(bench: Bench, outermost: Sequence[Call], cuts: Sequence[RowCut]) -> list[Evaluation]:
    """Return the terms of each micro-batch of these splits, with the outputs of the calls in `outermost`."""
    found: list[Evaluation] = []
    batches = [cut.batch(bench.subject.dtype) for cut in cuts]  # outside of draws, which note dtypes
    with bench.fresh() as (model, loss):
        stub = Stub(model, outermost)
        for cut, batch in zip(cuts, batches, strict=True):
            for part, micro in zip(cut.parts, batch.cut(cut.micro_batch), strict=True):
                bench.draws.begin(part)
                stub.begin(part)
                terms = resolve(loss).evaluate(model, micro)
                found.append(
                    Evaluation(
                        part=part,
                        unreplayed=bench.draws.unreplayed,
                        sums={name: value.item() for name, value in terms.sums.items()},
                        weights={name: float(weight) for name, weight in terms.weigh().items()},
                        micro=micro,
                    )
                )
    return found


class Stub:
    """Hooks that replace the outputs of outermost modules by those of the whole batch."""

    def __init__(self, model: nn.Module, outermost: Sequence[Call]) -> None:
        self._known: defaultdict[str, list[list[Tensor]]] = defaultdict(list)
        for call in outermost:
            self._known[call.key[0]].append(call.outputs)
        self.begin(RowPart.whole(1))
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leaving(name))

    def begin(self, part: RowPart) -> None:
        """Begin a micro-batch."""
        self._part, self._depth = part, 0
        self._counts: Counter[str] = Counter()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth += 1

    def _leaving(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            self._depth -= 1
            if self._depth:
                return output
            known, count = self._known[name], self._counts[name]
            self._counts[name] += 1  # outermost calls only; a key counts inner ones, too
            return self._replace(output, known[count]) if count < len(known) else output

        return hook

    def _replace(self, output: Any, outputs: Sequence[Tensor]) -> Any:
        leaves, form = private.pytree.tree_flatten(output)
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(places) != len(outputs):
            return output
        for place, whole in zip(places, outputs, strict=True):
            value = take(whole, leaves[place].shape, self._part)
            if value is not None:
                # A loss may ask for a gradient inside, and write in place, which a leaf does not allow.
                leaves[place] = value.detach().clone().requires_grad_(leaves[place].requires_grad) * 1
        return private.pytree.tree_unflatten(leaves, form)
