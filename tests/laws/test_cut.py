"""The law in float64: every loss, cut and mask, against one whole-batch backward of torch's own loss."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor, nn

from anybatch import Step
from anybatch.testing import GradientRecorder, reference_step
from tests.laws.cases import Case
from tests.laws.check import ADVICE, check
from tests.laws.draw import CLASSES
from tests.laws.drawn import CUT, MOST_ROWS, any_cut_is_the_whole
from tests.laws.losses import CASES
from tests.laws.totals import TOTALS
from tests.zoo import Transformer

pytestmark = pytest.mark.filterwarnings(ADVICE)


@pytest.mark.parametrize("case", [*CASES, *TOTALS], ids=lambda case: case.name)
@example(form=0, sizes=[1], mask="none", number=0)
@example(form=1, sizes=[2, 1, 2], mask="one", number=0)
@given(**CUT)
@settings(max_examples=1, derandomize=True)
def test_any_cut_gives_the_whole_batch(
    case: Case, form: int, sizes: list[int], mask: str, number: int
) -> None:
    any_cut_is_the_whole(case, form, sizes, mask, number)


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
