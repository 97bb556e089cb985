"""Cross-entropy of a large vocabulary: in blocks of rows beside all logits at once."""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.losses.linear import linear_cross_entropy
from anybatch.memory.meter import Meter
from benchmarks.config import HeadCase
from benchmarks.race import quiet_collector
from benchmarks.results import Head
from benchmarks.tasks import IGNORE

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The mean loss of hidden, weight and target."""


def at_once(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """What everybody writes."""
    return F.cross_entropy(F.linear(hidden, weight), target, ignore_index=IGNORE)


def in_blocks(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Ours, with its own choice of rows."""
    mean = linear_cross_entropy(hidden, weight, target, ignore_index=IGNORE).mean()
    assert isinstance(mean, Tensor)
    return mean


LOSSES: dict[str, Loss] = {"hand": at_once, "anybatch": in_blocks}


def head(case: HeadCase, *, seed: int) -> Head:
    """Errors in float64, peak bytes and seconds in float32, all at the size of the case."""
    peaks = {name: _peak(case, loss, seed=seed) for name, loss in LOSSES.items()}
    return Head(
        case=case,
        error=_errors(case, seed=seed),
        held=peaks["hand"][1],
        peak={name: peak for name, (peak, _) in peaks.items()},
        wall=_race(case, seed=seed),
    )


def make_head(
    case: HeadCase, *, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden and weight, which want gradients, and a target of which a seventh is ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(case.tokens, case.width, generator=generator)
    weight = torch.randn(case.vocabulary, case.width, generator=generator) / case.width**0.5
    target = torch.randint(case.vocabulary, (case.tokens,), generator=generator)
    target[::7] = IGNORE
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


def _errors(case: HeadCase, *, seed: int) -> dict[str, float]:
    """Norm of the difference over the norm of the reference, of the loss and of each gradient."""
    hidden, weight, target = make_head(case, seed=seed, dtype=torch.float64)
    found: dict[str, list[Tensor]] = {}
    for name, loss in LOSSES.items():
        value = loss(hidden, weight, target)
        found[name] = [value.detach(), *torch.autograd.grad(value, [hidden, weight])]
    pairs = zip(("loss", "hidden", "weight"), found["anybatch"], found["hand"], strict=True)
    return {name: ((ours - plain).norm() / plain.norm()).item() for name, ours, plain in pairs}


def _peak(case: HeadCase, loss: Loss, *, seed: int) -> tuple[int, int]:
    """Of one forward and backward, and what was held before: hidden and weight, the same for both."""
    hidden, weight, target = make_head(case, seed=seed)
    with quiet_collector(), Meter(nn.Identity(), held=[hidden, weight], batch_leaves=[target]) as meter:
        loss(hidden, weight, target).backward()
    return meter.peak - target.nbytes, meter.held - target.nbytes


def _race(case: HeadCase, *, seed: int) -> dict[str, list[float]]:
    """Seconds of forward and backward, A B B A in each pair, after one of each that does not count."""
    hidden, weight, target = make_head(case, seed=seed)

    def seconds(loss: Loss) -> float:
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        loss(hidden, weight, target).backward()
        return time.perf_counter() - start

    wall: dict[str, list[float]] = {name: [] for name in LOSSES}
    with quiet_collector():
        for loss in LOSSES.values():
            seconds(loss)
        for _ in range(case.pairs):
            first = {name: seconds(loss) for name, loss in LOSSES.items()}
            for name, loss in reversed(LOSSES.items()):
                wall[name].append(first[name] + seconds(loss))
    return wall
