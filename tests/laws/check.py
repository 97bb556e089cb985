"""The law: cut anywhere, a step gives the loss and the gradient of the whole batch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from anybatch import Step, StepReport
from anybatch.core import tree
from anybatch.testing import GradientRecorder, Reference, reference_step, relative_error, tolerance
from tests.laws.cases import Problem
from tests.options import flat

# Torch advises against its own KLDivLoss(reduction="mean"), where it is called uncut.
ADVICE = "ignore:reduction. 'mean' divides:UserWarning"

Taken = tuple[StepReport, dict[str, Tensor]]
Take = Callable[..., Taken]


def cut(problem: Problem, micro_batch: int | None, **options: Any) -> Taken:
    """One step on the whole batch, `micro_batch` rows at a time."""
    recorder = GradientRecorder(problem.model, problem.loss)
    step = Step(problem.model, problem.loss, recorder, micro_batch=micro_batch, **flat(options))
    return step(problem.batch), recorder.gradients


def windowed(problem: Problem, sizes: Sequence[int], **options: Any) -> Taken:
    """A window of micro-batches of any sizes, brought one by one: divided late."""
    recorder = GradientRecorder(problem.model, problem.loss)
    window = Step(problem.model, problem.loss, recorder, **flat(options)).window()
    for micro in parts(problem.batch, sizes):
        window.add(micro)
    return window.close(), recorder.gradients


def collated(problem: Problem, micro_batch: int, **options: Any) -> Taken:
    """One step on a list of samples, collated micro-batch by micro-batch."""
    return cut(replace(problem, batch=samples(problem.batch)), micro_batch, collate=stack, **options)


def parts(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """The rows of a batch in pieces of these sizes."""
    stops = [sum(sizes[:end]) for end in range(len(sizes) + 1)]
    return [tree.map_leaves(itemgetter(slice(*ends)), batch) for ends in pairwise(stops)]


def samples(batch: Any) -> list[Any]:
    """The rows of a batch, one by one, each without its first axis."""
    rows = tree.flatten(batch).leaves[0].shape[0]
    return [tree.map_leaves(itemgetter(row), batch) for row in range(rows)]


def stack(rows: list[Any]) -> Any:
    """The opposite of `samples`."""
    nests = [tree.flatten(row) for row in rows]
    leaves = zip(*[nest.leaves for nest in nests], strict=True)
    return nests[0].build(torch.stack(leaf) for leaf in leaves)


def reference(problem: Problem) -> Reference:
    return reference_step(problem.model, problem.loss, problem.batch)


def check(taken: Taken, whole: Reference, *, dtype: torch.dtype = torch.float64, terms: int = 1) -> None:
    """Compare a step with the whole batch at once; a batch without weight must leave everything alone."""
    report, gradients = taken
    if not math.isfinite(whole.loss):  # no row has weight: torch divides by zero
        assert not report.updated
        assert math.isnan(report.loss)
        assert gradients == {}
        return
    bound = tolerance(dtype, terms)
    assert report.updated
    assert relative_error(report.loss, whole.loss) <= bound
    assert relative_error(gradients, whole.gradients) <= bound
