"""A model that computes its own loss: its means become sums with weights, whatever its head."""

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import rng
from anybatch.batch import Batch, cut_sizes
from anybatch.errors import LossError
from anybatch.integrations.transformers import (
    ADVICE,
    RouterLoss,
    WholeRouterLoss,
    homes,
    recorded,
    wants_router_loss,
)
from anybatch.losses.loss import Evaluated, Loss
from anybatch.losses.origin import Match, count, find, leaves_of, rows_of
from anybatch.losses.reductions import Reduction, Watch, compares_rows, folds_rows, selects, widened
from anybatch.losses.tail import WAYS_OUT, Tail, call_model, loss_of, read_tail
from anybatch.total import Number

_NO_COEFFICIENTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoss:
    """The loss that the model itself computes and returns, as models of transformers do.

    The batch goes into the model as it is: a mapping as keyword arguments, labels included. What comes back
    holds the loss as `.loss`, `["loss"]`, the only scalar of a tuple, or is the loss.

    While the model runs, its calls of torch's losses and full means are noted, and made with the sum in place
    of the mean; then the loss is followed back to them. So the gradient is that of the model's own loss of
    the whole batch, for every head whose loss is a sum of means with constant factors. The router loss of
    transformers' mixtures of experts, a product of means, takes a first pass without graph. What is neither
    is refused by name. A batch that is not cut goes through as it is, to the bit.

    Many heads compute their loss in float32 whatever the model's dtype. Where the weight of the whole batch
    is known beforehand (tensors, cut by the step) the arithmetic is the same; in windows and lists of samples
    the division comes at the end, and agrees to a rounding of float32.

    In evaluation a router loss is left out: it belongs to a whole batch.

    Example:
        >>> class Classifier(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.score = nn.Linear(3, 2)
        ...     def forward(self, x, labels):
        ...         return {"loss": nn.functional.cross_entropy(self.score(x), labels)}
        >>> import anybatch as ab
        >>> model = Classifier()
        >>> step = ab.Step(model, ModelLoss(), torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2)
        >>> step({"x": torch.ones(5, 3), "labels": torch.tensor([0, 1, -100, 1, 0])}).weights
        {'loss': 4.0}
    """

    def begin(self) -> "ModelTerms":
        """What reads the model's loss during one step."""
        return ModelTerms()


