"""What the tests of the probe share: a bench, a cut, and the calls of passes over both."""

from typing import Any

import torch
from torch import nn

from anybatch.check.compare import Comparison
from anybatch.check.copies import Copied
from anybatch.check.draws import Draws
from anybatch.check.passes import Bench, Calls
from anybatch.check.rows import Cut, Part

ROWS = 8
LIMIT = 1e-9


def bench(model: nn.Module, loss: object) -> Bench:
    return Bench(subject=Copied(model, loss, torch.float64), draws=Draws(0))


def cut(given: Any, micro_batch: int = 3) -> Cut:
    return Cut(data=given, micro_batch=micro_batch, part=Part.whole(ROWS))


def comparison(model: nn.Module, loss: object, given: Any) -> Comparison:
    ours, whole = bench(model, loss), cut(given, ROWS)
    return Comparison(bench=ours, whole=whole, reference=ours.run(whole))


def calls(bench: Bench, cut: Cut) -> Calls:
    return bench.run(cut).calls
