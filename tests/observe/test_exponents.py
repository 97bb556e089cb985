"""Exponents of gradients, against a slow count of each number by itself."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.errors import PlanError
from anybatch.observe.exponents import COLOURS, Exponents, Fates, draw, gradient_exponents
from tests.device import needs_sparse

# Bits of the fraction, least normal exponent, largest exponent.
LAYOUTS = {"float16": (10, -14, 15), "bfloat16": (7, -126, 127)}


def fate(number: float, dtype: str) -> str:
    """What becomes of a number by IEEE 754: to the nearest multiple of its last digit, ties to even."""
    fraction, least, largest = LAYOUTS[dtype]
    digit = math.ldexp(1.0, max(math.frexp(number)[1] - 1, least) - fraction)
    rounded = abs(round(number / digit) * digit)
    if rounded == 0:
        return "vanish"
    if rounded >= math.ldexp(1.0, largest + 1):
        return "overflow"
    return "normal" if rounded >= math.ldexp(1.0, least) else "subnormal"


def slowly(gradients: list[Tensor], scale: float = 1.0, precision: str = "float32") -> Exponents:
    numbers = [number for gradient in gradients for number in gradient.flatten().double().tolist()]
    held = [number for number in numbers if number and math.isfinite(number)]
    fates = {dtype: Counter(fate(number, dtype) for number in held) for dtype in LAYOUTS}
    return Exponents(
        counts=dict(sorted(Counter(math.frexp(number)[1] - 1 for number in held).items())),
        zeros=numbers.count(0.0),
        not_finite=sum(not math.isfinite(number) for number in numbers),
        fates={dtype: Fates(**{name: found[name] for name in COLOURS}) for dtype, found in fates.items()},
        scale=scale,
        precision=precision,
    )


def of_gradient(gradient: Tensor, **options: Any) -> Exponents:
    """Counted where the gradient is this one: that of a sum of products with the weights."""
    model = nn.Linear(len(gradient), 1, bias=False, dtype=gradient.dtype)
    nn.init.zeros_(model.weight)
    step = ab.Step(model, total, torch.optim.SGD(model.parameters(), lr=0.1), options=ab.Options(check=False))
    return gradient_exponents(step, gradient[None], **options)


def total(model: nn.Module, rows: Tensor) -> ab.Total:
    return ab.Total((model.get_parameter("weight") * rows).sum(), 1)


POWERS = (-149, -134, -133, -126, -26, -25, -24, -15, -14, 15, 16, 127)
EDGES = [sign * math.ldexp(1.0, e) for e in POWERS for sign in (1, -1)]
EDGES += [math.ldexp(1.5, e) for e in (-134, -25, -26)]
EDGES += [math.ldexp(1 + 2**-23, -25), math.ldexp(2 - 2**-10, -15), math.ldexp(2 - 2**-12, -15)]
EDGES += [65504.0, 65519.0, 65520.0, 3.4e38, 0.0, -0.0, math.inf, -math.inf, math.nan]


def test_edges_are_counted_as_one_by_one() -> None:
    gradient = torch.tensor(EDGES)
    found = of_gradient(gradient)
    assert found == slowly([gradient])
    assert found.numbers == len(EDGES)
    assert (found.zeros, found.not_finite) == (2, 3)
    assert min(found.counts) == -149


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.integers(0, 24))
def test_any_numbers_are_counted_as_one_by_one(numbers: list[float], power: int) -> None:
    gradient, scale = torch.tensor(numbers), 2.0**power
    assert of_gradient(gradient, scale=scale) == slowly([gradient * scale], scale)


def test_a_loss_scale_brings_back_what_float16_loses() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    step = ab.Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    batch = 1e-6 * torch.randn(12, 6), torch.randint(5, (12,))
    real, lossy, scaled = [
        gradient_exponents(step, batch, precision=precision, scale=scale)
        for precision, scale in (("float32", 1.0), ("fp16-mixed", 1.0), ("fp16-mixed", 2.0**16))
    ]
    assert real.fates["float16"].vanish > 20
    assert lossy.zeros > real.zeros + 20
    assert lossy.fates["float16"].vanish == 0  # they are zero already
    assert scaled.zeros <= real.zeros + 1
    assert (real.precision, lossy.precision) == ("float32", "fp16-mixed")
    inputs, targets = 1e6 * batch[0], batch[1]
    assert gradient_exponents(step, (inputs, targets), precision="fp16-mixed", scale=2.0**24).not_finite > 0


@needs_sparse
def test_sparse_gradients_are_counted_and_a_precision_that_stores_otherwise_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1))
    optimizers = [torch.optim.SparseAdam(model[0].parameters()), torch.optim.SGD(model[1].parameters())]
    step, batch = ab.Step(model, nn.MSELoss(), optimizers), (torch.tensor([1, 1, 4]), torch.ones(3, 1))
    assert gradient_exponents(step, batch).numbers == 2 * 3 + 4  # two rows of ten
    with pytest.raises(PlanError, match=r"stored as in float32, got fp16-true"):
        gradient_exponents(step, batch, precision="fp16-true")


def record(counts: dict[int, int], zeros: int = 0) -> Exponents:
    fates = dict.fromkeys(LAYOUTS, Fates(normal=sum(counts.values()), subnormal=0, vanish=0, overflow=0))
    return Exponents(counts=counts, zeros=zeros, not_finite=0, fates=fates, scale=1.0, precision="float32")


def test_a_page_says_the_figures_too_and_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    found = record({-3: 30}, zeros=10)
    page = draw(found, tmp_path / "a.html", title="of a model").read_text(encoding="utf-8")
    assert "40 gradients, computed in float32 at a loss scale of 1" in page
    assert "10   25.0%" in str(found)
    assert all(line in page for line in ("<title>of a model</title>", *str(found).splitlines()))
    for shown in ([record({}), record({})], [record({-30: 2, 0: 1}), record({-14: 2, 16: 1})]):
        assert draw(shown, tmp_path / "a.png").stat().st_size > 1000
    for refused, dtype, got in (([], "float16", r"got 0 and"), (found, "float8", r"'float8'")):
        with pytest.raises(PlanError, match=got):
            draw(refused, tmp_path / "a.svg", dtype=dtype)
    assert not (tmp_path / "a.svg").exists()
