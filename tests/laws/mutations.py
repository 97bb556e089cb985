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
from anybatch.core.batch import TensorBatch
from anybatch.engine import gradients, run
from anybatch.engine.course import Course
from anybatch.engine.gradients import Gradients
from anybatch.engine.run import Run
from anybatch.losses import reductions as kinds
from anybatch.losses.loss import Evaluated, Plain
from anybatch.losses.torch_losses import SummedLoss
from anybatch.precision.loss_scale import LossScale
from anybatch.precision.master_weights import Masters
from anybatch.state.snapshot import Surroundings

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
    late_factors = Run._late_factors

    def rotated(self: Run, weights: dict[str, float]) -> dict[str, float]:
        factors = late_factors(self, weights)
        values = list(factors.values())
        return dict(zip(factors, values[1:] + values[:1], strict=True))

    patch.setattr(Run, "_late_factors", rotated)


def one_bank_for_all_terms(patch: Patch) -> None:
    def add_each(self: Gradients, sums: Mapping[str, Tensor], **options: Any) -> None:
        torch.autograd.backward(list(sums.values()))

    patch.setattr(Gradients, "add_each", add_each)


def coefficients_forgotten(patch: Patch) -> None:
    late_factors, cotangent = Run._late_factors, run._cotangent

    def factors(self: Run, weights: dict[str, float]) -> dict[str, float]:
        self._coefficients = dict.fromkeys(self._coefficients, 1.0)
        return late_factors(self, weights)

    patch.setattr(Run, "_late_factors", factors)
    patch.setattr(run, "_cotangent", lambda coefficient, divisor, like: cotangent(1.0, divisor, like))


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
    go = Course.go

    def shorter(self: Course) -> None:
        if len(self.sizes) > 1:
            self.batch = self.batch.head(self.batch.rows - self.sizes.pop())
        go(self)

    patch.setattr(Course, "go", shorter)


def first_micro_batch_twice(patch: Patch) -> None:
    parts = TensorBatch.parts

    def again(self: TensorBatch, sizes: Sequence[int], start: int = 0) -> Iterable[Any]:
        found = list(parts(self, sizes, start))
        return iter([found[0], *found[:-1]])

    patch.setattr(TensorBatch, "parts", again)


def tail_scaled_like_a_full_one(patch: Patch) -> None:
    add, backward = Run.add, Run._backward

    def add_scaled(self: Run, micro: Any, loss: Any, rows: int, **options: Any) -> None:
        self.tail = self._plan.micro_batch / rows
        add(self, micro, loss, rows, **options)

    def scaled(self: Run, sums: Mapping[str, Tensor], *args: Any, **options: Any) -> None:
        backward(self, {name: value * self.tail for name, value in sums.items()}, *args, **options)

    patch.setattr(Run, "add", add_scaled)
    patch.setattr(Run, "_backward", scaled)


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
    patch.setattr(gradients, "accumulation_dtype", lambda parameter, chosen=None: chosen or parameter)


def kahan_with_the_wrong_sign(patch: Patch) -> None:
    compensate = Gradients._add_compensated

    def wrong(self: Gradients, total: Tensor, value: Tensor) -> Tensor:
        if total in self._errors:
            self._errors[total].neg_()
        return compensate(self, total, value)

    patch.setattr(Gradients, "_add_compensated", wrong)


def kahan_without_compensation(patch: Patch) -> None:
    patch.setattr(Gradients, "_add_compensated", lambda self, total, value: total + value)


def memory_left_shared(patch: Patch) -> None:
    patch.setattr(gradients, "_parted", lambda awaited: awaited)


def gradients_of_the_step_before_left_over(patch: Patch) -> None:
    begin = Run.__init__

    def begin_with_leftovers(self: Run, plan: Any, task: Any, batch: Any, loss: Any, **more: Any) -> None:
        left = [parameter.grad for parameter in task.parameters]
        begin(self, plan, task, batch, loss, **more)
        for parameter, gradient in zip(task.parameters, left, strict=True):
            parameter.grad = gradient

    patch.setattr(Run, "__init__", begin_with_leftovers)
    patch.setattr(Run, "clear", lambda self: None)


# ---- the update


def _after_each_micro_batch(then: Callable[[Run], None]) -> Mutation:
    def mutate(patch: Patch) -> None:
        add = Run.add

        def add_then(self: Run, micro: Any, loss: Any, rows: int, **options: Any) -> None:
            add(self, micro, loss, rows, **options)
            then(self)

        patch.setattr(Run, "add", add_then)

    return mutate


def _clip(run: Run) -> None:
    torch.nn.utils.clip_grad_norm_(run._task.parameters, run._plan.clip_norm)


def _step(run: Run) -> None:
    for optimizer in run._task.optimizers:
        optimizer.step()


clip_per_micro_batch = _after_each_micro_batch(_clip)
update_per_micro_batch = _after_each_micro_batch(_step)


def schedule_per_micro_batch(patch: Patch) -> None:
    update = Run.update

    def update_then(self: Run) -> StepReport:
        report = update(self)
        for scheduler in [*self._task.schedulers] * (report.micro_batches - 1):
            scheduler.step()
        return report

    patch.setattr(Run, "update", update_then)


def masked_batches_update_too(patch: Patch) -> None:
    whole_weights = Run._whole_weights
    patch.setattr(
        Run,
        "_whole_weights",
        lambda self: {name: weight or 1.0 for name, weight in whole_weights(self).items()},
    )


# ---- precision


def scale_left_in_the_gradient(patch: Patch) -> None:
    add = Gradients.add

    def scaled(self: Gradients, *args: Any, unscale: float = 1.0, **options: Any) -> None:
        add(self, *args, **options)

    patch.setattr(Gradients, "add", scaled)


def an_overflow_loses_the_update(patch: Patch) -> None:
    patch.setattr(LossScale, "give_way", lambda self: False)


def redone_with_another_mask(patch: Patch) -> None:
    patch.setattr(Surroundings, "put_back", lambda self: None)


def what_was_accepted_comes_again(patch: Patch) -> None:
    patch.setattr(Gradients, "holds_part", False)


def dropped_rows_keep_their_weight(patch: Patch) -> None:
    leave_out = Run.leave_out

    def weighed(self: Run, rows: int) -> None:
        leave_out(self, rows)
        self._weights.append({"loss": rows})

    patch.setattr(Run, "leave_out", weighed)


def no_weight_backup(patch: Patch) -> None:
    patch.setattr(Masters, "raised", lambda self, parameters, optimizers: nullcontext())
