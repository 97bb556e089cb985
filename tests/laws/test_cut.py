"""The law in float64: every loss, cut and mask, against one whole-batch backward of torch's own loss."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anybatch import Step
from anybatch.testing import GradientRecorder, Transformer, reference_step
from tests.laws.cases import Case
from tests.laws.check import ADVICE, check, collated, cut, reference, windowed
from tests.laws.draw import CLASSES, MASKS
from tests.laws.losses import CASES
from tests.laws.totals import TOTALS

MOST_ROWS = 6

pytestmark = pytest.mark.filterwarnings(ADVICE)


@pytest.mark.parametrize("case", [*CASES, *TOTALS], ids=lambda case: case.name)
@example(form=0, sizes=[1], mask="none", seed=0)
@example(form=1, sizes=[2, 1, 2], mask="one", seed=0)
@given(
    form=st.integers(0, 2),
    sizes=st.lists(st.integers(1, MOST_ROWS), min_size=1, max_size=MOST_ROWS).filter(
        lambda s: sum(s) <= MOST_ROWS
    ),
    mask=st.sampled_from(MASKS),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=3, derandomize=True)
def test_any_cut_gives_the_whole_batch(case: Case, form: int, sizes: list[int], mask: str, seed: int) -> None:
    rows = sum(sizes)
    problem = case.problem(list(case.forms)[form % len(case.forms)], rows, seed=seed, mask=mask)
    whole = reference(problem)
    check(cut(problem, None), whole)
    for micro_batch in range(1, rows + 1):
        check(cut(problem, micro_batch), whole)
    if not case.is_per_row:
        check(windowed(problem, sizes), whole)
        check(collated(problem, sizes[0]), whole)


def padded(rows: list[Tensor]) -> Any:
    """Token rows, as long as the longest of them; the next token is the target, and none after the last."""
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return tokens, nn.functional.pad(tokens[:, 1:], (0, 1))


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=MOST_ROWS), seed=st.integers(0, 2**16))
@settings(max_examples=20, derandomize=True)
def test_padding_may_be_as_short_as_each_micro_batch_allows(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    samples = [torch.randint(1, CLASSES, (length,), generator=generator) for length in lengths]
    model, loss = Transformer(CLASSES).double(), nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)
    whole = reference_step(model, loss, samples, collate=padded)
    recorder = GradientRecorder(model)
    for micro_batch in range(1, len(samples) + 1):
        report = Step(model, loss, recorder, micro_batch=micro_batch, collate=padded)(samples)
        check((report, recorder.gradients), whole)
