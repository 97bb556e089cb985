"""Gradient compression: codecs that turn a rank's gradient into bytes, and all bytes into the sum.

The sum is *changed*: it is rounded, or most of it comes updates later. A codec is used only on request. It
sends nothing itself: ranks gather the bytes.

Format: the number of values of each trained parameter as an int32, -1 for one without a gradient; then for
each parameter the positions of its values, int32, unless all elements are sent, and the values.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from anybatch.core import CheckpointError, PlanError
from anybatch.engine import accumulation_dtype, norm_of, owned

CastName = Literal["fp16", "bf16"]
Tensors = Mapping[str, Tensor]

_WIRE = {"fp16": torch.float16, "bf16": torch.bfloat16}
_MOST_ELEMENTS = 2**31 - 1  # the largest position in an int32
_Values = tuple[Tensor | None, Tensor]  # positions (None for all elements) and values of a parameter
_STAGES = 4  # stages of the warm-up: 75 %, 93.75 %, 98.4 % and 99.6 %


class Codec(ABC):
    """A codec: this rank's share of the divided gradient as bytes, and the bytes of all ranks as the sum.

    By itself it has no state; codecs with a state override `state`, `load` and `undo`.
    """

    name: str  # "fp16", "bf16" or "dgc"
    sent: int = 0  # bytes of the last `encode`

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise PlanError for complex parameters, and for more elements than an int32 can count."""
        for parameter in owned(optimizers):
            if parameter.is_complex() or parameter.numel() > _MOST_ELEMENTS:
                raise PlanError(
                    f"Expected real parameters of at most {_MOST_ELEMENTS:,} elements, got one of "
                    f"{parameter.dtype} and shape {tuple(parameter.shape)}. Train without compression."
                )

    @abstractmethod
    def encode(self, gradients: Tensors, like: Tensors) -> Tensor:
        """Return uint8 bytes, `(sent,)`, of finite gradients by name; `like` has all parameters."""

    def decode(self, payloads: Sequence[Tensor], like: Tensors) -> dict[str, Tensor]:
        """Return the sum by name, in float32 or float64; payloads are added in order."""
        sums: dict[str, Tensor] = {}
        for payload in payloads:
            counts, rest = _take(payload, len(like), torch.int32)
            for (name, parameter), count in zip(like.items(), counts.tolist(), strict=True):
                if count < 0:
                    continue
                places: Tensor | slice = slice(None)
                if count < parameter.numel():
                    places, rest = _take(rest, count, torch.int32)
                if name not in sums:
                    sums[name] = _flat({}, name, parameter)
                values, rest = _take(rest, count, _WIRE.get(self.name, sums[name].dtype))
                sums[name][places] += values.to(sums[name])
        return {name: sums[name].view(parameter.shape) for name, parameter in like.items() if name in sums}

    def state(self) -> dict[str, Any]:
        """Return this rank's state for checkpoints."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the output of `state`. Raise CheckpointError if it is of another codec."""
        if state.keys() != self.state().keys():
            raise CheckpointError(
                f"Expected the state of this codec, with {sorted(self.state())}, got one with "
                f"{sorted(state)}. Use the compression that the checkpoint was written with."
            )

    def undo(self) -> None:  # noqa: B027  # without a state there is nothing to restore
        """Restore the state before the last `encode`: its update was not made. Repeated calls do nothing."""


class Cast(Codec):
    """Gradients sent in 16 bits, `"fp16"` or `"bf16"`: half the bytes of float32, no state.

    The arithmetic is that of torch's `fp16_compress_hook` and `bf16_compress_hook`, but `decode` adds in
    float32, not in 16 bits, and nothing is divided by the number of ranks. As with the hook, `"fp16"` turns
    values beyond 65,504 into infinity (then no update is made) and those below 3e-8 into 0. `"bf16"` has the
    range of float32.
    """

    def __init__(self, name: CastName) -> None:
        if name not in get_args(CastName):
            raise PlanError(f"Expected one of {get_args(CastName)}, got {name!r}. Take one of these.")
        self.name: str = name

    def encode(self, gradients: Tensors, like: Tensors) -> Tensor:
        """Return this rank's gradients in 16 bits."""
        wire, there = _WIRE[self.name], [name for name in like if name in gradients]
        return _send(
            self, {name: (None, _flat(gradients, name, like[name]).to(wire)) for name in there}, like
        )


