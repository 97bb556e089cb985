"""Losses in which rows meet: two passes that are one, and what they need to know of model and batch."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from anybatch import Step, Total
from anybatch.core.errors import LossError
from anybatch.losses.whole_batch import WholeBatch
from anybatch.testing import GradientRecorder, relative_error, tolerance
from tests.losses.test_contract import double as double
from tests.losses.whole_losses import CASES, clip, encoder, labelled, sup_con, take

ROWS, MICRO_BATCH = 23, 4  # six micro-batches, the last one shorter
LIMIT = tolerance(torch.float64, 1)


def test_dropout_draws_the_masks_of_one_pass() -> None:
    case = CASES["clip"]
    model, batch = case.model(0.2).double(), case.batch(ROWS)
    seen: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, inputs, output: seen.append(output != 0))
    torch.manual_seed(5)
    _, gradients = take(model, WholeBatch(case.function), batch, MICRO_BATCH)
    after, both_passes = torch.get_rng_state(), seen[:]
    seen.clear()
    torch.manual_seed(5)
    parts = list(zip(*[leaf.split(MICRO_BATCH) for leaf in batch], strict=True))
    images, texts, scales = zip(*[model(*part) for part in parts], strict=True)
    clip(torch.cat(images), torch.cat(texts), scales[0]).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert relative_error(gradients, expected) <= LIMIT
    assert len(both_passes) == 2 * len(seen) > 0
    assert all(torch.equal(one, other) for one, other in zip(both_passes, seen + seen, strict=True))
    assert torch.equal(torch.get_rng_state(), after)  # as after one pass


def test_buffers_are_updated_once_per_micro_batch() -> None:
    model, twin = (nn.Sequential(encoder(), nn.BatchNorm1d(4)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    batch, loss = labelled(ROWS), CASES["prototypes"].function
    with torch.no_grad():
        for rows in batch[0].split(MICRO_BATCH):
            twin(rows)
    before = loss.calls.clone()
    take(model, WholeBatch(loss), batch, MICRO_BATCH, batch_norm="micro")
    for name, buffer in twin.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name
    assert loss.calls == before + 1  # the loss's own: it is called once


@pytest.mark.parametrize("micro_batch", [None, MICRO_BATCH])
def test_no_weight_means_no_update(micro_batch: int | None) -> None:
    case, batch = CASES["triplets"], (torch.randn(ROWS, 5), torch.zeros(ROWS, dtype=torch.int64))
    for loss in (WholeBatch(case.function), WholeBatch(case.by_rows, loss_rows=5)):
        report, gradients = take(encoder(), loss, batch, micro_batch)
        assert (report.updated, gradients) == (False, {})


@pytest.mark.parametrize("loss_rows", [None, 5])
def test_parameters_are_found_wherever_the_function_holds_them(loss_rows: int | None) -> None:
    model, batch = encoder(), labelled(ROWS)
    scale, head = nn.Parameter(torch.tensor(2.0)), nn.Linear(4, 3)

    def loss(outputs: Tensor, labels: Tensor, rows: Tensor | None = None) -> Total:
        losses = F.cross_entropy(head(outputs - outputs.mean(0)) * scale, labels, reduction="none")
        losses = losses if rows is None else losses[rows]
        return Total(losses.sum(), len(losses))

    owned = nn.ParameterList([*model.parameters(), scale, *head.parameters()])
    found: list[Any] = []
    for micro_batch in (None, MICRO_BATCH):
        recorder = GradientRecorder(owned)
        Step(model, WholeBatch(loss, loss_rows=loss_rows), recorder, micro_batch=micro_batch)(batch)
        found.append(recorder.gradients)
    assert len(found[0]) == len(owned)
    assert relative_error(found[1], found[0]) <= LIMIT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y[:, 1:], "shape"),
        (lambda y: y + 1e-3, "repeat the first"),
        (lambda y: y * (1 + 1e-9), ""),
    ],
    ids=["shape", "value", "rounding"],
)
def test_a_second_pass_repeats_the_first(change: Any, message: str) -> None:
    model, calls = encoder(), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))  # not in an attribute, which is put back
    model.register_forward_hook(lambda module, args, y: change(y) if len(calls) == 6 else y)
    with pytest.raises(LossError, match=message) if message else nullcontext():
        take(model, WholeBatch(sup_con), labelled(9), 3, check=False)


def test_rows_of_different_lengths_are_refused() -> None:
    samples = [(torch.ones(length, 5), torch.ones(())) for length in (2, 2, 3, 3)]
    with pytest.raises(LossError, match="Pad them"):
        take(encoder(), WholeBatch(sup_con), samples, 2, collate=default_collate, check=False)
