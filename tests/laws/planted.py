"""Losses and models with a fault that makes the result depend on the split; and what a step says of them."""

import copy
import random
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.errors import LossError
from anybatch.testing import relative_error
from tests.options import flat
from tests.zoo import Transformer

FAULTS = ("none", "penalty", "constant weight", "mean of means", "batch mean", "pairs", "order", "padding")
# Of eight rows; the fault of a larger batch may be larger.
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-3}


class Pooled(nn.Module):
    """Mean over valid tokens of a transformer; with `counts_padding` over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.counts_padding = Transformer(9), 0.0
        self.body.embedding.padding_idx = 0

    def forward(self, x: Tensor) -> Tensor:
        scores, valid = self.body(x).transpose(1, 2), (x != 0)[..., None].to(self.body.embedding.weight)
        pooled = (scores * valid).sum(1) / valid.sum(1).clamp(min=1)
        padded = (x == 0).sum(1, keepdim=True) * (torch.arange(pooled.shape[1]) == 1)
        return pooled + self.counts_padding * padded


def make(drawn: random.Random, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    rows, kind = drawn.randint(9, 24), drawn.choice(["plain", "dropout", "convolution", "tokens"])
    if kind == "tokens":
        x = torch.randint(1, 9, (rows, 6))
        for row in range(rows):
            x[row, drawn.randint(2, 6) :] = 0
        return Pooled().to(dtype), (x, torch.randint(4, (rows,)))
    if kind == "convolution":
        model: nn.Module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 4))
        return model.to(dtype), (torch.randn(rows, 1, 6, 6, dtype=dtype), torch.randint(4, (rows,)))
    inner = nn.Dropout(0.3) if kind == "dropout" else nn.Tanh()
    model = nn.Sequential(nn.Linear(6, 9), inner, nn.Tanh(), nn.Linear(9, 4))
    return model.to(dtype), (torch.randn(rows, 6, dtype=dtype), torch.randint(4, (rows,)))


def planted(fault: str, size: float) -> Any:
    def loss(model: nn.Module, micro: tuple[Tensor, Tensor]) -> Any:
        out = model(micro[0])
        summed, rows = F.cross_entropy(out, micro[1], reduction="sum"), len(out)
        places = torch.arange(rows, dtype=out.dtype)
        added = {
            "batch mean": lambda: rows * out.mean(0).square().sum(),
            "pairs": lambda: (out[:, None] - out).square().sum(),
            "order": lambda: (out.sum(1) * places).sum(),
        }.get(fault, lambda: 0.0)()
        if fault == "penalty":
            size_of_all = torch.stack([p.square().sum() for p in model.parameters()]).sum()
            return {"loss": ab.Total(summed, rows), "penalty": ab.Total(size_of_all, 1)}
        if fault in ("constant weight", "mean of means"):
            return ab.Total(summed / (rows if fault == "mean of means" else 1), 1)
        return ab.Total(summed + 10 * size * added, rows)

    return loss


def outcome(seed: int) -> tuple[str, str, str]:
    """The fault, what a split step says of it ("refused", "warned" or ""), and the case."""
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    dtype, fault = drawn.choice([*ROUNDING]), drawn.choice(FAULTS)
    size, micro_batch = drawn.choice([1e-2, 1e-3, 1e-4, 1e-5]), drawn.randint(1, 9)
    model, batch = make(drawn, dtype)
    if fault == "padding" and isinstance(model, Pooled):
        model.counts_padding = size
    options: dict[str, Any] = {"order": "length"} if fault == "padding" and isinstance(model, Pooled) else {}
    name = type(model).__name__
    case = f"seed {seed}: {fault} of {size} in {name}, {dtype}, {micro_batch} of {len(batch[1])}"
    is_random = any(isinstance(one, nn.Dropout) for one in model.modules())
    twin, found = copy.deepcopy(model), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for one, rows, check in ((model, micro_batch, True), (twin, None, False)):
            given = flat(options if check else {}, check=check, micro_batch=rows)
            step = ab.Step(one, planted(fault, size), torch.optim.SGD(one.parameters(), lr=1.0), **given)
            try:
                step(batch)
            except LossError:
                return fault, "refused", case
            found.append({name: p.detach() for name, p in one.named_parameters()})
    if caught:
        return fault, "warned", case
    assert is_random or relative_error(*found) < ROUNDING[dtype], f"nothing was said of {case}"
    return fault, "", case


def assert_said(seed: int) -> None:
    fault, said, case = outcome(seed)
    assert not (said and fault in ("none", "penalty")), f"{said} without need: {case}"
