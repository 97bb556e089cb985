"""A loss by itself: evaluated on the outputs of the whole batch, so that only the loss can differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from anybatch.check.passes import Bench, Call, Calls
from anybatch.check.rows import RowCut
from anybatch.core import torch_private as private
from anybatch.losses import resolve
from anybatch.trial import RowPart, take


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


class Stub(Calls):
    """Hooks that replace the outputs of outermost modules by those of the whole batch."""

    def __init__(self, model: nn.Module, outermost: Sequence[Call]) -> None:
        super().__init__()
        self._known = outermost
        self.watch(model)

    def begin(self, part: RowPart) -> None:
        """Begin a micro-batch."""
        super().begin(part)
        self._part = part

    def _after(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        before = len(self._outermost)
        super()._after(module, args, outputs)
        names = [call.key[0] for call in self._outermost]
        if len(names) == before:  # an inner call, or one that is recomputed
            return None
        known = [call.outputs for call in self._known if call.key[0] == names[-1]]
        count = names.count(names[-1])
        return self._replace(outputs, known[count - 1]) if count <= len(known) else None

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
