import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Step, Total, Trainer
from anybatch.core import tree
from anybatch.core.errors import LossError, NonFiniteLossError
from anybatch.losses.inputs import call
from anybatch.losses.whole_batch import WholeBatch
from anybatch.state import rng
from anybatch.testing import reference_step, relative_error, tolerance
from tests.losses.whole_losses import (
    CASES,
    Case,
    Towers,
    Views,
    clip,
    encoder,
    labelled,
    sup_con,
    take,
)

ROWS, MICRO_BATCH = 23, 4  # six micro-batches, the last one shorter
CUTS = (MICRO_BATCH, 1, ROWS - 1)
LIMIT = tolerance(torch.float64, 1)


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Every law is stated in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def whole(case: Case) -> tuple[nn.Module, Any, Any]:
    model, batch = case.model(0.0).double(), case.batch(ROWS)
    return model, batch, reference_step(model, WholeBatch(case.function), batch)


@pytest.mark.parametrize("name", CASES)
def test_any_cut_gives_the_whole_batch(name: str) -> None:
    case = CASES[name]
    model, batch, expected = whole(case)
    for micro_batch in CUTS:
        report, gradients = take(model, WholeBatch(case.function), batch, micro_batch)
        assert relative_error(gradients, expected.gradients) <= LIMIT
        assert relative_error(report.loss, expected.loss) <= LIMIT
        assert report.micro_batches == -(-ROWS // micro_batch)


@pytest.mark.parametrize("loss_rows", [1, 5, ROWS])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.by_rows])
def test_the_loss_itself_may_be_cut_by_rows(name: str, loss_rows: int) -> None:
    case = CASES[name]
    model, batch, expected = whole(case)
    for micro_batch in (None, *CUTS):
        report, gradients = take(model, WholeBatch(case.by_rows, loss_rows=loss_rows), batch, micro_batch)
        assert relative_error(gradients, expected.gradients) <= LIMIT
        assert relative_error(report.loss, expected.loss) <= LIMIT


@pytest.mark.parametrize("name", CASES)
def test_uncut_is_the_plain_loop(name: str) -> None:
    case = CASES[name]
    model, batch, expected = whole(case)
    report, gradients = take(model, WholeBatch(case.function), batch, None)
    assert report.loss == expected.loss
    assert gradients.keys() == expected.gradients.keys()
    assert all(torch.equal(gradients[name], value) for name, value in expected.gradients.items())


def masks_of(model: nn.Module, seen: list[Tensor]) -> Any:
    """Note which entries each dropout leaves, in the order in which they are drawn."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, inputs, output: seen.append(output != 0))


@pytest.mark.parametrize("name", ["clip", "nt-xent", "barlow twins", "triplets"])
def test_dropout_draws_the_masks_of_one_pass(name: str) -> None:
    """The reference: all micro-batches forward, with their graphs, then the loss, then one backward."""
    case = CASES[name]
    model, batch = case.model(0.2).double(), case.batch(ROWS)
    seen: list[Tensor] = []
    masks_of(model, seen)
    torch.manual_seed(5)
    _, gradients = take(model, WholeBatch(case.function), batch, MICRO_BATCH)
    after, both_passes = torch.get_rng_state(), seen[:]
    seen.clear()
    torch.manual_seed(5)
    nest = tree.flatten(batch)
    parts = [
        nest.build(iter(part))
        for part in zip(*[leaf.split(MICRO_BATCH) for leaf in nest.leaves], strict=True)
    ]
    is_labelled = isinstance(batch, tuple) and not isinstance(model, Towers)
    outputs = [call(model, part[0] if is_labelled else part) for part in parts]
    outputs = [output if isinstance(output, tuple) else (output,) for output in outputs]
    joined = [part[0] if part[0].dim() == 0 else torch.cat(part) for part in zip(*outputs, strict=True)]
    value = case.function(*joined, *([batch[1]] if is_labelled else []))
    (value.mean() if isinstance(value, Total) else value).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert relative_error(gradients, expected) <= LIMIT
    assert len(both_passes) == 2 * len(seen) > 0
    for one, other in zip(both_passes, seen + seen, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), after)  # as after one pass


def test_a_loss_may_draw_and_its_draws_stay() -> None:
    """Its stream goes on after the first pass, and the next step's after that."""

    def noisy(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs * torch.rand_like(outputs)).square().sum()

    model, batch = encoder(0.2), labelled(ROWS)
    torch.manual_seed(1)
    with torch.no_grad():
        outputs = torch.cat([model(rows) for rows in batch[0].split(MICRO_BATCH)])
        expected, after = noisy(outputs, batch[1]), torch.get_rng_state()
    torch.manual_seed(1)
    report, _ = take(model, WholeBatch(noisy), batch, MICRO_BATCH)
    assert relative_error(report.loss, expected) <= LIMIT
    assert torch.equal(torch.get_rng_state(), after)


