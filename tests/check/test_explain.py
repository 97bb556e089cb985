"""From trials to findings: modules, terms, what goes into the model, padding."""

from functools import partial
from typing import Any

import torch
from torch import nn

from anybatch.check.check import explain, explain_padding
from anybatch.check.compare import name_of
from anybatch.check.finding import Finding
from anybatch.check.padding import find_padding, trimmed
from anybatch.core.total import Total
from anybatch.losses.terms import Terms
from anybatch.testing import Perceptron
from tests.check.benches import ROWS, court
from tests.check.layers import Centred, Pooled

BATCH = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)), torch.ones(ROWS, 1)


def fit(model: nn.Module, micro: Any) -> Total:
    errors = (model(micro[0]) - micro[1]).square()
    return Total(errors.sum(), errors.numel())


def explained(model: nn.Module, loss: Any) -> list[Finding]:
    ours = court(model, loss, BATCH)
    return explain(ours, [ours.cut_by(size) for size in (3, 5)], "mine", bare=ours.reference.bare)


def test_modules_and_terms_are_both_found() -> None:
    def means(model: nn.Module, micro: Any) -> Total:
        return Total(fit(model, micro).mean(), 1)

    both = explained(nn.Sequential(Centred(), Perceptron(4, 1)), means)
    assert [(finding.kind, finding.culprit) for finding in both] == [
        ("meeting", "0 (Centred)"),
        ("denominator", "term 'loss' of mine"),
    ]
    assert [finding.kind for finding in explained(Perceptron(4, 1), means)] == ["denominator"]


def test_what_the_loss_does_before_the_model_is_found() -> None:
    def centred(model: nn.Module, micro: Any) -> Total:
        return fit(model, (micro[0] - micro[0].mean(0), micro[1]))

    (finding,) = explained(Perceptron(4, 1), centred)
    assert (finding.kind, finding.culprit) == ("meeting", "mine")


def test_value_that_a_module_makes_of_all_rows_is_found() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), Pooled())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, size = self.layers(x)
            return rows.sum(1, keepdim=True) * size

    (finding,) = explained(Own(), fit)
    assert finding.culprit == "layers.1 (Pooled)" or finding.culprit == "the model (Own)"
    assert finding.kind == "meeting"


def test_what_cannot_be_explained_is_said() -> None:
    def whole_only(model: nn.Module, micro: Any) -> Total:
        if len(micro[0]) < ROWS:
            raise RuntimeError("too few rows")
        return fit(model, micro)

    (finding,) = explained(Perceptron(4, 1), whole_only)
    assert finding.kind == "unexplained"
    assert "too few rows" in finding.what


def test_loss_that_counts_padding_is_told_from_a_module() -> None:
    mask = torch.arange(5) < torch.tensor([5, 3, 4, 1, 2, 5, 3, 2])[:, None]
    batch = {"x": torch.randn(ROWS, 5, 4), "y": torch.ones(ROWS, 5, 1), "mask": mask}

    def counts(model: nn.Module, micro: Any) -> Total:
        return fit(model, (micro["x"], micro["y"]))

    for model, culprit in (
        (Perceptron(4, 1), "mine"),
        (
            nn.Sequential(Perceptron(4, 1), nn.Flatten(1), nn.Softmax(1), nn.Unflatten(1, (-1, 1))),
            "2 (Softmax)",
        ),
    ):
        ours = court(model, counts, batch)
        padding = find_padding(batch, model)
        assert padding is not None
        padded = ours.cut_by(1)
        short = ours.try_cut(trimmed(ours.whole, padding, 1), padded.passed)
        finding = explain_padding(ours, padded, short, padding.told_by, "mine")
        assert (finding.kind, finding.culprit) == ("padding", culprit)
        assert "batch['mask']" in finding.what


def test_names_of_losses() -> None:
    assert [name_of(loss) for loss in (fit, partial(fit), Terms(fit), nn.MSELoss(), Centred())] == [
        *["fit"] * 3,
        "MSELoss",
        "Centred",
    ]