class ModelTerms:
    """The means of a model's loss during one step: what the first micro-batch shows, the others must repeat.

    Example:
        >>> terms = ModelTerms().evaluate(nn.MSELoss(), (torch.ones(2, requires_grad=True), torch.zeros(2)))
        >>> terms.sums["loss"].item(), terms.weigh()
        (2.0, {'loss': 2})
    """

    divided = False
    counted = False
    coefficients = _NO_COEFFICIENTS

    def __init__(self) -> None:
        self._files: list[ModuleType] | None = None  # that define a router loss
        self._done = 0  # micro-batches
        self._factors: dict[str, float] = {}
        self._terms: dict[str, tuple[int, Reduction]] = {}  # of the first micro-batch, by order of calls
        self._matches: dict[str, list[Match]] = {}
        self._known: list[Number] = []  # weights of the whole batch by order of calls, where a first pass ran
        self._routers: list[WholeRouterLoss] = []
        self._promised: Mapping[str, Number] = {}
        self._weights: list[Mapping[str, Number]] = []  # of each micro-batch

    def evaluate(self, model: nn.Module, micro: Any) -> Evaluated:
        """Run the model and take its loss apart."""
        keep_graph = torch.is_grad_enabled()
        with torch.enable_grad(), recorded(self._router_files(model)) as routers, Watch() as watch:
            output = call_model(model, micro)
        tail = read_tail(model, loss_of(model, output), [*watch.found, *routers])
        reached = {index: one for index, one in enumerate(watch.found) if index in tail.factors}
        asked = [index for index in range(len(routers)) if tail.factors.get(len(watch.found) + index)]
        names = _names([*reached.values()], ["router"] * len(asked))
        terms = dict(zip(names, reached.items(), strict=False))
        factors = {name: tail.factors[index] for name, (index, _) in terms.items()}
        if not self._done:
            self._look(model, terms, tail, micro)
        sums = {name: widened(one.sum) * factors[name] for name, (_, one) in terms.items()}
        weights: dict[str, Number] = {
            name: int(not self._done) if one.is_sum else one.weight for name, (_, one) in terms.items()
        }
        for name, index in zip(names[len(terms) :], asked, strict=True):
            factors[name] = tail.factors[len(watch.found) + index]
            if keep_graph:
                sums[name] = self._share(model, index, routers[index], factors[name])
                weights[name] = int(not self._done)
        self._repeat(model, factors)
        self._done += 1
        self._weights.append(weights)
        if not keep_graph:
            sums = {name: value.detach() for name, value in sums.items()}
        return Evaluated(sums, lambda: weights)

    def divisors(self, batch: Batch, first: Evaluated, first_rows: int) -> Mapping[str, Number] | None:
        """The weights of the whole batch, as far as the first micro-batch shows where they come from."""
        terms, self._terms = self._terms, {}
        if all(one.is_sum for _, one in terms.values()) and len(terms) == len(first.sums):
            return dict.fromkeys(first.sums, 1)
        if not batch.rows:
            return None
        leaves = {} if batch.whole is None else leaves_of(batch.whole)
        found = {
            name: self._weigh_whole(name, *terms[name], batch.rows, first_rows, leaves)
            if name in terms
            else 1
            for name in first.sums
        }
        known = {name: weight for name, weight in found.items() if weight is not None}
        if len(known) < len(found):
            return None
        self._promised = known
        return known

    def uncut(self) -> Loss:
        """The model's own loss, to the bit."""
        return OwnLoss()

    def along(
        self, batch: Batch, micro_batch: int, model: nn.Module, put_back: Callable[[], None]
    ) -> Iterable[Loss]:
        """The same for every micro-batch; before a router loss, all scores of the router without graph."""
        if not batch.rows:
            return itertools.repeat(self)
        if self._router_files(model) and wants_router_loss(model):
            self._first_pass(batch.cut(micro_batch), model, put_back)
        return self._kept_to_the_end(len(cut_sizes(batch.rows, micro_batch)), model)

    def _kept_to_the_end(self, micro_batches: int, model: nn.Module) -> Generator[Loss]:
        """The same for every micro-batch; then what was promised of the whole batch is held against them."""
        yield from itertools.repeat(self, micro_batches)
        for name, promised in self._promised.items():
            added = math.fsum(float(weights[name]) for weights in self._weights)
            if not math.isclose(float(promised), added, rel_tol=1e-6):
                raise LossError(
                    f"Expected {type(model).__name__} to make its targets from the batch as in the first "
                    f"micro-batch, {float(promised):g} in all for {name!r}, got {added:g}. Bring the rows in "
                    "a step.window(), or a list of samples with a `collate`: there the division comes last."
                )

    def _first_pass(self, micros: Iterable[Any], model: nn.Module, put_back: Callable[[], None]) -> None:
        before = rng.capture_process()
        weights: list[list[Number]] = []
        calls: list[list[RouterLoss]] = []
        with torch.no_grad(), recorded(self._router_files(model)) as routers:
            for micro in micros:
                with Watch() as watch:
                    call_model(model, micro)
                weights.append([one.weight for one in watch.found])
                calls.append([*routers])
                routers.clear()
        if len({len(row) for row in weights}) == 1:
            self._known = [sum(column) for column in zip(*weights, strict=True)]
        self._routers = [WholeRouterLoss(parts) for parts in zip(*calls, strict=False)]
        put_back()
        torch.clear_autocast_cache()  # of weights cast without graph
        rng.restore_process(before)

    def _share(self, model: nn.Module, index: int, call: RouterLoss, factor: float) -> Tensor:
        if index < len(self._routers):
            return self._routers[index].part(self._done, call, factor)
        raise LossError(
            f"Expected the router loss of {type(model).__name__} in a batch that the step cuts itself, with "
            f"`output_router_logits` in the model's config, got {call.settings} without a first pass. "
            f"Rows meet in it. {ADVICE}"
        )

    def _look(
        self, model: nn.Module, terms: Mapping[str, tuple[int, Reduction]], tail: Tail, micro: Any
    ) -> None:
        """Refuse by name what is no mean over rows; note where the weights come from."""
        leaves = leaves_of(micro)
        rows = rows_of(leaves.values())
        for name, (_, one) in terms.items():
            matches = find(one.origin, leaves)
            fault = _fault(one, rows, tail, has_labels=bool(matches))
            if fault:
                raise LossError(
                    f"Expected the loss of {type(model).__name__} to be made of means over rows, got {fault} "
                    f"in {one.name}. {WAYS_OUT}"
                )
            self._matches[name] = matches
        self._terms = dict(terms)

    def _weigh_whole(
        self, name: str, index: int, one: Reduction, rows: int, first_rows: int, leaves: Mapping[str, Tensor]
    ) -> Number | None:
        if one.is_sum:
            return 1
        if self._known:
            return self._known[index]
        if not leaves:
            return None
        if one.origin.counts_classes:
            return count(one.origin, self._matches[name], leaves)
        if isinstance(one.weight, Tensor) or one.weight % first_rows or selects(one.source):
            return None
        return one.weight * rows // first_rows  # every row weighs the same; checked when the step closes

    def _repeat(self, model: nn.Module, factors: dict[str, float]) -> None:
        if not self._done:
            self._factors = factors
        if factors != self._factors:
            raise LossError(
                f"Expected the loss of {type(model).__name__} to be made of the same means with the same "
                f"factors in every micro-batch, got {factors} after {self._factors}. {WAYS_OUT}"
            )

    def _router_files(self, model: nn.Module) -> list[ModuleType]:
        if self._files is None:
            self._files = homes(model)
        return self._files


