"""Losses in which rows meet: two passes that are one, and what they need to know of model and batch.

That they are exact is in `test_contract`; float16, and more that is refused, in `faults/test_first_pass`.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from anybatch import Step, Total
from anybatch.core import tree
from anybatch.core.errors import LossError
from anybatch.losses.cotangents import Seen, joined
from anybatch.losses.whole_batch import WholeBatch
from anybatch.testing import GradientRecorder, reference_step, relative_error, tolerance
from tests.losses.test_contract import double as double
from tests.losses.whole_losses import CASES, Towers, clip, encoder, labelled, sup_con, take

ROWS, MICRO_BATCH = 23, 4  # six micro-batches, the last one shorter
LIMIT = tolerance(torch.float64, 1)


@pytest.mark.parametrize("name", ["clip", "triplets"])
def test_dropout_draws_the_masks_of_one_pass(name: str) -> None:
    """The reference: all micro-batches forward, with their graphs, then the loss, then one backward."""
    case = CASES[name]
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
    if name == "clip":
        images, texts, scales = zip(*[model(*part) for part in parts], strict=True)
        clip(torch.cat(images), torch.cat(texts), scales[0]).backward()
    else:
        case.function(torch.cat([model(x) for x, _ in parts]), batch[1]).mean().backward()
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


def test_samples_are_collated_in_both_passes() -> None:
    model, (x, y) = encoder(), labelled(ROWS)
    samples = list(zip(x, y, strict=True))

    def collate(rows: list[Any]) -> Any:
        inputs, labels = default_collate(rows)
        return inputs + torch.randn(inputs.shape) * 0.01, labels  # an augmentation: the same in both passes

    torch.manual_seed(2)
    noisy = torch.cat([collate(samples[i : i + MICRO_BATCH])[0] for i in range(0, ROWS, MICRO_BATCH)])
    expected = reference_step(model, WholeBatch(sup_con), (noisy, y))
    torch.manual_seed(2)
    _, gradients = take(model, WholeBatch(sup_con), samples, MICRO_BATCH, collate=collate, check=False)
    assert relative_error(gradients, expected.gradients) <= LIMIT


@pytest.mark.parametrize("micro_batch", [None, MICRO_BATCH])
def test_no_weight_means_no_update(micro_batch: int | None) -> None:
    """All rows have one label, so there is no triplet."""
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


def test_targets_follow_the_outputs() -> None:
    seen: list[list[int]] = []

    def loss(outputs: Tensor, *others: Any) -> Tensor:
        seen.append([len(outputs), *[len(tree.flatten(one).leaves[0]) for one in others]])
        return outputs.square().sum()

    x, y = labelled(9)
    for batch in (x, (x,), {"input": x}, (x, y), {"input": x, "target": {"a": y, "b": None}}):
        assert take(encoder(), WholeBatch(loss), batch, 4)[0].updated
    assert seen == [[9]] * 3 + [[9, 9]] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y[:, :3], "shapes"),
        (lambda y: y + 1e-3, "repeat the first"),
        (lambda y: y * (1 + 1e-9), ""),
    ],
    ids=["shape", "value", "rounding"],
)
def test_a_second_pass_repeats_the_first(change: Any, message: str) -> None:
    """But for rounding. The last of its micro-batches tells."""
    model, calls = encoder(), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))  # not in an attribute, which is put back
    model.register_forward_hook(lambda module, args, y: change(y) if len(calls) == 6 else y)
    with pytest.raises(LossError, match=message) if message else nullcontext():
        take(model, WholeBatch(sup_con), labelled(9), 3, check=False)


def test_rows_of_different_lengths_are_refused_and_memory_that_runs_out_is_not() -> None:
    class Starved(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.cat.default:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried")
            return func(*args, **(kwargs or {}))

    samples = [(torch.ones(length, 5), torch.ones(())) for length in (2, 2, 3, 3)]
    with pytest.raises(LossError, match="Pad them"):
        take(encoder(), WholeBatch(sup_con), samples, 2, collate=default_collate, check=False)
    with Starved(), pytest.raises(torch.OutOfMemoryError):
        joined([Seen((torch.ones(2),), tuple, ()) for _ in range(2)])
