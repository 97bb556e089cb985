"""Cross-entropy of a linear layer without holding all logits."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from anybatch.core import SHORT_DTYPES, LossError, Total
from anybatch.losses.reductions import CLASSES

# Each block of logits reads and writes the whole gradient of the weight, so a few long blocks are faster:
# blocks of 8 rows take more than twice as long as blocks of 128 (50,257 words, width 256, one core).
_BLOCK_BYTES = 2**25
_ROWS_STEP = 64  # whole tiles of a matrix product


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    rows: int | None = None,
) -> Total:
    """Return sum and weight of the cross-entropy of a linear layer, computed in blocks of rows.

    The result is that of `F.cross_entropy(F.linear(hidden, weight, bias), target)`, as a sum and a weight.
    The logits of a large vocabulary take most of a language model's memory, three times: the logits, their
    log-softmax and its gradient. Here only one block of logits exists at a time. The forward computes its
    gradient and multiplies it into the gradients of `hidden`, `weight` and `bias`; `backward` only scales
    these. That takes three matrix products, as without blocks. Gradients of frozen tensors, and under
    `torch.no_grad`, are not computed.

    Sums and the gradients of weight and bias are accumulated in float32 or wider. Under autocast the matrix
    products use its dtype, as in a linear layer. `backward` may be called again with `retain_graph=True`;
    second derivatives are refused.

    torch 2.13 has its own `F.linear_cross_entropy`. With `options` it is as fast and needs as little memory,
    but with label smoothing it computes all logits, it ignores autocast, it accumulates the gradient of a
    bfloat16 weight in bfloat16, and it allows one backward only.

    Args:
        hidden: input of the layer, (..., width), floating.
        weight: weight of the layer, (vocabulary, width).
        target: class indices, (...), int64.
        bias: bias of the layer, (vocabulary,); None for none.
        class_weight: factor of each class's loss, (vocabulary,); None for 1.
        ignore_index: target that adds nothing to the sum and the weight.
        label_smoothing: part of each target that is spread over all classes, from 0 to 1.
        rows: rows of logits held at once; None for blocks of some MiB, or an eighth of the tokens in wide
            layers. Only the order of additions depends on it.

    Returns:
        The sum of the losses, at least in float32, and the number of valid targets, or the sum of their class
        weights.

    Raises:
        LossError: shapes or dtypes do not match, or a setting is out of range; in backward: the gradient is
            to be differentiated again.

    Example:
        >>> import torch.nn.functional as F
        >>> hidden, head = torch.randn(5, 3), torch.nn.Linear(3, 100)
        >>> target = torch.tensor([7, -100, 0, 99, -100])
        >>> total = linear_cross_entropy(hidden, head.weight, target, bias=head.bias, rows=2)
        >>> total.weight
        tensor(3)
        >>> torch.allclose(total.mean(), F.cross_entropy(head(hidden), target))
        True

    Source: gradients made in the forward, block by block: Hsu et al. 2024, "Liger Kernel: Efficient Triton
    Kernels for LLM Training", section 3.2.
    """
    _check_tensors(hidden, weight, target, bias, class_weight)
    if not 0 <= label_smoothing <= 1:
        raise LossError(f"Expected label_smoothing from 0 to 1, got {label_smoothing}. 0 is for none.")
    if rows is not None and (not isinstance(rows, int) or rows < 1):
        raise LossError(
            f"Expected rows to be a whole number of at least 1, got {rows!r}. None chooses a number."
        )
    divisor = CLASSES.weigh({"ignore_index": ignore_index, "weight": class_weight}, (), (target,))
    dtype = torch.get_autocast_dtype(hidden.device.type) if _autocasts(hidden) else hidden.dtype
    factors = torch.ones(len(weight), device=target.device) if class_weight is None else class_weight
    target, factors, spread = target.reshape(-1), factors.to(_wide(dtype)), None
    valid = target != ignore_index
    target = target.where(valid, 0)
    hard = mass = (1 - label_smoothing) * factors[target] * valid
    if label_smoothing:
        spread = factors * (label_smoothing / len(factors))
        mass = hard + spread.sum() * valid
    losses = _Losses((target, valid.to(factors.dtype), hard, mass), spread)
    # Inside a Function gradients are always off, so the caller's setting is read here.
    wanted = torch.is_grad_enabled()
    tokens = hidden.reshape(len(target), weight.shape[1])
    summed = _LinearCrossEntropy.apply(tokens, weight, bias, losses, dtype, rows, wanted)
    return Total(summed, divisor)


class _Losses(NamedTuple):
    """A valid row adds `mass * logsumexp(logits) - hard * logits[target] - spread @ logits` to the sum."""

    # (rows,) each: target, 0 if ignored; valid, 1, or 0 if ignored; hard, the factor of the target class;
    # mass, the sum of the factors of all classes
    rows: tuple[Tensor, ...]
    spread: Tensor | None  # (classes,), the smoothed part of each class; None without label smoothing

    def sum(self, logits: Tensor, start: int, *, differentiate: bool) -> Tensor:
        """Return the sum of some rows from `start` on, and replace their logits by the gradient in place."""
        target, valid, hard, mass = [one[start : start + len(logits)] for one in self.rows]
        target = target[:, None]
        logits.sub_(logits.amax(1, keepdim=True))
        losses = -hard * logits.gather(1, target).squeeze(1)
        if self.spread is not None:
            losses -= logits @ self.spread
        exponentials = logits.exp_().sum(1)
        losses += mass * exponentials.log()
        if differentiate:
            logits.mul_((mass / exponentials)[:, None])
            logits.scatter_add_(1, target, -hard[:, None])
            if self.spread is not None:
                logits.addr_(valid, self.spread, alpha=-1)
        # `where` instead of a product: padding may give infinity, and 0 times infinity is NaN.
        return losses.where(valid > 0, 0).sum()


class _LinearCrossEntropy(Function):
    """The sum of the losses; gradients are made in the forward and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        losses: _Losses,
        dtype: torch.dtype,
        rows: int | None,
        differentiate: bool,
    ) -> Tensor:
        needs = [need and differentiate for need in ctx.needs_input_grad[:3]]
        ctx.dtypes = [hidden.dtype, weight.dtype, None if bias is None else bias.dtype]
        wide = _wide(dtype)
        rows = rows or _rows(weight, len(hidden), wide)
        with torch.autocast(hidden.device.type, enabled=False):
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(wide)
            of_hidden = torch.empty_like(hidden) if needs[0] else None
            of_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
            of_bias = torch.zeros_like(weight[:, 0], dtype=wide) if needs[2] else None
            summed = torch.zeros((), dtype=wide, device=hidden.device)
            products = hidden.new_empty(min(rows, len(hidden)), len(weight))  # reused: fresh memory is slow
            for start in range(0, len(hidden), rows):
                block = hidden[start : start + rows]
                product = torch.mm(block, weight.T, out=products[: len(block)])
                logits = product.to(wide)  # the same tensor if the dtype is wide already
                if bias is not None:
                    logits += bias
                summed += losses.sum(logits, start, differentiate=any(needs))
                if not any(needs):
                    continue
                narrow = logits if logits is product else product.copy_(logits)
                if of_hidden is not None:
                    torch.mm(narrow, weight, out=of_hidden[start : start + len(block)])
                if of_weight is not None and logits is narrow:
                    of_weight.addmm_(narrow.T, block)
                elif of_weight is not None:
                    of_weight += narrow.T @ block
                if of_bias is not None:
                    of_bias += logits.sum(0)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return summed

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise LossError(
                "Expected to differentiate linear_cross_entropy once, got create_graph=True for "
                f"{ctx.dtypes}. F.cross_entropy(F.linear(hidden, weight), target) can do that."
            )
        # Not in place: with retain_graph=True they are needed again.
        scaled = [
            None if gradient is None else (gradient * cotangents[0]).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in SHORT_DTYPES else dtype


def _rows(weight: Tensor, tokens: int, wide: torch.dtype) -> int:
    classes, width = weight.shape
    most = max(_BLOCK_BYTES // max(1, classes * wide.itemsize), min(width // 2, tokens // 8))
    return max(_ROWS_STEP, most // _ROWS_STEP * _ROWS_STEP)


def _autocasts(hidden: Tensor) -> bool:
    return torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64  # never cast


def _check_tensors(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None
) -> None:
    classes, shapes = len(weight), {"hidden": hidden.shape, "weight": weight.shape, "target": target.shape}
    vectors = [value.shape for value in (bias, class_weight) if value is not None]
    fit = weight.dim() == 2 and hidden.shape == (*target.shape, weight.shape[1])
    if not fit or any(shape != (classes,) for shape in vectors):
        told = {name: tuple(shape) for name, shape in shapes.items()}
        raise LossError(
            "Expected hidden (..., width), weight (vocabulary, width), target (...), bias and class_weight "
            f"(vocabulary,), got {told} and {[tuple(shape) for shape in vectors]}. The classes come last."
        )
    if target.dtype != torch.int64:
        raise LossError(
            f"Expected targets to be indices of classes in int64, got {target.dtype}. Probabilities need all "
            "logits: use F.cross_entropy."
        )
    dtypes = {value.dtype for value in (hidden, weight, bias) if value is not None}
    if len(dtypes) > 1 and not _autocasts(hidden):
        raise LossError(
            f"Expected hidden, weight and bias of one dtype, got {sorted(map(str, dtypes))}. Call it under "
            "the autocast that made hidden, or cast hidden."
        )