def test_python_and_numpy_streams_are_replayed_too() -> None:
    class Jitter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + random.random() + np.random.rand())

    model, batch = nn.Sequential(encoder(), Jitter()), labelled(ROWS)
    random.seed(3)
    np.random.seed(3)
    with torch.no_grad():
        outputs = torch.cat([model(rows) for rows in batch[0].split(MICRO_BATCH)])
    expected, after = sup_con(outputs, batch[1]), (random.random(), np.random.rand())
    random.seed(3)
    np.random.seed(3)
    report, _ = take(model, WholeBatch(sup_con), batch, MICRO_BATCH)
    assert relative_error(report.loss, expected) <= LIMIT
    assert (random.random(), np.random.rand()) == after


def test_buffers_are_updated_once_per_micro_batch() -> None:
    model = nn.Sequential(encoder(), nn.BatchNorm1d(4))
    batch = labelled(ROWS)
    with torch.no_grad():
        twin = nn.Sequential(encoder(), nn.BatchNorm1d(4))
        twin.load_state_dict(model.state_dict())
        for rows in batch[0].split(MICRO_BATCH):
            twin(rows)
    take(model, WholeBatch(sup_con), batch, MICRO_BATCH, batch_norm="micro")
    for name, buffer in twin.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name


def test_frozen_batch_norm_is_exact() -> None:
    model = nn.Sequential(encoder(), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with torch.no_grad():
        model(torch.randn(50, 5))
    batch, before = labelled(ROWS), model[1].running_mean.clone()
    uncut, cut = [
        take(model, WholeBatch(sup_con), batch, m, batch_norm="frozen") for m in (None, MICRO_BATCH)
    ]
    assert relative_error(cut[1], uncut[1]) <= LIMIT
    assert torch.equal(model[1].running_mean, before)
    assert model[1].training


def test_a_loss_with_buffers_is_called_once() -> None:
    loss = CASES["prototypes"].function
    before = loss.calls.clone()
    take(encoder(), WholeBatch(loss), labelled(ROWS), MICRO_BATCH)
    assert loss.calls == before + 1


def test_samples_are_collated_in_both_passes() -> None:
    model, batch = encoder(), labelled(ROWS)
    samples = list(zip(*batch, strict=True))

    def collate(rows: list[Any]) -> Any:
        inputs, labels = zip(*rows, strict=True)
        noise = torch.randn(len(rows), 5) * 0.01  # an augmentation: it must be the same in both passes
        return torch.stack(inputs) + noise, torch.stack(labels)

    torch.manual_seed(2)
    noisy = torch.cat([collate(samples[i : i + MICRO_BATCH])[0] for i in range(0, ROWS, MICRO_BATCH)])
    expected = reference_step(model, WholeBatch(sup_con), (noisy, batch[1]))
    torch.manual_seed(2)
    _, gradients = take(model, WholeBatch(sup_con), samples, MICRO_BATCH, collate=collate)
    assert relative_error(gradients, expected.gradients) <= LIMIT


def test_outputs_say_what_the_function_sees() -> None:
    model, batch = Towers(), {"a": torch.randn(ROWS, 5), "b": torch.randn(ROWS, 5)}
    loss = WholeBatch(clip, outputs=lambda model, micro: model(micro["a"], micro["b"]))
    expected = reference_step(model, WholeBatch(clip), (batch["a"], batch["b"]))
    for micro_batch in (None, *CUTS):
        _, gradients = take(model, loss, batch, micro_batch)
        assert relative_error(gradients, expected.gradients) <= LIMIT


def test_autocast_gives_every_weight_its_gradient() -> None:
    """Weights cast in the pass without graph must not be used again in the other."""
    torch.set_default_dtype(torch.float32)
    model, batch = encoder(), labelled(ROWS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, uncut = take(model, WholeBatch(sup_con), batch, None)
        _, cut = take(model, WholeBatch(sup_con), batch, MICRO_BATCH)
    assert cut.keys() == uncut.keys() == dict(model.named_parameters()).keys()
    assert relative_error(cut, uncut) <= tolerance(torch.bfloat16, 6)


def test_no_weight_means_no_update() -> None:
    """All rows have one label, so there is no triplet."""
    model, case = encoder(), CASES["triplets"]
    batch = torch.randn(ROWS, 5), torch.zeros(ROWS, dtype=torch.int64)
    for micro_batch in (None, MICRO_BATCH):
        for loss in (WholeBatch(case.function), WholeBatch(case.by_rows, loss_rows=5)):
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            before = [p.clone() for p in model.parameters()]
            report = Step(model, loss, optimizer, micro_batch=micro_batch)(batch)
            assert not report.updated
            assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def test_a_stale_random_state_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: the second pass goes on where the first one ended."""
    monkeypatch.setattr(rng, "restore_process", lambda state: None)
    with pytest.raises(LossError, match="repeat the first"):
        take(encoder(0.2), WholeBatch(sup_con), labelled(ROWS), MICRO_BATCH)


def test_a_mean_of_means_is_something_else() -> None:
    """The mutation: what accumulation without a second pass gives."""
    case = CASES["sup-con"]
    model, batch, expected = whole(case)

    def mean(model: nn.Module, micro: Any) -> Total:
        return Total(sup_con(model(micro[0]), micro[1]) * len(micro[0]), len(micro[0]))

    _, gradients = take(model, mean, batch, MICRO_BATCH, check=False)
    assert relative_error(gradients, expected.gradients) > 0.1


def test_a_trainer_validates_on_whole_batches() -> None:
    """The loss of each batch, weighted by its rows: not of each micro-batch."""
    model, batch = encoder(), labelled(ROWS)
    step = Step(model, WholeBatch(sup_con), torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=3)
    trainer = Trainer(step, batch, batch_size=12, progress=False)
    with torch.no_grad():
        values = [sup_con(model(x), y) for x, y in zip(*[leaf.split(12) for leaf in batch], strict=True)]
    expected = (12 * values[0] + 11 * values[1]) / ROWS
    assert relative_error(trainer.evaluate(batch)["loss"], expected) <= LIMIT


@pytest.mark.parametrize("loss_rows", [None, 5])
def test_parameters_are_found_wherever_the_function_holds_them(loss_rows: int | None) -> None:
    model, batch = encoder(), labelled(ROWS)
    scale, head = nn.Parameter(torch.tensor(2.0)), nn.Linear(4, 3)

    def loss(outputs: Tensor, labels: Tensor, rows: Tensor | None = None) -> Total:
        losses = F.cross_entropy(head(outputs - outputs.mean(0)) * scale, labels, reduction="none")
        losses = losses if rows is None else losses[rows]
        return Total(losses.sum(), len(losses))

    owned = [*model.parameters(), scale, *head.parameters()]
    found: list[list[Tensor]] = []
    for micro_batch in (None, MICRO_BATCH):
        optimizer = torch.optim.SGD(owned, lr=1.0)
        before = [p.detach().clone() for p in owned]
        Step(model, WholeBatch(loss, loss_rows=loss_rows), optimizer, micro_batch=micro_batch)(batch)
        found.append([was - p.detach() for p, was in zip(owned, before, strict=True)])
        with torch.no_grad():
            for p, was in zip(owned, before, strict=True):
                p.copy_(was)
    assert all(moved.any() for moved in found[0])
    assert relative_error(found[1], found[0]) <= LIMIT


def test_outputs_without_gradient_may_be_weights() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = encoder()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.body(x), (x[:, 0] > 0).double()

    def loss(outputs: Tensor, mask: Tensor) -> Total:
        return Total(((outputs - outputs.mean(0)) * mask[:, None]).square().sum(), mask.sum())

    model, batch = Masked(), (torch.randn(ROWS, 5),)
    whole_, cut = [take(model, WholeBatch(loss), batch, m) for m in (None, MICRO_BATCH)]
    assert relative_error(cut[1], whole_[1]) <= LIMIT


def test_a_model_may_differentiate_inside() -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = encoder()

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.body(x).sum(), x, create_graph=True)
            return slope

    model, batch = Forces(), labelled(ROWS)
    uncut, cut = [take(model, WholeBatch(sup_con), batch, m) for m in (None, MICRO_BATCH)]
    assert relative_error(cut[1], uncut[1]) <= LIMIT


def test_batch_norm_in_the_loss_sees_all_rows() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4, affine=False)

        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return ((self.norm(one).T @ self.norm(other)) / len(one) - torch.eye(4)).square().sum()

    model, batch = Views(), CASES["barlow twins"].batch(ROWS)
    uncut, cut = [take(model, WholeBatch(Normed()), batch, m) for m in (None, MICRO_BATCH)]
    assert relative_error(cut[1], uncut[1]) <= LIMIT


def test_a_batch_without_weight_leaves_the_validation_loss_alone() -> None:
    model = encoder()
    x, y = torch.randn(24, 5), torch.cat([torch.zeros(12, dtype=torch.int64), torch.arange(12) % 3])
    step = Step(model, WholeBatch(CASES["triplets"].function), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = Trainer(step, (x, y), batch_size=12, progress=False)
    with torch.no_grad():
        expected = CASES["triplets"].function(model(x[12:]), y[12:]).mean()
    assert relative_error(trainer.evaluate((x, y))["loss"], expected) <= LIMIT


def test_a_mean_over_no_valid_target_is_thought_of() -> None:
    model, masked = nn.Linear(3, 2), torch.full((5,), -100)
    step = Step(model, WholeBatch(F.cross_entropy), torch.optim.SGD(model.parameters()), micro_batch=2)
    with pytest.raises(NonFiniteLossError, match=r"all outputs are finite.*a mean over no valid target"):
        step((torch.ones(5, 3), masked))