class OwnLoss:
    """A model's own loss of a batch that is not cut, to the bit; noted is only what it weighs.

    Example:
        >>> evaluated = OwnLoss().evaluate(nn.MSELoss(), (torch.ones(2, requires_grad=True), torch.zeros(2)))
        >>> evaluated.sums["loss"].item(), evaluated.weigh()
        (1.0, {'loss': 2})
    """

    divided = True
    counted = False
    coefficients = _NO_COEFFICIENTS

    def evaluate(self, model: nn.Module, micro: Any) -> Evaluated:
        """Run the model."""
        with Watch(as_is=True) as watch:
            output = call_model(model, micro)
        loss = loss_of(model, output)
        try:
            tail = read_tail(model, loss, watch.found)
        except LossError:  # which a batch that is not cut need not care about
            return Evaluated({"loss": loss}, lambda: {"loss": 1})
        reached = [watch.found[index] for index in tail.factors]
        names = _names(reached, [])
        weights = {name: one.weight for name, one in zip(names, reached, strict=True)}
        if len(names) == 1 or not all(weights.values()):  # a mean of nothing beside others: all is NaN
            empty = not any(weights.values())
            return Evaluated(
                {"loss": loss}, lambda: {"loss": 0 if empty else next(iter(weights.values())) or 1}
            )
        # All of the gradient flows through the first, the values are told apart.
        values = [
            one.value.detach() * factor for one, factor in zip(reached, tail.factors.values(), strict=True)
        ]
        sums = dict(zip(names, [loss + (values[0] - loss).detach(), *values[1:]], strict=True))
        return Evaluated(sums, lambda: weights)

    def divisors(self, batch: Batch, first: Evaluated, first_rows: int) -> Mapping[str, Number] | None:
        """What the means were divided by already."""
        return first.weigh()

    def uncut(self) -> Loss:
        """It is."""
        return self

    def along(
        self, batch: Batch, micro_batch: int, model: nn.Module, put_back: Callable[[], None]
    ) -> Iterable[Loss]:
        """The same loss."""
        return itertools.repeat(self)


def _names(reductions: Sequence[Reduction], others: Sequence[str]) -> list[str]:
    """`loss` where it is the only one; else the functions' names, numbered where they come again."""
    names = [*(one.name for one in reductions), *others]
    if len(names) == 1:
        return ["loss"]
    nth = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return [name if number == 1 else f"{name} {number}" for name, number in zip(names, nth, strict=True)]


def _fault(one: Reduction, rows: int, tail: Tail, *, has_labels: bool) -> str:
    """What is wrong with a reduction, in words; empty where nothing is."""
    if one.is_sum and tail.scales:
        return "a sum that is scaled afterwards, perhaps by the number of its rows,"
    if one.pairs_rows and not has_labels:
        return "rows as each other's classes (a contrastive loss)"
    if rows and compares_rows(one.source, rows):
        return "every row compared with every other (a contrastive loss)"
    if folds_rows(one.source):
        return "a tensor that was folded along its first axis before"
    if one.source is not None and rows and one.origin.axis % rows and not selects(one.source):
        return f"a first axis of {one.origin.axis} that is no multiple of the {rows} rows"
    return ""
