"""Gradient noise: the variance between gradients of rows, and the batch size that it suggests."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import Callback, Micro, PlanError, StepReport, accelerator, check_whole
from anybatch.observe.measure import dense, norms_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The noise estimate of one update. Single estimates scatter, and may be negative."""

    update: int  # number of the callback's update, 1 for the first
    rows: int
    noise: float  # trace of the covariance of a row's gradient
    signal: float  # squared 2-norm of the expected gradient
    scale: float | None  # mean noise over mean signal so far, in rows


class GradientNoise(Callback):
    """A callback that estimates the gradient noise scale: the batch size, in rows, where noise equals signal.

    Well below it, twice the rows halve the number of updates needed; well above it, they hardly help. The
    estimate compares the gradients of micro-batches with that of the whole batch, so it needs steps that are
    cut, in micro-batches of any sizes. It is unbiased if rows are drawn independently: not with a loss over
    all rows (`ab.WholeBatch`), and not for rows sorted by length.

    A measured update keeps the gradient of a micro-batch separate, which needs memory for one more gradient,
    and reads it once per micro-batch. The weights are bit-identical to a training without it.

    Args:
        every: measure the first update and then every n-th.
        decay: decay of the means of noise and signal over the measured updates.
        limit: most estimates in `history`; the oldest are dropped.

    Attributes:
        scale: the gradient noise scale in rows; None before an estimate.
        history: the estimates.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> noise = GradientNoise(every=1)
        >>> from anybatch.step import Step
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = Step(model, nn.MSELoss(), optimizer, micro_batch=4, callbacks=[noise])
        >>> report = step((torch.randn(16, 4), torch.randn(16, 1)))
        >>> len(noise.history), noise.history[0].rows
        (1, 16)

    Source: McCandlish et al. 2018, "An empirical model of large-batch training", appendix A.1, with as many
    batch sizes as there are micro-batches.
    """

    name = "noise"

    def __init__(self, *, every: int = 10, decay: float = 0.9, limit: int = 1000) -> None:
        check_whole("every", every, least=1)
        check_whole("limit", limit, least=1)
        if not 0 <= decay < 1:
            raise PlanError(f"Expected a decay of at least 0 and below 1, got {decay!r}. Pass 0.9, say.")
        self.every, self.decay, self.limit = every, decay, limit
        self.history: list[Noise] = []
        self.updates = 0  # updates so far
        self._parts: list[_MicroGradient] = []
        self._is_complete = True
        self._whole: Tensor | None = None  # squared 2-norms: the sum of the parts', and the whole one's
        self._means: tuple[float, ...] = 0.0, 0.0, 0.0  # decayed sums of noise, signal and weights

    @property
    def is_due(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if the next update is measured."""
        return self.updates % self.every == 0

    @property
    def scale(self) -> float | None:
        """The gradient noise scale in rows."""
        noise, signal, weight = self._means
        return noise / signal if weight and signal > 0 else None

    def begin(self, done: int) -> None:
        """Drop micro-batches that were undone."""
        del self._parts[done:]
        self._is_complete = len(self._parts) == done

    def micro_gradients(self, micro: Micro, gradients: Mapping[str, Sequence[Tensor]], scale: float) -> None:
        """Record the size of a micro-batch's gradient."""
        values = {name: several[0] for name, several in gradients.items()}
        plain = [name for name, one in values.items() if one.layout is torch.strided and one.numel()]
        if not plain or any(len(several) > 1 for several in gradients.values()):
            self._is_complete = False  # each term has another divisor, unknown before the end
            return
        name, squared = min(plain, key=lambda name: values[name].numel()), _squared(values) / scale**2
        share = dense(values[name]).clone() / scale
        self._parts.append(_MicroGradient(len(micro.indices), squared, name, share))

    def gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Record the size of the whole gradient."""
        self._whole = None
        names = {part.name for part in self._parts}
        is_known = self._is_complete and len(names) == 1 and names <= gradients.keys()
        if self.is_due and is_known and len(self._parts) > 1:
            # Micro-batches may have another divisor than the gradient. The ratio of both is measured on one
            # parameter, by adding up its gradients.
            added = torch.stack([accelerator.widened(part.share) for part in self._parts]).sum(0).norm()
            factor = accelerator.widened(dense(gradients[names.pop()])).norm() / added
            parts = torch.stack([part.squared for part in self._parts]).sum() * factor**2
            self._whole = torch.stack([parts, _squared(gradients).to(parts.device)])

    def parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Compute and store the estimate."""
        self._store()

    def update(self, report: StepReport) -> None:
        """Store the estimate from a gradient that an `ab.BatchLoss` hands over."""
        if not report.updated and math.isfinite(report.grad_norm):
            self._store()

    def _store(self) -> None:
        self.updates += 1
        sizes = [part.rows for part in self._parts]
        self._parts, whole, self._whole = [], self._whole, None
        if whole is None:
            return
        parts, squared = whole.tolist()
        rows = sum(sizes)
        # E sum |g_m|^2 = signal * even + noise / rows, and E |g|^2 = signal + noise / rows.
        even = sum([(size / rows) ** 2 for size in sizes])
        noise = rows * (parts - even * squared) / (1 - even)
        signal = squared - noise / rows
        if not math.isfinite(noise):
            return
        pairs = zip(self._means, (noise, signal, 1.0), strict=True)
        self._means = tuple([self.decay * old + (1 - self.decay) * new for old, new in pairs])
        estimate = Noise(update=self.updates, rows=rows, noise=noise, signal=signal, scale=self.scale)
        self.history = [*self.history, estimate][-self.limit :]

    def record(self) -> Mapping[str, Any]:
        """Return the estimate of the last update, if it was measured."""
        last = self.history[-1] if self.history else None
        if last is None or last.update != self.updates:
            return {}
        return {name: getattr(last, name) for name in ("scale", "noise", "signal", "rows")}


@dataclass(frozen=True, slots=True)
class _MicroGradient:
    rows: int
    squared: Tensor  # squared 2-norm, on its device
    name: str  # name of a small parameter
    share: Tensor  # gradient of that parameter


def _squared(gradients: Mapping[str, Tensor]) -> Tensor:
    norms = [*norms_of(gradients).values()] or [torch.zeros(1)]
    return torch.cat([norm.to(norms[0].device) for norm in norms]).square().sum()