class DeepGradientCompression(Codec):
    """The largest elements are sent; the others are added up on their rank until they are large.

    For each parameter a rank keeps a velocity u and a residual v. From its gradient g it computes
    `u = momentum * u + g` and `v = v + u`, sends the k elements of v that are largest in magnitude, at least
    one, and sets them to 0 in v. Parameters of at most one dimension, such as biases, are sent whole, with
    momentum. Parts of the method:

    - *momentum correction*: v adds up velocities, not gradients, and the optimizer has no momentum.
      Off: `momentum=0.0`; the momentum may then be the optimizer's.
    - *local clipping*: g is first scaled so that its 2-norm over all parameters is at most
      `clip_norm / sqrt(ranks)`. Off: `clip_norm=None`.
    - *momentum factor masking*: u is set to 0 at sent elements. Off: `masking=False`.
    - *warm-up*: the sparsity is 75 %, 93.75 %, 98.4 % and 99.6 %, never more than `sparsity`, each for a
      quarter of `warmup_updates`. Off: `warmup_updates=0`.

    A parameter that is sent whole keeps its velocity, so `sparsity=0.0` is SGD with momentum. A rank without
    rows sends from its residual. Weight decay stays in the optimizer and gets no momentum. Clip here, not in
    the step: the norm of a sum of few large elements says little about the gradient.

    u and v use up to four times the bytes of the gradients in float32 (float64 for float64 parameters), as
    `undo` needs the old ones. The residual of a lost rank is lost.

    Args:
        sparsity: share of the elements of a parameter that is not sent, at least 0 and below 1.
        momentum: at least 0 and below 1.
        clip_norm: largest 2-norm of the gradient of the whole batch.
        ranks: number of ranks that share a batch; needed for `clip_norm`.
        masking: set the velocity to 0 at sent elements.
        warmup_updates: updates until `sparsity` is reached; the paper takes four epochs.

    Source: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep Gradient Compression: Reducing the
    Communication Bandwidth for Distributed Training", ICLR 2018, arXiv 1712.01887, section 3.
    """

    def __init__(
        self,
        sparsity: float = 0.999,
        momentum: float = 0.9,
        *,
        warmup_updates: int,
        clip_norm: float | None = None,
        ranks: int | None = None,
        masking: bool = True,
    ) -> None:
        for what, value in (("sparsity", sparsity), ("momentum", momentum)):
            if not 0 <= value < 1:
                raise PlanError(f"Expected {what} to be at least 0 and below 1, got {value!r}. Choose 0.9.")
        if warmup_updates < 0:
            raise PlanError(f"Expected warmup_updates of at least 0, got {warmup_updates!r}. Use 0 for none.")
        if clip_norm is not None and not (clip_norm > 0 and ranks is not None and ranks > 0):
            raise PlanError(
                f"Expected clip_norm above 0 and the number of ranks with it, got {clip_norm!r} and "
                f"ranks={ranks!r}. Each rank clips to clip_norm / sqrt(ranks)."
            )
        self.name: str = "dgc"
        self.sparsity, self.warmup_updates, self.masking = sparsity, warmup_updates, masking
        self.momentum = momentum
        self._limit = math.inf if clip_norm is None or ranks is None else clip_norm * ranks**-0.5
        self._state = self._before = _Waiting(0, {}, {})

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise PlanError for parameters that `Cast` refuses, betas, and momentum beside the codec's."""
        super().check(optimizers)
        refused = ("betas", "momentum", "nesterov") if self.momentum else ("betas",)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if own := {name: group[name] for name in refused if group.get(name)}:
                    raise PlanError(
                        f"Expected an optimizer without momentum, got {type(optimizer).__name__} with {own}: "
                        f"the codec has its own, {self.momentum}. Take torch.optim.SGD(parameters, lr=...)."
                    )

    def sparsity_at(self, update: int) -> float:
        """Return the sparsity at an update, counted from 0."""
        if update >= self.warmup_updates:
            return self.sparsity
        stage = _STAGES * update // self.warmup_updates
        return min(self.sparsity, 1 - 0.25 ** (stage + 1))

    def encode(self, gradients: Tensors, like: Tensors) -> Tensor:
        """Return the largest elements of this rank's residual."""
        old = self._before = self._state  # if this fails, `undo` must not go further back
        new = _Waiting(old.updates + 1, {}, {})
        share = 1 - self.sparsity_at(old.updates)
        norm = float(norm_of(gradients.values())) if gradients and self._limit < math.inf else 0.0
        factor = min(1.0, self._limit / norm) if norm else 1.0
        found: dict[str, _Values] = {}
        for name, parameter in like.items():
            if not any(name in held for held in (gradients, old.velocity, old.residual)):
                continue
            gradient = _flat(gradients, name, parameter) * factor
            velocity = self.momentum * _flat(old.velocity, name, parameter) + gradient
            waiting = _flat(old.residual, name, parameter) + velocity
            count = max(1, round(share * waiting.numel()))
            if parameter.ndim <= 1 or count >= waiting.numel():
                found[name] = None, waiting
            else:
                places = waiting.abs().topk(count, sorted=False).indices
                found[name] = places, waiting[places]
                new.residual[name] = waiting.index_fill_(0, places, 0)
                if self.masking:
                    velocity.index_fill_(0, places, 0)
            if self.momentum:
                new.velocity[name] = velocity
        payload = _send(self, found, like)
        self._state = new
        return payload

    def state(self) -> dict[str, Any]:
        """Return the number of updates, u and v; each tensor flat, by parameter name."""
        return self._state._asdict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the output of `state`. Raise CheckpointError if it is of another codec."""
        super().load(state)
        velocity, residual = dict(state["velocity"]), dict(state["residual"])
        self._state = self._before = _Waiting(state["updates"], velocity, residual)

    def undo(self) -> None:
        """Restore u, v and the number of updates before the last `encode`."""
        self._state = self._before


class _Waiting(NamedTuple):
    """The state of a rank. Its tensors are never written to, so `undo` needs no copy."""

    updates: int
    velocity: dict[str, Tensor]
    residual: dict[str, Tensor]


def _flat(held: Tensors, name: str, like: Tensor) -> Tensor:
    dtype = accumulation_dtype(like.dtype)
    if name not in held:
        return torch.zeros(like.numel(), dtype=dtype, device=like.device)
    return held[name].to_dense().reshape(-1).to(like.device, dtype)


def _send(codec: Codec, found: Mapping[str, _Values], like: Tensors) -> Tensor:
    counts = [found[name][1].numel() if name in found else -1 for name in like]
    parts = [torch.tensor(counts, dtype=torch.int32)]
    for places, values in found.values():  # in the order of `like`
        parts += [values] if places is None else [places.to(torch.int32), values]
    device = next((parameter.device for parameter in like.values()), torch.device("cpu"))
    payload = torch.cat([part.view(torch.uint8).to(device) for part in parts])
    codec.sent = payload.numel()
    return payload


def _take(payload: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    end = count * dtype.itemsize
    return payload[:end].clone().view(dtype), payload[end:]  # a copy, as a view must be aligned
