"""Batches split into model inputs and loss targets; calls of the model."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from anybatch.core import AnybatchError, LossError, is_mapping, is_sequence, kind_of, ran_out_of_memory

TARGET_KEYS = ("target", "targets", "label", "labels", "y")


def how_to_write(micro: object = None) -> str:
    """Return an example of a loss of one's own, for batches of the form of this micro-batch."""
    keys = list(micro) if is_mapping(micro) else []
    inputs = next((key for key in keys if key not in TARGET_KEYS), "inputs" if keys else 0)
    target = next((key for key in keys if key in TARGET_KEYS), "target" if keys else 1)
    return (
        "def loss(model, micro):\n"
        f'    losses = F.cross_entropy(model(micro[{inputs!r}]), micro[{target!r}], reduction="none")\n'
        "    return ab.Total(losses.sum(), losses.numel())"
    )


def noted(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return the result of a model or a loss; an error that it raises tells the shapes that it got."""
    try:
        return function(*arguments, **named)
    except Exception as error:
        tell_shapes(error, function, named or arguments)
        raise


def tell_shapes(error: Exception, function: Callable[..., Any], given: Any) -> None:
    """Add a note to the error of a model or a loss: the shapes that it got."""
    name = getattr(getattr(function, "func", function), "__name__", type(function).__name__)
    got = f"anybatch called {name} with {shown(given)}"
    ways = "mappings go in by name, each of several targets as an argument of its own"
    note(error, f"{got}. Compare shapes, dtypes and names with what it takes; {ways}.")


def note(error: Exception, text: str) -> None:
    """Add a note, once, to an error of the caller's code."""
    is_own = isinstance(error, AnybatchError) or ran_out_of_memory(error)
    if not is_own and text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def shown(value: Any) -> str:
    """Return the shapes and dtypes of the tensors in a batch, in its form."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if is_mapping(value):
        return f"{{{', '.join(f'{key!r}: {shown(one)}' for key, one in value.items())}}}"
    if is_sequence(value):
        return f"[{', '.join(map(shown, value[:6]))}]"
    return type(value).__name__


def split_batch(micro: Any, *, has_target: bool = True) -> tuple[Any, tuple[Any, ...]]:
    """Split a micro-batch into the model's inputs and the loss's targets.

    `(inputs, target)` is the usual pair; both may be nested. In `(a, b, ..., target)` the last is the target
    and the others are the model's positional arguments. In a mapping or a dataclass the target has one of the
    keys `target`, `targets`, `label`, `labels`, `y`, and the rest are the model's keyword arguments. A target
    that is a tuple or list becomes several arguments of the loss, as `CTCLoss` needs it. For a loss without
    target, such as `TripletMarginLoss`, the whole micro-batch goes into the model; so does `(inputs,)`.

    Example:
        >>> split_batch((1, 2))
        (1, (2,))
        >>> split_batch({"input_ids": 1, "labels": 2})
        ({'input_ids': 1}, (2,))
        >>> split_batch((1, 2, 3), has_target=False)
        ((1, 2, 3), ())
    """
    if type(micro) is tuple and len(micro) == 2 and has_target:  # the usual case
        inputs, target = micro
        return inputs, (target,) if isinstance(target, Tensor) else _spread(target)
    if is_sequence(micro):
        parts = tuple(micro)
        if len(parts) == 1 or not has_target:
            return parts[0] if len(parts) == 1 else parts, ()
        if len(parts) > 1:
            return parts[0] if len(parts) == 2 else parts[:-1], _spread(parts[-1])
    if is_dataclass(micro) and not isinstance(micro, type | Mapping):
        micro = {one.name: getattr(micro, one.name) for one in fields(micro)}
    if is_mapping(micro):
        found = [key for key in TARGET_KEYS if key in micro]
        if not has_target:
            return micro, ()
        if len(found) == 1:
            rest = {key: value for key, value in micro.items() if key != found[0]}
            return rest, _spread(micro[found[0]])
        raise LossError(
            f"Expected exactly one of the keys {TARGET_KEYS} in the batch, got {list(micro)}. Rename the "
            f"target, or write the loss as a function:\n{how_to_write(micro)}"
        )
    raise LossError(
        f"Expected a batch (inputs, target) or a mapping with a target, got {kind_of(micro)}. Pass both in "
        f"one tuple (return them from a collate), or write the loss as a function:\n{how_to_write(micro)}"
    )


def call(model: nn.Module, inputs: Any) -> Any:
    """Return the model's output for a tensor, a tuple (positional) or a mapping (keywords)."""
    if is_sequence(inputs):
        return noted(model, *inputs)
    if is_mapping(inputs):
        return noted(model, **inputs)
    return noted(model, inputs)


def call_model(model: nn.Module, inputs: Any) -> tuple[Any, ...]:
    """Return the outputs of `call` as a tuple; raise LossError unless they are tensors."""
    if type(inputs) is Tensor:  # the usual case
        try:
            outputs = model(inputs)
        except Exception as error:
            tell_shapes(error, model, (inputs,))
            raise
    else:
        outputs = call(model, inputs)
    if isinstance(outputs, Tensor):
        return (outputs,)
    if is_sequence(outputs):
        return several(outputs)
    raise LossError(
        f"Expected the model to return a tensor or a tuple of tensors, got {type(outputs).__name__}. If the "
        "model computes its loss from the labels in the batch, as those of transformers do, pass "
        "ab.ModelLoss() as the loss. Otherwise write the loss as a function (model, micro) -> ab.Total."
    )


def several(outputs: Any) -> tuple[Any, ...]:
    """Return what a model returned as a tuple, without entries that are None."""
    return tuple([one for one in _spread(outputs) if one is not None])


def _spread(target: Any) -> tuple[Any, ...]:
    # Collating turns tuples into lists, so both mean several targets.
    return tuple(target) if is_sequence(target) else (target,)
