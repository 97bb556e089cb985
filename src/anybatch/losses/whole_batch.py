"""A loss over the outputs of all rows, exact in two passes: first the outputs' gradient, then the model's."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import core
from anybatch.core import torch_private as private, tree
from anybatch.losses.cotangents import Pull, Seen, flows_of, joined, part
from anybatch.losses.inputs import call, several
from anybatch.losses.loss import Evaluated, Loss, Share, first_pass_rows
from anybatch.losses.terms import told_of
from anybatch.state import rng


@dataclass(frozen=True, slots=True)
class WholeBatch(Loss):
    """A loss over the outputs of all rows: contrastive, ranking, decorrelation.

    A split batch goes through the model twice: first for the outputs of all rows and their gradient, then
    with a graph, from the same random state and buffers. This needs memory for the outputs of all rows and
    their gradient, and one more forward. A batch that is not split goes through once.

    The function gets the outputs, then the targets, each of all rows. A mapping with one of the keys
    `target`, `targets`, `label`, `labels`, `y`, and a tuple `(inputs, target)`, have a target. Other
    mappings, `(inputs,)`, and tuples of which `model.forward` requires every part, have none. If the last
    part is optional in `model.forward`, the batch is refused: name its parts in a mapping.

    Args:
        function: takes outputs and targets of all rows, returns a scalar tensor or an `ab.Total` (with weight
            0 no update is made). It may be a module with parameters, and may draw random numbers.
        loss_rows: rows per call of the function, for losses whose memory grows with the square of the rows.
            The function then gets all outputs and targets and, as the keyword `rows`, the indices of rows
            whose sum it returns as an `ab.Total`: int64 of shape (at most loss_rows,).
        outputs: `(model, micro) -> outputs`, replaces the usual call of the model. It also returns the other
            arguments of the function, such as labels.

    Outputs have one entry per row in their first axis, or are scalars that all rows share (a learned
    temperature).

    Raises:
        LossError: the function cannot be called, or `loss_rows` is no positive int.

    Example:
        >>> import torch.nn.functional as F
        >>> def info_nce(image, text):
        ...     return F.cross_entropy(image @ text.T / 0.07, torch.arange(len(image)))
        >>> def info_nce_by_rows(image, text, rows):
        ...     losses = F.cross_entropy(image[rows] @ text.T / 0.07, rows, reduction="none")
        ...     return Total(losses.sum(), len(rows))
        >>> WholeBatch(info_nce_by_rows, loss_rows=1024).loss_rows
        1024

    Source: Gao, Zhang, Han, Callan 2021, "Scaling deep contrastive learning batch size under memory limited
    setup", section 3.2; here with repeated random state and buffers.
    """

    function: Callable[..., Tensor | core.Total]
    loss_rows: int | None = None
    outputs: Callable[[nn.Module, Any], Any] | None = None
    # set by the step: an `anybatch.engine.Strategy` whose ranks hold rows of one batch
    ranks: Any = field(default=None, repr=False, kw_only=True)

    divided = True  # the function's value is the loss itself
    is_plain = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise core.LossError(
                f"Expected a function of the outputs of all rows, got {type(self.function).__name__}. "
                "Pass ab.WholeBatch(function), where function(outputs, targets) returns a scalar."
            )
        rows = self.loss_rows
        if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
            raise core.LossError(
                f"Expected loss_rows to be a whole number of at least 1, got {rows!r}. "
                "Leave it out to call the function once, with all rows."
            )

    def evaluate(self, model: nn.Module, micro: Any) -> Evaluated:
        """Return the loss of a batch that is not cut, in one pass."""
        seen = self.look(model, micro)
        if self.loss_rows is None:
            value, weight = self._value(seen)
        else:
            pull = self._pull(seen.without_graph())
            value, weight = pull.into(seen.outputs, 0, pull.rows), pull.weight
        return Evaluated({"loss": value}, lambda: {"loss": weight})

    @contextmanager
    def along(
        self, batch: core.Batch, sizes: Sequence[int], model: nn.Module, put_back: Callable[[], None]
    ) -> Generator[Share]:
        """Make the first pass, if there are several micro-batches; yield the loss of each in the second pass.

        Raises:
            LossError: in a window, which never has all rows; or for outputs without one entry per row.
            NonFiniteLossError: the loss is NaN or infinite.
        """
        if not batch.rows and not isinstance(batch, core.NoRows):
            raise core.LossError(
                f"Expected the whole batch for {self.name}, a loss over the outputs of all rows, got a "
                "window, which brings them micro-batch by micro-batch. Call step(batch)."
            )
        if len(sizes) == 1 and self.ranks is None:
            yield lambda start, stop: self
            return
        before = rng.capture_process()
        try:
            pull, first = self._first_pass(batch, sizes, model, put_back)
            after = rng.capture_process()  # the function may have drawn too
            rng.restore_process(before)
            yield lambda start, stop: _Sent(whole=self, pull=pull, start=first + start, stop=first + stop)
        except BaseException as error:
            if isinstance(error, core.NonFiniteLossError):
                error.reached = error.reached or rng.capture_process()
            rng.restore_process(before)
            raise
        rng.restore_process(after)

    def look(self, model: nn.Module, micro: Any, rows: int | None = None) -> Seen:
        """Run the model on a micro-batch; raise if outputs do not have `rows` entries."""
        if self.outputs is not None:
            returned, targets = self.outputs(model, micro), ()
        else:
            inputs, targets = part(model, micro)
            returned = call(model, inputs)
        nest = tree.flatten(several(returned))
        wrong = [tuple(leaf.shape) for leaf in nest.leaves if leaf.dim() and len(leaf) != rows]
        if rows is not None and wrong:
            raise core.LossError(
                f"Expected outputs with one entry per row, {rows} in this micro-batch, in their first axis, "
                f"got shape {wrong[0]}. Return several views of a row as several outputs, and put time or "
                "heads into later axes, in the model or in ab.WholeBatch(function, outputs=...)."
            )
        return Seen(nest.leaves, nest.build, targets)

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def _first_pass(
        self, batch: core.Batch, sizes: Sequence[int], model: nn.Module, put_back: Callable[[], None]
    ) -> tuple[Pull, int]:
        versions = private.versions(model.parameters())
        # Each graph is dropped at once. Under no_grad, models that differentiate inside, or use other kernels
        # without gradients, would behave differently in the two passes.
        micros: Iterable[tuple[Any, int]] = zip(first_pass_rows(batch, sizes), sizes, strict=True)
        seen: list[Seen] = []
        for micro, rows in micros if self.ranks is None else self.ranks.first(micros):
            with nullcontext() if rows else rng.preserved():
                one = self.look(model, micro, rows or None).without_graph()
            seen.append(one if rows else one.without_rows())
            del micro
        whole = joined(seen)
        _refuse_written(model, versions)
        torch.clear_autocast_cache()  # holds casts of dropped graphs
        put_back()
        if self.ranks is None:
            return self._pull(whole), 0
        here = whole.rows
        whole, first = _gathered(whole, self.ranks)
        streams = rng.capture(rng.of_process())
        pull = self._pull(whole)
        if not rng.is_same(streams, rng.capture(rng.of_process())):
            raise core.LossError(
                f"Expected a loss over rows of several ranks to draw no random numbers, got {self.name}, "
                "which would draw others on each rank. Draw them before the step, as part of the batch."
            )
        return replace(pull, stop=first + here), first

    def _pull(self, whole: Seen) -> Pull:
        if self.loss_rows is None:
            value, weight = self._value(whole)
            flows = flows_of(value)
        else:
            value, weight, flows = self._by_rows(whole, self.loss_rows)
        if torch.is_grad_enabled():
            self._refuse_non_finite(value, weight, whole.outputs)
        return Pull(
            value=value.detach(),
            weight=weight,
            rows=whole.rows,
            stop=whole.rows,
            outputs=tuple([leaf.detach() for leaf in whole.outputs]),
            cotangents=tuple([flows.pop(leaf, None) for leaf in whole.outputs]),
            parameters=tuple(flows.items()),
        )

    def _by_rows(self, whole: Seen, count: int) -> tuple[Tensor, core.Number, dict[Tensor, Tensor]]:
        total = core.Total.zero()
        sums: dict[Tensor, Tensor] = {}
        for rows in torch.arange(whole.rows, device=whole.outputs[0].device).split(count):
            share = self.function(*whole.arguments(), rows=rows)
            if not isinstance(share, core.Total):
                raise core.LossError(
                    f"Expected {self.name} to return an ab.Total for the rows it is given, got "
                    f"{type(share).__name__}. With loss_rows= return ab.Total(sum over rows, how many)."
                )
            value = torch.as_tensor(share.sum)
            for leaf, gradient in flows_of(value).items():
                if leaf in sums:
                    sums[leaf] += gradient
                else:  # a copy: a gradient of autograd may be expanded or share memory
                    wide = torch.promote_types(gradient.dtype, torch.float32)
                    sums[leaf] = gradient.to(wide, copy=True)
            total += core.Total(value.detach(), share.weight)
        for leaf, one in sums.items():
            flow = one / total.weight
            # That of a float16 leaf stays wide: without its scale it would underflow.
            sums[leaf] = flow if leaf.dtype == torch.float16 else flow.to(leaf.dtype)
        return torch.as_tensor(total.mean()), total.weight, sums

    def _value(self, seen: Seen) -> tuple[Tensor, core.Number]:
        value = self.function(*seen.arguments())
        if isinstance(value, core.Total):
            return torch.as_tensor(value.mean()), value.weight
        if isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex():
            return value, seen.rows
        raise core.LossError(
            f"Expected {self.name} to return one real number for all rows, a tensor of shape (), got "
            f"{told_of(value)}. Reduce it, by .mean() for instance."
        )

    def _refuse_non_finite(self, value: Tensor, weight: core.Number, outputs: Sequence[Tensor]) -> None:
        if bool(value.isfinite()) or not float(weight):
            return
        bad = [~output.isfinite().reshape(len(output), -1).all(1) for output in outputs if output.dim()]
        rows = torch.stack(bad).any(0).nonzero().flatten().tolist()[:8] if bad else []
        where = f"the outputs of rows {rows} are not finite either" if rows else "all outputs are finite"
        raise core.NonFiniteLossError(
            f"Expected a finite loss, got {value.item()} from {self.name} ({where}). No update was made. "
            "Look for bad data in these rows of the batch, a mean over no valid target, too high a learning "
            "rate, or a logarithm or root of 0."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent(Loss):
    """The loss of one micro-batch in the second pass, whose outputs have a known gradient."""

    whole: WholeBatch
    pull: Pull
    start: int
    stop: int

    divided = True
    tied = True

    def evaluate(self, model: nn.Module, micro: Any) -> Evaluated:
        has_rows = self.start < self.pull.stop  # else it is a micro-batch of weight 0, for other ranks
        outputs = self.whole.look(model, micro, self.stop - self.start if has_rows else None).outputs
        if has_rows:
            self.pull.check(outputs, self.start, self.stop)
        value = self.pull.into(outputs, self.start, self.stop)
        # The value comes with the first rows, and so does its weight.
        weight = 0 if self.start or not has_rows else self.pull.weight
        return Evaluated({"loss": value}, lambda: {"loss": weight})


def _gathered(here: Seen, ranks: Any) -> tuple[Seen, int]:
    nest = tree.flatten(here.targets)
    in_rows = [one for one in here.outputs if one.dim()]
    found, first = ranks.gather([*[one.detach() for one in in_rows], *nest.leaves])
    values = iter(found)
    outputs = [next(values).requires_grad_(one.requires_grad) if one.dim() else one for one in here.outputs]
    return Seen(tuple(outputs), here.build, nest.build(values)), first


def _refuse_written(model: nn.Module, before: Sequence[int]) -> None:
    pairs = zip(model.named_parameters(), before, strict=True)
    written = [name for (name, parameter), version in pairs if private.version(parameter) != version]
    if written:
        raise core.LossError(
            f"Expected a forward to leave parameters alone, got one that writes to {written[:3]}: in two "
            "passes it would do so twice, and it cannot be undone. Write to them after the step (an average "
            "of weights, a momentum encoder), or keep them as buffers."
        )
