"""Mistakes that others have made, or that we could make: each must break a law."""

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch import StepReport
from anybatch.core import Cut, TensorBatch
from anybatch.engine import Accumulator, Apart, Gradients, Schedule, execute
from anybatch.engine.gradients import InPlace
from anybatch.losses import reductions as kinds
from anybatch.losses.loss import Evaluated, Plain
from anybatch.losses.torch_losses import SummedLoss
from anybatch.precision.loss_scale import LossScale
from anybatch.precision.master_weights import Masters
from anybatch.state import Snapshot, snapshot

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


# ---- the divisor


def mean_of_means(patch: Patch) -> None:
    evaluate = SummedLoss.evaluate

    def evaluate_mean(self: SummedLoss, model: Any, micro: Any) -> Evaluated:
        return Evaluated(evaluate(replace(self, divided=True), model, micro).sums, lambda: {"loss": 1})

    patch.setattr(SummedLoss, "evaluate", evaluate_mean)
    divide_by_the_number_of_micro_batches(patch)


def divide_by_the_number_of_micro_batches(patch: Patch) -> None:
    def divisors(self: SummedLoss, batch: Any, first: Evaluated, rows: int) -> Mapping[str, int] | None:
        return {"loss": -(-batch.rows // rows)} if batch.rows else None

    patch.setattr(SummedLoss, "divisors", divisors)
    patch.setattr(SummedLoss, "counted", True)


def first_weight_times_micro_batches(patch: Patch) -> None:
    """As if every micro-batch held as many valid targets as the first."""

    def divisors(self: SummedLoss, batch: Any, first: Evaluated, rows: int) -> Mapping[str, Any]:
        return {"loss": first.weigh()["loss"] * batch.rows / rows}

    patch.setattr(SummedLoss, "divisors", divisors)


def _weigh_otherwise(weigh: Callable[..., Any]) -> Mutation:
    def mutate(patch: Patch) -> None:
        for table in (kinds.FUNCTIONS, kinds.MODULES):
            for key, kind in table.items():
                if kind is kinds.CLASSES:
                    patch.setitem(table, key, replace(kind, weigh=weigh))

    return mutate


def _without(*forgotten: str) -> Mutation:
    """The weight counted as if these settings were not there."""

    def weigh(settings: Mapping[str, Any], arguments: Any, targets: Any) -> Any:
        left = {name: value for name, value in settings.items() if name not in forgotten}
        return kinds.CLASSES.weigh(left, arguments, targets)

    return _weigh_otherwise(weigh)


def _smoothing_by_count(settings: Mapping[str, Any], arguments: Any, targets: Any) -> Any:
    """The smooth part of the loss divided by the number of targets, not by their class weights."""
    share = settings.get("label_smoothing", 0.0)
    count = kinds.CLASSES.weigh({**settings, "weight": None}, arguments, targets)
    return (1 - share) * kinds.CLASSES.weigh(settings, arguments, targets) + share * count


rows_instead_of_valid_targets = _weigh_otherwise(lambda settings, arguments, targets: len(targets[0]))
elements_of_soft_targets = _weigh_otherwise(lambda settings, arguments, targets: targets[0].numel())
class_weights_forgotten = _without("weight")
ignored_index_forgotten = _without("ignore_index")
smoothing_divided_by_count = _weigh_otherwise(_smoothing_by_count)


def batchmean_as_mean(patch: Patch) -> None:
    patch.setattr(SummedLoss, "_is_batchmean", False)


def ctc_without_target_lengths(patch: Patch) -> None:
    plain = replace(kinds.SEQUENCES, terms=lambda losses, arguments: losses)
    patch.setitem(kinds.FUNCTIONS, torch.nn.functional.ctc_loss, plain)


def late_divisor_of_another_term(patch: Patch) -> None:
    finish = Gradients.finish

    def rotated(self: Gradients, factors: Mapping[str, float]) -> Any:
        values = list(factors.values())
        return finish(self, dict(zip(factors, values[1:] + values[:1], strict=True)))

    patch.setattr(Gradients, "finish", rotated)


def one_bank_for_all_terms(patch: Patch) -> None:
    def add_each(self: Apart, values: Any, cotangents: Any, unscale: float) -> None:
        self.add([*values.values()], [cotangents[name] for name in values], unscale=unscale)

    patch.setattr(Apart, "add_each", add_each)


def _after_opening(then: Callable[[Accumulator], None]) -> Mutation:
    def mutate(patch: Patch) -> None:
        opened = Accumulator._open

        def open_then(self: Accumulator, *args: Any) -> None:
            opened(self, *args)
            then(self)

        patch.setattr(Accumulator, "_open", open_then)

    return mutate


def _forget_coefficients(sums: Accumulator) -> None:
    forgotten = dict.fromkeys(sums._division.coefficients, 1.0)
    sums._division = replace(sums._division, coefficients=forgotten, cotangents={})


def _halve_divisors(sums: Accumulator) -> None:
    if sums._window is not None:
        halved = {name: value / 2 for name, value in sums._division.provisional.items()}
        sums._division = replace(sums._division, provisional=halved, cotangents={})


coefficients_forgotten = _after_opening(_forget_coefficients)
another_provisional_divisor_in_each_add = _after_opening(_halve_divisors)


def uncut_divided_by_ourselves(patch: Patch) -> None:
    patch.setattr(SummedLoss, "uncut", lambda self: self)


# ---- the sum


def mean_times_count(patch: Patch) -> None:
    """NaN where a micro-batch holds nothing valid."""
    evaluate = SummedLoss.evaluate

    def evaluate_product(self: SummedLoss, model: Any, micro: Any) -> Evaluated:
        mean = evaluate(replace(self, divided=True), model, micro)
        return Evaluated({"loss": mean.sums["loss"] * mean.weigh()["loss"]}, mean.weigh)

    patch.setattr(SummedLoss, "evaluate", evaluate_product)


def last_micro_batch_dropped(patch: Patch) -> None:
    begin = Schedule.__init__

    def shorter(self: Schedule, *args: Any) -> None:
        begin(self, *args)
        self._cut = Cut(self._cut.parts[:-1]) if len(self._cut.parts) > 1 else self._cut

    patch.setattr(Schedule, "__init__", shorter)


def first_micro_batch_twice(patch: Patch) -> None:
    micro_batches = TensorBatch.micro_batches

    def again(self: TensorBatch, parts: Any) -> Iterable[Any]:
        found = list(micro_batches(self, parts))
        return iter([found[0], *found[:-1]])

    patch.setattr(TensorBatch, "micro_batches", again)


def tail_scaled_like_a_full_one(patch: Patch) -> None:
    backward = Accumulator.backward

    def scaled(self: Accumulator, terms: Evaluated) -> None:
        assert self._micro is not None
        factor = self.plan.micro_batch / len(self._micro.indices)
        backward(self, terms._replace(sums={name: value * factor for name, value in terms.sums.items()}))

    patch.setattr(Accumulator, "backward", scaled)


def weights_of_rows_left_uncut(patch: Patch) -> None:
    patch.setattr(SummedLoss, "along", Plain.along)


def weights_of_other_rows(patch: Patch) -> None:
    along = SummedLoss.along

    @contextmanager
    def rotated(self: SummedLoss, batch: Any, sizes: Sequence[int], *rest: Any) -> Generator[Any]:
        with along(self, batch, sizes, *rest) as share:
            ends = list(itertools.accumulate(sizes))
            found = [share(end - size, end) for end, size in zip(ends, sizes, strict=True)]
            turned = dict(zip(ends, found[1:-1] + found[:1] + found[-1:], strict=True))
            yield lambda start, stop: turned[stop]

    patch.setattr(SummedLoss, "along", rotated)


# ---- the accumulator


def sums_in_the_parameters_dtype(patch: Patch) -> None:
    patch.setattr(
        "anybatch.engine.gradients.accumulation_dtype", lambda parameter, chosen=None: chosen or parameter
    )


def kahan_with_the_wrong_sign(patch: Patch) -> None:
    compensate = Apart._compensate

    def wrong(self: Apart, parameter: Any, gradient: Tensor, name: str) -> Any:
        if parameter in self.errors[name]:
            self.errors[name][parameter].neg_()
        return compensate(self, parameter, gradient, name)

    patch.setattr(Apart, "_compensate", wrong)


def kahan_without_compensation(patch: Patch) -> None:
    def plain(self: Apart, parameter: Any, gradient: Tensor, name: str) -> Any:
        return self._banks[name][parameter] + gradient, torch.zeros_like(gradient)

    patch.setattr(Apart, "_compensate", plain)


def memory_left_shared(patch: Patch) -> None:
    patch.setattr(InPlace, "_own_memory", lambda self: None)


def gradients_of_the_step_before_left_over(patch: Patch) -> None:
    patch.setattr(execute, "finish", lambda sums, before: None)


def windows_merged_twice(patch: Patch) -> None:
    absorb = Apart.absorb

    def twice(self: Apart, other: Gradients) -> None:
        absorb(self, other)
        absorb(self, other)

    patch.setattr(Apart, "absorb", twice)


def gradients_found_dropped(patch: Patch) -> None:
    patch.setattr(Snapshot, "gradients_found", lambda self: [])


# ---- the update


def _after_each_micro_batch(then: Callable[[Accumulator], None]) -> Mutation:
    def mutate(patch: Patch) -> None:
        backward = Accumulator.backward

        def backward_then(self: Accumulator, terms: Evaluated) -> None:
            backward(self, terms)
            then(self)

        patch.setattr(Accumulator, "backward", backward_then)

    return mutate


def _clip(sums: Accumulator) -> None:
    torch.nn.utils.clip_grad_norm_(sums.task.parameters, sums.plan.clip_norm)


def _step(sums: Accumulator) -> None:
    for optimizer in sums.task.optimizers:
        optimizer.step()


clip_per_micro_batch = _after_each_micro_batch(_clip)
update_per_micro_batch = _after_each_micro_batch(_step)


def schedule_per_micro_batch(patch: Patch) -> None:
    update = execute.update

    def update_then(gradient: Any, weights: Any, sums: Accumulator, before: Snapshot) -> StepReport:
        report = update(gradient, weights, sums, before)
        for scheduler in [*sums.task.schedulers] * (report.micro_batches - 1):
            scheduler.step()
        return report

    patch.setattr(execute, "update", update_then)


def masked_batches_update_too(patch: Patch) -> None:
    weights = Accumulator.weights
    patch.setattr(
        Accumulator, "weights", lambda self: {name: weight or 1.0 for name, weight in weights(self).items()}
    )


# ---- precision


def scale_left_in_the_gradient(patch: Patch) -> None:
    add = Apart.add

    def scaled(self: Apart, values: Any, cotangents: Any, unscale: float = 1.0) -> None:
        add(self, values, cotangents)

    patch.setattr(Apart, "add", scaled)


def an_overflow_loses_the_update(patch: Patch) -> None:
    patch.setattr(LossScale, "give_way", lambda self: False)


# ---- failures


def redone_with_another_mask(patch: Patch) -> None:
    patch.setattr(snapshot, "_put_streams_back", lambda state, streams: None)


def buffers_not_put_back(patch: Patch) -> None:
    patch.setattr(snapshot, "_put_values_back", lambda copies: None)


def attributes_not_put_back(patch: Patch) -> None:
    patch.setattr(snapshot._Attributes, "put_back", lambda self: None)


def what_was_accepted_comes_again(patch: Patch) -> None:
    patch.setattr(InPlace, "has_accepted", False)


def a_half_that_is_forgotten(patch: Patch) -> None:
    def cut_smaller(self: Schedule, most: int) -> None:
        rest = self._cut.after(self._done, most=most)
        self._cut = Cut((*self._cut.parts[: self._done], *rest.parts[1:]))

    patch.setattr(Schedule, "cut_smaller", cut_smaller)


def a_micro_batch_accepted_twice(patch: Patch) -> None:
    """After a failure the one before it comes again."""
    recover = execute.recover

    def recover_then(error: Exception, schedule: Schedule, sums: Accumulator, before: Snapshot) -> None:
        recover(error, schedule, sums, before)
        schedule._done -= bool(schedule._done)

    patch.setattr(execute, "recover", recover_then)


def a_row_repeated_in_halves(patch: Patch) -> None:
    def cut_smaller(self: Schedule, most: int) -> None:
        rest = self._cut.after(self._done, most=most).parts
        again = (rest[0], (rest[0][-1], *rest[1][1:]), *rest[2:])
        self._cut = Cut((*self._cut.parts[: self._done], *again))

    patch.setattr(Schedule, "cut_smaller", cut_smaller)


def streams_of_python_and_numpy_forgotten(patch: Patch) -> None:
    put_back = snapshot._put_streams_back
    patch.setattr(snapshot, "_put_streams_back", lambda state, streams: put_back(state, ()))


def a_buffer_put_in_the_place_of_another_forgotten(patch: Patch) -> None:
    begin = snapshot._Attributes.__init__

    def forget(self: Any, state: Any) -> None:
        begin(self, state)
        for slots in state.buffers:
            self._tables[id(slots)] = slots

    patch.setattr(snapshot._Attributes, "__init__", forget)


def attributes_left_by_a_first_pass(patch: Patch) -> None:
    patch.setattr(Snapshot, "put_modules_back", lambda self: snapshot._put_values_back(self._copies))


def gradients_found_lost(patch: Patch) -> None:
    patch.setattr(Snapshot, "put_gradients_back", lambda self, only=None: None)


def containers_forgotten(patch: Patch) -> None:
    patch.setattr(snapshot.ModuleState, "containers", lambda self: [])


def dropped_rows_keep_their_weight(patch: Patch) -> None:
    leave_out = Accumulator.leave_out

    def weighed(self: Accumulator, rows: int) -> None:
        leave_out(self, rows)
        self._weights.append({"loss": rows})

    patch.setattr(Accumulator, "leave_out", weighed)


def no_weight_backup(patch: Patch) -> None:
    patch.setattr(Masters, "raised", lambda self, parameters, optimizers: nullcontext())
