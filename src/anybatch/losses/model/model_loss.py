"""A model that computes its own loss, of any head: its means become sums with weights."""

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import Any, cast

import torch
from torch import Tensor, nn

from anybatch import integrations
from anybatch.core import Batch, BatchError, LossError, Number, tree
from anybatch.losses.loss import EvaluateAgain, Evaluated, Loss, Share, first_pass_rows
from anybatch.losses.model.graph import (
    WAYS_OUT,
    LossTerms,
    adds_nothing,
    call_model,
    found_in,
    loss_of,
)
from anybatch.losses.model.intercept import (
    Reduction,
    Watch,
    is_equal,
    is_like_parameters,
    is_over_means,
    selects,
    sum_of,
    widened,
)
from anybatch.losses.model.read import Form, forget_form, known_form, learn_form
from anybatch.losses.model.targets import Match, count, find, leaves_of
from anybatch.losses.terms import call_loss, check_function, told_of
from anybatch.state import rng

_DIVIDED = (
    "Write (x * mask).sum() / mask.sum() as x[mask].mean(), with a bool mask, return (x, mask) from "
    "ab.PerRow, or return each sum with its divisor, as of boxes and classes:\ndef loss(model, micro):\n"
    '    return {"boxes": ab.Total(distances.sum(), count), "classes": ab.Total(losses.sum(), weights)}\n'
    'step = ab.Step(model, ab.Terms(loss, coefficients={"boxes": 5.0}), optimizer, micro_batch=4)'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoss:
    """The loss that the model itself computes and returns, as models of transformers do.

    The batch goes into the model unchanged: a mapping as keyword arguments, labels included. The output has
    the loss as `.loss`, as `["loss"]` or as the only scalar of a tuple, or it is the loss. With `call`, that
    function `(model, batch)` is called in place of the model, such as a `training_step`.

    The gradient is that of the model's own loss on the whole batch, for every head whose loss is a sum of
    means and sums with constant factors, and for the router loss of transformers' mixtures of experts. Other
    losses are refused by name. The loss of a batch that is not split is bit-identical.

    Many heads compute their loss in float32 for any dtype of the model. If the weight of the whole batch is
    known beforehand (tensors that the step splits) the arithmetic is the same; in windows and lists of
    samples the division comes at the end, and agrees up to the rounding of float32.

    Evaluation leaves out a router loss, because it belongs to a whole batch. It also builds a graph, to
    separate the terms, and drops it. Constants and detached parts count to the first term, with its weight.

    Args:
        call: takes the model and a micro-batch, returns the mean over its rows, a scalar tensor of shape ().
            None for a model that returns its loss.

    Raises:
        LossError: `call` cannot be called; in a step: the loss is not made of means that can be divided.

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
        >>> loss = ModelLoss(call=lambda model, batch: model.score(batch).square().mean())
        >>> ab.Step(model, loss, step.optimizers[0], micro_batch=2)(torch.ones(5, 3)).weights
        {'loss': 10.0}
    """

    call: Callable[[nn.Module, Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.call is not None:
            check_function(self.call, "(model, batch) that returns a mean")

    def begin(self) -> "ModelTerms":
        """Return the object that reads the model's loss during one step."""
        return ModelTerms(None if self.call is None else partial(_called, self.call))


def _called(function: Callable[[nn.Module, Any], Any], model: nn.Module, micro: Any) -> Any:
    """Return the result of a function that computes a mean, in the place of a model that returns its loss."""
    output = call_loss(function, model, micro)
    try:
        loss_of(model, output)
    except LossError as error:
        if adds_nothing(output):
            return output
        raise LossError(
            "Expected a mean over rows with gradient, a scalar tensor of shape (), from the function in "
            f"ab.ModelLoss(call=...), got {told_of(output)}. For a value for each row or entry pass "
            "ab.PerRow(fn), with fn(outputs, targets); a function that returns an ab.Total needs no wrapper."
        ) from error
    return output


class ModelTerms(Loss):
    """The terms of a model's loss during one step; all micro-batches must have those of the first.

    The model is watched. If its loss is one mean over classes, as of most heads, the next micro-batches and
    steps read the divisor from the graph, which costs less; a loss of another form is watched again.
    """

    divided = False
    counted = False
    is_plain = False

    def __init__(self, call: Callable[[nn.Module, Any], Any] | None = None) -> None:
        self.call = call or call_model
        self._known: Mapping[str, Number] = {}  # weights of the whole batch, after a first pass
        self._is_window = False  # its weights add up later
        self._routers: Mapping[str, integrations.WholeRouterLoss] = {}
        self._places: Mapping[int, int] = {}  # index of each micro-batch of the first pass, by its first row
        self._begin()

    def _begin(self) -> None:
        self._start = -1  # first row of the current micro-batch; -1 if unknown
        self._first: LossTerms | None = None  # terms of the first micro-batch that has a loss
        self._first_start = -1  # first row of that micro-batch
        self._matches: Mapping[str, list[Match]] = {}
        self._starts: set[int] = set()  # first rows of the micro-batches so far

    def evaluate(self, model: nn.Module, micro: Any) -> Evaluated:
        """Run the model and split its loss into terms."""
        keep_graph = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        form = None if self._routers or torch.is_inference_mode_enabled() else known_form(model)
        if form is not None:
            with torch.enable_grad():  # the divisor is in the graph
                read = self._read(model, micro, form)
            return (
                read if keep_graph else Evaluated({k: v.detach() for k, v in read.sums.items()}, read.weigh)
            )
        found = self._watch(model, micro)
        if found is None:
            return self._nothing(keep_graph=keep_graph)
        return self._taken(model, found, keep_graph=keep_graph)

    def _taken(self, model: nn.Module, found: LossTerms, *, keep_graph: bool) -> Evaluated:
        is_first = self._first is None or 0 <= self._start == self._first_start
        if self._first is None:
            self._look(model, found)
            learn_form(model, found)
        else:
            _refuse_others(model, self._first, found)
        once = int(is_first)  # the whole batch has one sum
        terms, factors = found.terms, found.factors
        sums = {
            name: widened(one.sum) if factors[name] == 1 else widened(one.sum) * factors[name]
            for name, one in terms.items()
        }
        weights = {name: once if one.is_sum else one.weight for name, one in terms.items()}
        if found.constant is not None and (first := next(iter(sums), None)):
            sums[first] = sums[first] + found.constant * weights[first]
        if keep_graph:
            for name, call in found.routers.items():
                sums[name] = self._router_share(model, name, call, factors[name])
                weights[name] = once
        else:
            sums = {name: value.detach() for name, value in sums.items()}
        return self._done_with(Evaluated(sums, lambda: weights))

    def divisors(self, batch: Batch, first: Evaluated, first_rows: int) -> Mapping[str, Number] | None:
        """Return the weights of the whole batch, if the first micro-batch shows their source."""
        if self._first is None:
            return None
        terms = self._first.terms
        if all(one.is_sum for one in terms.values()) and len(terms) == len(first.sums):
            return dict.fromkeys(first.sums, 1)
        if not batch.rows:
            return None
        leaves = {} if batch.whole is None else leaves_of(batch.whole)
        promised: dict[str, Number] = dict.fromkeys(first.sums, 1)  # router losses and sums
        for name, one in terms.items():
            if one.is_sum or name not in first.sums:
                continue
            weight = self._known.get(name)
            if weight is None:
                weight = _weigh_whole(one, self._matches[name], batch.rows, first_rows, leaves)
            if weight is None:
                return None
            promised[name] = weight
        return promised

    def uncut(self) -> Loss:
        """Return the model's own loss, bit-identical."""
        return OwnLoss(self.call)

    @contextmanager
    def along(
        self, batch: Batch, sizes: Sequence[int], model: nn.Module, put_back: Callable[[], None]
    ) -> Generator[Share]:
        """Return a context with this loss for all rows; a router loss takes a first pass before it."""
        self._known, self._routers, self.tied, self._is_window = {}, {}, False, not batch.rows
        self._begin()
        if batch.rows and integrations.homes(model) and integrations.wants_router_loss(model):
            self._first_pass(batch, sizes, model, put_back)
        yield self._share

    def _share(self, start: int, stop: int) -> Loss:
        if start <= self._first_start:  # the first micro-batch is repeated, perhaps in smaller parts
            self._begin()
        self._start = start
        return self

    def _first_pass(
        self, batch: Batch, sizes: Sequence[int], model: nn.Module, put_back: Callable[[], None]
    ) -> None:
        before = rng.capture_process()
        weights: list[Mapping[str, Number]] = []
        calls: list[Mapping[str, integrations.RouterLoss]] = []
        for micro in first_pass_rows(batch, sizes):
            found = self._watch(model, micro)
            if found is not None:
                weights.append({name: one.weight for name, one in found.terms.items()})
                calls.append({name: call.detached() for name, call in found.routers.items()})
            del found  # frees its graph
        # Micro-batches with other terms are refused in the second pass.
        if weights and all(row.keys() == rows[0].keys() for rows in (weights, calls) for row in rows):
            self._known = {name: sum(row[name] for row in weights) for name in weights[0]}
            self._routers = {
                name: integrations.WholeRouterLoss([row[name] for row in calls]) for name in calls[0]
            }
            self.tied = bool(
                self._routers
            )  # the second pass must have the same parts: scores are summed by part
            starts = itertools.accumulate(sizes, initial=0)
            self._places = {start: index for index, start in enumerate(starts)}
        put_back()
        torch.clear_autocast_cache()  # holds cast weights of the dropped graph
        rng.restore_process(before)

    def _read(self, model: nn.Module, micro: Any, form: Form) -> Evaluated:
        micro = _outside_inference(micro)
        output = self.call(model, micro)
        if adds_nothing(output):
            return self._nothing(keep_graph=True)
        loss = loss_of(model, output)
        weight = form.weigh(loss)
        if weight is None:
            forget_form(model)
            raise EvaluateAgain
        if self._first is None:
            self._look(model, form.read(loss, weight, leaves_of(micro)))
        return self._done_with(Evaluated({"loss": sum_of(loss, weight)}, lambda: {"loss": weight}))

    def _watch(self, model: nn.Module, micro: Any) -> LossTerms | None:
        with torch.inference_mode(False), torch.enable_grad():  # in evaluation too, to separate the terms
            micro = _outside_inference(micro)
            with integrations.recorded(integrations.homes(model)) as routers, Watch(model) as watch:
                output = self.call(model, micro)
            if adds_nothing(output):
                return None
            return found_in(model, loss_of(model, output), watch, routers, leaves_of(micro))

    def _nothing(self, *, keep_graph: bool) -> Evaluated:
        names = ["loss"]  # unless another micro-batch has more terms
        if self._first is not None:
            names = [*self._first.terms, *(self._first.routers if keep_graph else ())]
        weights = dict.fromkeys(names, 0)
        return self._done_with(Evaluated(dict.fromkeys(names, widened(torch.zeros(()))), lambda: weights))

    def _done_with(self, evaluated: Evaluated) -> Evaluated:
        self._starts.add(self._start if self._start >= 0 else len(self._starts))
        return evaluated

    def _router_share(
        self, model: nn.Module, name: str, call: integrations.RouterLoss, factor: float
    ) -> Tensor:
        if name in self._routers:
            return self._routers[name].part(self._places[self._start], call, factor)
        raise LossError(
            f"Expected the router loss of {type(model).__name__} in a batch that the step cuts itself, with "
            f"`output_router_logits` in the model's config, got {call.settings} without a first pass. "
            f"Rows meet in it. {integrations.ROUTER_ADVICE}"
        )

    def _look(self, model: nn.Module, found: LossTerms) -> None:
        # To compare targets with the batch stops a device; the gradient of a single term may be divided last.
        is_late = self._is_window or (len(found.factors) == 1 and not _is_near(found))
        self._matches = {
            name: []
            if is_late and not one.pairs_rows
            else find(one.origin, found.leaves, padded=found.padded)
            for name, one in found.terms.items()
        }
        for name, one in found.terms.items():
            fault = _fault(one, divides=found.divides, has_labels=bool(self._matches[name]))
            if fault:
                raise LossError(
                    f"Expected the loss of {type(model).__name__} to be made of means over rows, got {fault} "
                    f"in {one.name}. {_DIVIDED if one.is_sum and found.divides else WAYS_OUT}"
                )
        if self._starts - {self._start} and [*found.factors] != ["loss"]:
            raise LossError(
                f"Expected a loss of {type(model).__name__} in the first micro-batch, got a constant 0, and "
                f"{[*found.factors]} later. Put a row that is not ignored first, or do not cut the batch."
            )
        self._first, self._first_start = found.forgotten(), self._start


class OwnLoss(Loss):
    """A model's own loss of a batch that is not cut, bit-identical, with its weight."""

    divided = True
    counted = False
    is_plain = False

    def __init__(self, call: Callable[[nn.Module, Any], Any]) -> None:
        self.call = call

    def evaluate(self, model: nn.Module, micro: Any) -> Evaluated:
        """Run the model."""
        if not torch.is_grad_enabled():
            return Evaluated({"loss": loss_of(model, self.call(model, micro))}, lambda: {"loss": 1})
        form = known_form(model)
        if form is not None:
            loss = loss_of(model, self.call(model, micro))
            weight = form.weigh(loss)
            if weight is None:
                forget_form(model)
                raise EvaluateAgain
            return Evaluated({"loss": loss}, lambda: {"loss": weight})
        with Watch(model, as_is=True) as watch:
            output = self.call(model, micro)
        loss = loss_of(model, output)
        try:
            found = found_in(model, loss, watch, [], {})
        except LossError:  # does not matter for a batch that is not cut
            return Evaluated({"loss": loss}, lambda: {"loss": 1})
        learn_form(model, found)
        weights = {name: one.weight for name, one in found.terms.items()}
        if len(weights) == 1 or not all(weights.values()):  # one mean of nothing makes the loss NaN
            weight = next(iter(weights.values()))
            if len(weights) > 1:
                weight = (weight or 1) if any(weights.values()) else 0
            return Evaluated({"loss": loss}, lambda: {"loss": weight})
        # The first term carries the whole gradient; the values are separate.
        sums = {name: one.value.detach() * found.factors[name] for name, one in found.terms.items()}
        first = next(iter(sums))
        if found.constant is not None:
            sums[first] = sums[first] + found.constant.to(loss.dtype)
        sums[first] = loss + (sums[first] - loss).detach()
        return Evaluated(sums, lambda: weights)


def _weigh_whole(
    one: Reduction, matches: Sequence[Match], rows: int, first_rows: int, leaves: Mapping[str, Tensor]
) -> Number | None:
    if not leaves:
        return None
    axis = one.shape[0] if one.shape else 0
    if one.origin.counts_classes:
        return count(one.origin, matches, leaves)
    if isinstance(one.weight, Tensor) or axis != first_rows or one.picks:
        return None  # of other rows, as of anchors or weights, or of more than one entry a row
    if one.may_be_parameters and rows % first_rows:  # its weight may not depend on the rows
        return None
    return one.weight * rows // first_rows  # all rows weigh the same; checked at the end of the step


def _refuse_others(model: nn.Module, first: LossTerms, found: LossTerms) -> None:
    if found.factors != first.factors:
        way_out = (
            "Of a loop over rows, or a branch such as `if mask.any()`, return an ab.Total for each term: a "
            "sum and what divides it, 0 where it has no rows."
        )
        if found.factors.keys() == first.factors.keys():
            way_out = f"Draw a factor before the step, as mixup's, and put it into the batch. {WAYS_OUT}"
        raise LossError(
            f"Expected the loss of {type(model).__name__} to be made of the same means with the same "
            f"factors in every micro-batch, got {found.factors} after {first.factors}. {way_out}"
        )
    for name, one in found.terms.items():
        old = first.terms[name]
        changed = [key for key, value in old.fixed.items() if not is_equal(value, one.origin.settings[key])]
        if changed:
            values = one.origin.settings[changed[0]], old.fixed[changed[0]]
            shown = [shorten(str(value), 60) for value in values]
            raise LossError(
                f"Expected the settings of {one.name} in {type(model).__name__} to be the same in every "
                f"micro-batch, got {changed[0]} = {shown[0]} after {shown[1]}. Compute it for the whole "
                "batch and hand it to the model, or do not cut the batch."
            )
        if first.rows and found.rows not in (0, first.rows) and _ignores_rows(old, one):
            raise LossError(
                f"Expected means over rows in the loss of {type(model).__name__}, got {one.name} over "
                f"{one.weight} elements from {found.rows} rows as from {first.rows}: "
                f"rows have met before it. {WAYS_OUT}"
            )


def _is_near(found: LossTerms) -> bool:
    return all(one.origin.target is None or one.origin.target.is_cpu for one in found.terms.values())


def _fault(one: Reduction, *, divides: bool, has_labels: bool) -> str:
    if one.is_sum and divides:  # the divisor may be a constant or the number of rows
        return "a sum that is divided afterwards, perhaps by the number of its rows,"
    if one.is_sum and is_like_parameters(one):
        if is_over_means(one):
            return "a sum over means of rows (a router's loss), in which rows meet,"
        return (
            "a sum of parameters, which every micro-batch would add again (call its backward() before the "
            "step, which adds to gradients that it finds),"
        )
    if one.pairs_rows and not has_labels:
        return "rows as each other's classes (a contrastive loss)"
    return ""


def _ignores_rows(first: Reduction, other: Reduction) -> bool:
    """Return True if the number of elements of a mean does not depend on the rows, but its value does.

    A mean of parameters alone has the same value. An index may select the same number by chance.
    """
    if other.is_sum or other.origin.counts_classes or isinstance(other.weight, Tensor):
        return False
    if first.weight != other.weight:
        return False
    same = math.isclose(first.value.item(), other.value.item(), rel_tol=1e-6)
    return not same and not selects(other.source)


def _outside_inference(micro: Any) -> Any:
    if type(micro) is dict:
        values: Iterable[Any] = cast("dict[str, Any]", micro).values()
        if all(type(one) is Tensor and not one.is_inference() for one in values):  # the usual case
            return micro
    try:
        return tree.map_leaves(lambda leaf: leaf.clone() if leaf.is_inference() else leaf, micro)
    except BatchError:
        return micro
