"""Mistakes that others have made, or that we could make: each must break a law."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from anybatch.core import Cut
from anybatch.engine import Apart, Sums, Window, gradients, window
from anybatch.engine.gradients import InPlace
from anybatch.engine.part import Part
from anybatch.engine.sums import Division
from anybatch.losses import reductions as kinds
from anybatch.losses.loss import Evaluated
from anybatch.losses.torch_losses import SummedLoss
from anybatch.precision.loss_scale import LossScale
from anybatch.precision.master_weights import Masters
from anybatch.state import Contents, Snapshot, rng, snapshot

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


def _put(place: Any, name: str, value: Any) -> Mutation:
    """The mistake is another value."""
    return lambda patch: patch.setattr(place, name, value)


def _in_place_of(place: Any, name: str) -> Callable[[Callable[..., Any]], Mutation]:
    """The mistake is a function that gets the right one and its arguments."""

    def mutation(mistake: Callable[..., Any]) -> Mutation:
        def mutate(patch: Patch) -> None:
            right = getattr(place, name)
            patch.setattr(place, name, lambda *args, **options: mistake(right, *args, **options))

        return mutate

    return mutation


# ---- the divisor


def mean_of_means(patch: Patch) -> None:
    evaluate = SummedLoss.evaluate

    def mean(self: SummedLoss, model: Any, micro: Any) -> Evaluated:
        return Evaluated(evaluate(replace(self, divided=True), model, micro).sums, lambda: {"loss": 1})

    patch.setattr(SummedLoss, "evaluate", mean)
    divide_by_the_number_of_micro_batches(patch)


def divide_by_the_number_of_micro_batches(patch: Patch) -> None:
    def divisors(self: SummedLoss, batch: Any, first: Evaluated, rows: int) -> Mapping[str, int] | None:
        return {"loss": -(-batch.rows // rows)} if batch.rows else None

    patch.setattr(SummedLoss, "divisors", divisors)
    patch.setattr(SummedLoss, "counted", True)


@_in_place_of(SummedLoss, "divisors")
def first_weight_times_micro_batches(right: Any, loss: SummedLoss, batch: Any, first: Any, rows: int) -> Any:
    """As if every micro-batch held as many valid targets as the first."""
    return {"loss": first.weigh()["loss"] * batch.rows / rows}


def _weigh_otherwise(weigh: Callable[..., Any]) -> Mutation:
    def mutate(patch: Patch) -> None:
        for table in (kinds.FUNCTIONS, kinds.MODULES):
            for key, kind in table.items():
                if kind is kinds.CLASSES:
                    patch.setitem(table, key, replace(kind, weigh=weigh))

    return mutate


def _without(forgotten: str) -> Mutation:
    """The weight counted as if this setting were not there."""
    return _weigh_otherwise(
        lambda settings, *rest: kinds.CLASSES.weigh(
            {name: value for name, value in settings.items() if name != forgotten}, *rest
        )
    )


def _smoothing_by_count(settings: Mapping[str, Any], *rest: Any) -> Any:
    """The smooth part of the loss divided by the number of targets, not by their class weights."""
    share = settings.get("label_smoothing", 0.0)
    count = kinds.CLASSES.weigh({**settings, "weight": None}, *rest)
    return (1 - share) * kinds.CLASSES.weigh(settings, *rest) + share * count


rows_instead_of_valid_targets = _weigh_otherwise(lambda settings, arguments, targets: len(targets[0]))
elements_of_soft_targets = _weigh_otherwise(lambda settings, arguments, targets: targets[0].numel())
class_weights_forgotten = _without("weight")
ignored_index_forgotten = _without("ignore_index")
smoothing_divided_by_count = _weigh_otherwise(_smoothing_by_count)
uncut_divided_by_ourselves = _put(SummedLoss, "uncut", lambda self: self)


def batchmean_as_mean(patch: Patch) -> None:
    for name in ("evaluate", "_weigh"):
        right = getattr(SummedLoss, name)
        patch.setattr(
            SummedLoss, name, lambda self, *args, right=right: right(replace(self, is_batchmean=False), *args)
        )


def ctc_without_target_lengths(patch: Patch) -> None:
    plain = replace(kinds.SEQUENCES, terms=lambda losses, arguments: losses)
    patch.setitem(kinds.FUNCTIONS, torch.nn.functional.ctc_loss, plain)


@_in_place_of(Division, "factors")
def late_divisor_of_another_term(right: Any, division: Division, weights: Mapping[str, float]) -> Any:
    factors = right(division, weights)
    values = list(factors.values())
    return dict(zip(factors, values[1:] + values[:1], strict=True))


@_in_place_of(Apart, "add")
def one_bank_for_all_terms(add: Any, sums: Apart, *args: Any) -> None:
    banks = sums.banks
    sums.banks = {name: banks[name] for name in [*banks][:1]}
    add(sums, *args)
    sums.banks = banks


@_in_place_of(Part, "_open")
def coefficients_forgotten(right: Any, part: Part, *args: Any) -> None:
    right(part, *args)
    division = part.sums.division
    forgotten = dict.fromkeys(division.coefficients, 1.0)
    part.sums.division = replace(division, coefficients=forgotten, cotangents={})


@_in_place_of(Part, "_open")
def another_provisional_divisor_in_each_add(right: Any, part: Part, *args: Any) -> None:
    right(part, *args)
    if not part.ways.is_whole:
        division = part.sums.division
        halved = {name: value / 2 for name, value in division.provisional.items()}
        part.sums.division = replace(division, provisional=halved, cotangents={})


# ---- the sum


@_in_place_of(SummedLoss, "evaluate")
def mean_times_count(evaluate: Any, loss: SummedLoss, *args: Any) -> Evaluated:
    """NaN where a micro-batch holds nothing valid."""
    mean = evaluate(replace(loss, divided=True), *args)
    return Evaluated({"loss": mean.sums["loss"] * mean.weigh()["loss"]}, mean.weigh)


@_in_place_of(Part, "__init__")
def last_micro_batch_dropped(begin: Any, schedule: Part, *args: Any, **options: Any) -> None:
    begin(schedule, *args, **options)
    schedule._cut = Cut(schedule._cut.parts[:-1]) if len(schedule._cut.parts) > 1 else schedule._cut


@_in_place_of(Part, "backward")
def tail_scaled_like_a_full_one(backward: Any, part: Part, terms: Evaluated) -> None:
    factor = part.ways.plan.micro_batch / len(part.left[0])
    backward(part, terms._replace(sums={name: value * factor for name, value in terms.sums.items()}))


# ---- the accumulator

sums_in_the_parameters_dtype = _put(gradients, "accumulation_dtype", lambda own, chosen=None: chosen or own)
memory_left_shared = _put(InPlace, "_own_memory", lambda self: None)
gradients_of_the_step_before_left_over = _put(Window, "discard", lambda self, error=None: None)
gradients_found_dropped = _put(Snapshot, "gradients_found", lambda self: [])
what_was_accepted_comes_again = _put(InPlace, "has_accepted", False)


@_in_place_of(Apart, "take")
def windows_merged_twice(take: Any, sums: Apart, other: Any) -> None:
    found = {p: p.grad for p in sums._parameters}
    take(sums, other)
    for parameter, gradient in found.items():
        parameter.grad = gradient
    take(sums, other)


# ---- the update


@_in_place_of(Part, "backward")
def clip_per_micro_batch(backward: Any, part: Part, terms: Evaluated) -> None:
    backward(part, terms)
    torch.nn.utils.clip_grad_norm_(part.task.network.parameters, part.ways.plan.clip_norm)


@_in_place_of(Part, "backward")
def update_per_micro_batch(backward: Any, part: Part, terms: Evaluated) -> None:
    backward(part, terms)
    for optimizer in part.task.optimizers:
        optimizer.step()


@_in_place_of(Window, "write")
def schedule_per_micro_batch(write: Any, one: Window) -> Any:
    report = write(one)
    for scheduler in [*one._task.schedulers] * (report.micro_batches - 1):
        scheduler.step()
    return report


@_in_place_of(Sums, "weigh")
def masked_batches_update_too(weigh: Any, sums: Sums) -> Mapping[str, Any]:
    return {name: weight or 1.0 for name, weight in weigh(sums).items()}


# ---- precision


@_in_place_of(Apart, "add")
def scale_left_in_the_gradient(
    add: Any, sums: Apart, values: Any, cotangents: Any, unscale: float = 1.0
) -> None:
    add(sums, values, cotangents)


an_overflow_loses_the_update = _put(LossScale, "give_way", lambda self: False)
no_weight_backup = _put(Masters, "raised", lambda self, parameters, optimizers: nullcontext())


# ---- failures

redone_with_another_mask = _put(rng, "restore", lambda state: None)
buffers_not_put_back = _put(snapshot, "_put_values_back", lambda copies: None)
attributes_not_put_back = _put(snapshot, "_contents", lambda state: Contents(()))
gradients_found_lost = _put(Snapshot, "put_gradients_back", lambda self, only=None: None)
containers_forgotten = _put(snapshot.ModuleState, "containers", lambda self: [])
attributes_left_by_a_first_pass = _put(
    Snapshot, "put_modules_back", lambda self: snapshot._put_values_back(self._copies)
)


@_in_place_of(Part, "cut_smaller")
def a_half_that_is_forgotten(right: Any, schedule: Part, most: int) -> None:
    rest = Cut(tuple(schedule.left)).of_at_most(most)
    schedule._cut = Cut((*schedule._cut.parts[: schedule._done], *rest.parts[1:]))


@_in_place_of(window, "recover")
def a_micro_batch_accepted_twice(recover: Any, error: Exception, schedule: Part, *rest: Any) -> None:
    """After the first failure the one before it comes again; after each of them a step would not end."""
    recover(error, schedule, *rest)
    if schedule._done and not hasattr(schedule, "was_here"):
        schedule._done, schedule.was_here = schedule._done - 1, True  # type: ignore[attr-defined]


@_in_place_of(rng, "restore")
def streams_of_python_and_numpy_forgotten(restore: Any, state: Any) -> None:
    restore(state._replace(others=()))


@_in_place_of(snapshot, "_contents")
def a_buffer_put_in_the_place_of_another_forgotten(_: Any, state: Any) -> Contents:
    buffers = [*map(id, state.buffers)]
    tables = [one for one in state.tables if id(one) not in buffers]
    return Contents([*state.attributes, *state.containers()], tables)


@_in_place_of(Part, "leave_out")
def dropped_rows_keep_their_weight(leave_out: Any, part: Part) -> None:
    rows = len(part.left[0])
    leave_out(part)
    part.sums.weights.append({"loss": rows})
