"""From cuts that differ to findings: state, padding, losses, gradients next to nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import ModelLoss, Total, check
from tests.check.test_check import ROWS, centred, computed, kinds, rows, sum_of_squares
from tests.corpus.case import layer
from tests.zoo import Perceptron


def remembering() -> nn.Module:
    """Return what averages and adds up what it met in buffers."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.average = self.average.lerp(x.detach().mean(0), 0.1)
        self.total += x.detach().sum(0)
        return x

    return layer("Remembering", forward, average=torch.zeros(5), total=torch.zeros(5))


def test_a_saved_buffer_that_depends_on_the_cut_is_a_finding() -> None:
    model = nn.Sequential(remembering(), nn.Linear(5, 2))
    report = check(model, nn.MSELoss(), rows())
    (finding,) = report.findings
    assert (finding.kind, finding.culprit) == ("buffer", "0 (Remembering)")
    assert finding.what.endswith("by the number of micro-batches: `0.average`.")
    assert (report.exact, report.error <= report.limit) == (False, True)
    assert str(report).startswith("NOT exact: the update is, saved buffers are not: gradient error ")


def leaving(x: Tensor) -> Tensor:
    """Rows decide together: scales where their mean is small, as it is for one of them alone."""
    return x if x.square().mean() > x.square().mean(1).min() * 1.01 else 2 * x


def fixed(x: Tensor) -> Tensor:
    """Another result in small micro-batches, and not to be run on a row that comes twice."""
    if len(x.unique(dim=0)) < len(x):
        raise ValueError("no")
    return x * (len(x) > 5)


@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (leaving, "meeting", "other rows are missing"),
        (lambda x: x * torch.arange(1, len(x) + 1)[:, None], "position", "at another place"),
        (lambda x: torch.stack([row + torch.rand(()) for row in x]), "position", "another output for a row"),
        (fixed, "unexplained", "fails with ValueError"),
    ],
)
def test_modules_say_why_they_differ(function: Any, kind: str, said: str) -> None:
    (finding,) = check(nn.Sequential(computed(function), nn.Linear(5, 2)), nn.MSELoss(), rows()).findings
    assert (finding.kind, finding.culprit) == (kind, "0 (Computed)")
    assert said in finding.what
    assert "torch.rand(len(x))" in finding.ways_out[0] or kind != "position"


def test_the_first_module_is_found_at_any_depth_and_sound_ones_are_not() -> None:
    inner = nn.Sequential(nn.Dropout(0.5), nn.Sequential(centred(), nn.Tanh()))
    model = nn.Sequential(nn.Linear(5, 5), inner, nn.LayerNorm(5), centred(), nn.Linear(5, 2))
    assert kinds(model, nn.MSELoss(), rows()) == [("meeting", "1.1.0 (Computed)")]
    model[1] = nn.Identity()
    assert kinds(model, nn.MSELoss(), rows()) == [("meeting", "3 (Computed)")]
    model = nn.Linear(5, 2)
    model.weight.register_hook(lambda gradient: gradient / gradient.norm())  # a gradient's hook counts
    assert kinds(model, nn.MSELoss(), rows())


def test_a_loss_that_a_step_refuses_is_told_first() -> None:
    def masked(model: nn.Module, micro: Any) -> Tensor:
        return (model(micro[0]) * micro[1]).sum() / micro[1].sum()

    report = check(nn.Linear(5, 2), ModelLoss(call=masked), rows())
    (finding,) = report.findings
    assert (finding.kind, finding.culprit, finding.ways_out) == ("refused", "masked", ())
    assert finding.what.startswith("Expected the loss of Linear to be made of means")
    assert str(report).startswith("NOT exact: a step refuses this loss, on 12 rows cut as ")


def test_gradient_next_to_nothing_is_never_called_exact_without_a_word() -> None:
    """In a perfect fit loss and gradient are rounding of numbers that cancel inside of each row."""
    student = Perceptron(5, 2, width=64).double()
    x = torch.randn(ROWS, 5, dtype=torch.float64)
    with torch.no_grad():
        y = torch.stack([student(row) for row in x])
    (finding,) = check(student, nn.MSELoss(), (x, y)).findings
    assert finding.kind == "unexplained"
    assert "so small (norm " in finding.what

    def tiny(model: nn.Module, micro: Any) -> Total:
        total = sum_of_squares(model, micro)
        return Total(1e-20 * total.sum, total.weight)

    report = check(Perceptron(5, 2), tiny, rows())
    assert report.exact
    assert "so small (norm " in report.notes[0]


@pytest.mark.parametrize("is_noisy", [False, True])
def test_samples_are_collated_once_where_that_draws_numbers(is_noisy: bool) -> None:
    samples = [torch.ones(length, 5) for length in (3, 1, 2, 3, 4, 1)]

    def collate(chosen: list[Tensor]) -> Any:
        padded = nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        return padded + torch.rand_like(padded) * is_noisy, torch.ones(len(chosen), 1, 2)

    model = nn.Sequential(computed(lambda x: x.sum(1, keepdim=True)), nn.Linear(5, 2))
    report = check(model, nn.MSELoss(), samples, collate=collate)
    assert report.exact, str(report)
    assert [("random" in note) for note in report.notes] == [True] * is_noisy
    assert any("as `collate` makes it" in words for words in report.cuts) != is_noisy
