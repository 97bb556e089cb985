"""One pass of the fold: what is divided when, what is put back, and a micro-batch that is added again."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Plan, Total
from anybatch.core.batch import OpenBatch, TensorBatch
from anybatch.core.errors import NonFiniteLossError
from anybatch.engine.before import Before
from anybatch.engine.run import Run
from tests.engine.test_execute import Scale, X, make_task, total
from tests.snapshots import bits


def test_window_of_a_run_divides_late_and_knows_its_rows_at_the_end() -> None:
    task = make_task(nn.MSELoss())
    one = Run(Plan(rows=0, micro_batch=0), task, OpenBatch(), task.loss)
    eight = X[2:]  # sums of whole numbers over 8 are exact
    for x in eight.split([1, 7]):
        one.add((x, torch.zeros_like(x)), task.loss, len(x))
    report = one.update()
    assert (report.rows, report.micro_batches) == (8, 2)
    assert report.weights == {"loss": 8}
    gradient = task.parameters[0].grad
    assert gradient is not None  # until it is cleared
    whole = nn.Parameter(torch.tensor(2.0))
    F.mse_loss(whole * eight, torch.zeros(8)).backward()
    assert whole.grad == gradient
    one.clear()
    assert task.parameters[0].grad is None


def test_before_puts_back_bits_and_places() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.LazyBatchNorm1d(), Scale())
    norm = model[0]
    norm.register_buffer("odd", torch.tensor([math.nan, -0.0]))
    found = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    places = dict(norm.named_buffers())
    before, random = Before(make_task(total, model)), torch.get_rng_state()
    norm(torch.randn(4, 2))  # moves the random state and the running statistics
    norm.odd.zero_()
    norm.running_mean = torch.ones(2)
    before.put_back()
    assert torch.equal(torch.get_rng_state(), random)
    assert list(dict(norm.named_buffers())) == list(found)
    for name, buffer in norm.named_buffers():
        assert buffer is places[name]
        assert torch.equal(bits(buffer), bits(found[name]))


@pytest.mark.parametrize("options", [{}, {"accumulate": "float64"}, {"compensated": True}], ids=str)
def test_what_has_accepted_a_micro_batch_does_not_accept_it_again(options: dict[str, str]) -> None:
    task = make_task(nn.L1Loss(reduction="sum"))
    batch = TensorBatch((X, torch.zeros(len(X))))
    run = Run(Plan(rows=len(X), micro_batch=5, **options), task, batch, task.loss)  # type: ignore[arg-type]
    micros = list(batch.cut(5))
    for micro in micros:
        run.begin()
        assert not run.gradients.holds_part
        run.add(micro, task.loss, 5)
        assert run.gradients.holds_part
        run.rows.pop()
        run.add(micro, task.loss, 5, again=True)
    run._sums, run.rows = run._sums[::2], [5, 5]
    run.update()
    assert task.optimizers[0].seen == [[X.abs().sum().item()]]  # type: ignore[attr-defined]


def test_a_note_is_of_the_micro_batch_at_hand() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), Scale())
    task, norm = make_task(total, model), model[0]
    run = Run(Plan(rows=0, micro_batch=0), task, OpenBatch(), task.loss)
    model(torch.randn(4, 2))
    run.begin(in_window=True)
    between, random = norm.running_mean.clone(), torch.get_rng_state()
    model(torch.randn(4, 2))
    run.at_hand.noted.put_back()
    assert torch.equal(norm.running_mean, between)
    assert torch.equal(torch.get_rng_state(), random)
    run.undo()
    assert norm.running_mean.tolist() == [0.0, 0.0]


def test_a_mean_over_no_valid_target_is_thought_of() -> None:
    task = make_task(lambda model, micro: Total((model(micro) * 0).sum() / 0, len(micro)))
    run = Run(Plan(rows=len(X), micro_batch=len(X)), task, TensorBatch(X), task.loss)
    run.add(X, task.loss, len(X))
    with pytest.raises(NonFiniteLossError, match=r"got nan for 'loss'.*a mean over no valid target"):
        run.update()
