"""Terms that do not add up: which, why, and by what they are to be divided."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Terms, Total, check
from anybatch.check.finding import Finding
from anybatch.testing import Perceptron

ROWS = 8
GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = torch.tensor([3, 1, 2, 3, 2, 1, 3, 3])
LABELS = torch.randint(0, 3, (ROWS, 3), generator=GENERATOR)
LABELS[torch.arange(3) >= LENGTHS[:, None]] = -100
BATCH = torch.randn(ROWS, 3, 4, generator=GENERATOR), LABELS
BALANCE = torch.tensor([0.5, 1.0, 4.0])


def losses(model: nn.Module, micro: Any, **more: Any) -> Tensor:
    return F.cross_entropy(model(micro[0]).transpose(1, 2), micro[1], **more)


def shifted(micro: Any) -> tuple[Tensor, Tensor]:
    return micro[0][:, :-1], micro[1][:, 1:]


def right(model: nn.Module, micro: Any) -> Total:
    return Total(losses(model, micro, reduction="sum"), (micro[1] != -100).sum())


def found(loss: Any) -> list[Finding]:
    return list(check(Perceptron(4, 3), loss, BATCH).findings)


def two_sound(model: nn.Module, micro: Any) -> dict[str, Total]:
    size = sum(parameter.square().sum() for parameter in model.parameters())
    return {"main": right(model, micro), "size": Total(size * len(micro[0]), len(micro[0]))}


@pytest.mark.parametrize("loss", [right, two_sound, Terms(two_sound, coefficients={"size": 0.1})])
def test_sound_terms_are_not_found(loss: Any) -> None:
    assert found(loss) == []


@pytest.mark.parametrize(
    ("loss", "code"),
    [
        (lambda m, b: Total(losses(m, b), 1), "n = (micro[1] != -100).sum()"),
        (lambda m, b: Total(losses(m, b) * len(b[0]), len(b[0])), "n = (micro[1] != -100).sum()"),
        (lambda m, b: Total(m(b[0]).square().mean(), 1), "n = len(micro[0])"),
        (
            lambda m, b: Total(losses(m, b, weight=BALANCE.double()) * len(b[0]), len(b[0])),
            "n = BALANCE[micro[1][micro[1] >= 0]].sum()",
        ),
        (lambda m, b: Total(losses(m, shifted(b)), 1), "n = (micro[1][:, 1:] != -100).sum()"),
    ],
    ids=["as one", "times rows", "of squares", "class weights", "shifted"],
)
def test_right_denominator_is_found(loss: Any, code: str) -> None:
    (finding,) = found(loss)
    assert finding.kind == "denominator"
    assert finding.culprit == "term 'loss' of <lambda>"
    assert code in finding.ways_out[0]
    assert "ab.Total(mean * n, n)" in finding.ways_out[0]


@pytest.mark.parametrize("is_weighed", [False, True])
def test_epsilon_in_a_denominator_hides_it_not(is_weighed: bool) -> None:
    def masked(model: nn.Module, micro: Any) -> Total:
        valid = (micro[1] != -100).double().sum()
        mean = losses(model, micro, reduction="sum") / (valid + 1e-6)
        return Total(mean * valid, valid) if is_weighed else Total(mean, 1)

    (finding,) = found(masked)
    assert finding.kind == "denominator"
    if is_weighed:
        assert "differ by 4e-07: there is an epsilon in the denominator" in finding.what
        assert "mean * n" in finding.ways_out[0]
        return
    assert "the entries of micro[1] that are not -100, apart from an epsilon" in finding.what
    assert "ab.Total(sum, n)" in finding.ways_out[0]


def unlisted_mean(model: nn.Module, micro: Any) -> Total:
    each = model(micro[0]).square().sum((1, 2))
    weight = (micro[1] == micro[1][:, :1]).sum(1) * 2 + 3
    return Total((each * weight).sum() / weight.sum(), 1)


def test_bare_mean_is_found_even_where_it_adds_up() -> None:
    (finding,) = found(lambda m, b: m(b[0]).square().mean())
    assert "bare mean" in finding.what
    assert "the rows" in finding.what


class Fading:
    """Divides by what it has seen before."""

    def __init__(self) -> None:
        self.seen = 1.0

    def __call__(self, model: nn.Module, micro: Any) -> Total:
        self.seen += 1
        total = right(model, micro)
        return Total(total.sum / self.seen, total.weight)


def _first(model: nn.Module, micro: Any, rows: int) -> Total:
    each = model(micro[0]).square().sum((1, 2))[:rows]
    return Total(each.sum(), len(each))


def seeded(model: nn.Module, micro: Any) -> Total:
    torch.manual_seed(0)
    each = model(micro[0]).square().sum((1, 2))
    return Total((each * torch.rand(len(each))).sum(), len(each))


def detached(model: nn.Module, micro: Any) -> Total:
    each = model(micro[0]).square().sum((1, 2))
    return Total(each[0].detach() + each[1:].sum(), len(each))


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (Fading(), "state"),
        (unlisted_mean, "meeting"),  # no candidate divides it
        (lambda m, b: _first(m, b, max(1, len(b[0]) - 1)), "dropped rows"),
        (seeded, "position"),
        (detached, "detached"),
    ],
    ids=["fading", "unlisted", "last", "seed", "detached"],
)
def test_other_faults_are_told_apart(loss: Any, kind: str) -> None:
    assert [finding.kind for finding in found(loss)] == [kind]


@pytest.mark.parametrize("is_bare", [True, False])
def test_only_the_term_that_does_not_add_up_is_named(is_bare: bool) -> None:
    def two(model: nn.Module, micro: Any) -> dict[str, Any]:
        mean = losses(model, micro)
        return {"main": right(model, micro), "mean": mean if is_bare else Total(mean, 1)}

    assert [finding.culprit for finding in found(two)] == ["term 'mean' of two"]
