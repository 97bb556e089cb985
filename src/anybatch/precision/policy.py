"""Precision: dtypes to store, compute and accumulate in, and the loss scale."""

import dataclasses
import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch

from anybatch.core import PlanError, accelerator

Short = Literal["bfloat16", "float16"]
_SHORT, _COMPUTE = get_args(Short), (*get_args(Short), "float32", "tf32")
#: Policies for a micro-batch whose loss or gradient is not finite, even without a loss scale.
NonFinitePolicy = Literal["raise", "drop", "skip"]
NON_FINITE_POLICIES = get_args(NonFinitePolicy)
#: Names of precisions.
PrecisionName = Literal["float32", "tf32", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of a step. The default changes nothing.

    Args:
        store: dtype of the weights and of values between modules, "bfloat16" or "float16"; None to leave
            them. A float32 copy of each trained weight, the *master weight*, is updated by the optimizer and
            saved in checkpoints.
        compute: dtype of matrix products and convolutions: "bfloat16" or "float16" for torch's autocast,
            "tf32" for float32 with a shorter mantissa on GPUs that have it; None for the dtype of the
            weights.
        accumulate: dtype of gradient sums; None for float32, or the weight's if that is wider.
        keep_float32: modules that stay in float32 with all their parts: patterns of names as in `fnmatch`, or
            names of classes. BatchNorm always stays. With 16-bit weights so do InstanceNorm with running
            statistics (updates too small for 16 bits), and rotary embeddings (buffers named `inv_freq`, and
            modules that hold one and no parameters).
        loss_scale: factor of the loss in backward, so that small gradients do not vanish in float16: a power
            of two, "dynamic" to begin at 65,536 and adapt, None for 1.

    Raises:
        PlanError: an invalid value, or two values that exclude each other.

    Example:
        >>> find_precision("fp16-mixed").loss_scale
        'dynamic'
        >>> str(Precision(store="bfloat16", keep_float32=("LayerNorm",)))
        'store bfloat16, keep_float32 LayerNorm'

    Source: Micikevicius et al. 2018, "Mixed Precision Training", sections 3.1 to 3.3.
    """

    store: Short | None = None
    compute: Short | Literal["float32", "tf32"] | None = None
    accumulate: str | None = None
    keep_float32: tuple[str, ...] = ()
    loss_scale: float | Literal["dynamic"] | None = None
    # torch's autocast chooses the dtype of each operation
    is_mixed: bool = dataclasses.field(init=False, repr=False, compare=False)
    # weights are stored or values computed in 16 bits
    is_short: bool = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put, is_mixed = partial(object.__setattr__, self), self.store is None and self.compute in _SHORT
        put("keep_float32", _patterns(self.keep_float32))
        put("is_mixed", is_mixed)
        put("is_short", is_mixed or self.store is not None)
        for name, value, known in (("store", self.store, _SHORT), ("compute", self.compute, _COMPUTE)):
            if value is not None and value not in known:
                raise PlanError(f"Expected {name} to be one of {known} or None, got {value!r}. Name one.")
        dtype = getattr(torch, str(self.accumulate), None)
        if self.accumulate is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise PlanError(
                f'Expected accumulate to name a floating dtype, got {self.accumulate!r}. Write "float32".'
            )
        _check_scale(self.loss_scale)
        if self.store is not None and self.compute not in (None, self.store):
            raise PlanError(
                f"Expected weights that are stored in {self.store} to be computed with in {self.store}, got "
                f"compute={self.compute!r}. Leave compute out, or store them in float32."
            )
        if self.keep_float32 and not self.is_short:
            raise PlanError(
                f"Expected a shorter dtype beside keep_float32, got {list(self.keep_float32)} where all is "
                'left as it is. Name store="bfloat16" or compute="bfloat16", or leave it out.'
            )

    @property
    def storage(self) -> torch.dtype | None:
        """The dtype of stored weights; None to leave them."""
        return None if self.store is None else getattr(torch, self.store)

    def computing(self, kinds: Iterable[str]) -> AbstractContextManager[Any]:
        """Return the context for forward and loss, not backward: autocast on these types of devices."""
        return self._autocast(kinds) if self.is_mixed else _NOTHING

    def arithmetic(self) -> AbstractContextManager[Any]:
        """Return the context for a whole step: TF32, or float32 sums in 16-bit matrix products."""
        if self.compute == "tf32":
            return _switched(_TF32)
        return _switched(_FULL_SUMS) if self.is_short else _NOTHING

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; `Precision(**values)` reads them."""
        names = [field.name for field in dataclasses.fields(self) if field.init]
        return {name: getattr(self, name) for name in names} | {"keep_float32": list(self.keep_float32)}

    def __str__(self) -> str:
        for name, one in NAMED.items():
            if one == self:
                return name
        values = self.to_dict() | {"keep_float32": " ".join(self.keep_float32)}
        return ", ".join(f"{name} {value}" for name, value in values.items() if value)

    @contextmanager
    def _autocast(self, kinds: Iterable[str]) -> Generator[None]:
        dtype = torch.float16 if self.compute == "float16" else torch.bfloat16
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield


_NOTHING: AbstractContextManager[Any] = nullcontext()
_CUDNN: Any = torch.backends.cudnn
_FULL_SUMS = (
    (accelerator.MATMUL, "allow_fp16_reduced_precision_reduction", False),
    (accelerator.MATMUL, "allow_bf16_reduced_precision_reduction", False),
    (accelerator.MATMUL, "allow_fp16_accumulation", False),
)
_TF32 = (
    tuple((holder, "fp32_precision", "tf32") for holder in (accelerator.MATMUL, _CUDNN.conv, _CUDNN.rnn))
    if hasattr(_CUDNN, "conv")
    else ((accelerator.MATMUL, "allow_tf32", True), (_CUDNN, "allow_tf32", True))  # before torch 2.9
)


@contextmanager
def _switched(settings: tuple[tuple[Any, str, object], ...]) -> Generator[None]:
    # Older torch has fewer. A value that is right already is left: it may be inherited, or more than a bool.
    changed: list[tuple[Any, str, Any]] = []
    try:
        for holder, name, wanted in settings:
            found: Any = getattr(holder, name, wanted)
            if (found[0] if isinstance(found, tuple) else found) != wanted:
                changed.append((holder, name, found))
                setattr(holder, name, wanted)
        yield
    finally:
        for holder, name, found in changed:
            setattr(holder, name, found)


def _patterns(given: Any) -> tuple[str, ...]:
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    if not (is_list and all(isinstance(one, str) and one for one in given)):
        raise PlanError(
            f'Expected keep_float32 to be a list of patterns, got {given!r}. Write ["LayerNorm", "*.router"].'
        )
    return tuple(given)


def _check_scale(value: Any) -> None:
    if value is None or value == "dynamic":
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 1 <= value < math.inf and math.frexp(value)[0] == 0.5):
        raise PlanError(
            f"Expected loss_scale to be a power of two of at least 1, which changes no digit, got {value!r}. "
            'Pass 1024, or "dynamic".'
        )


NAMED: Mapping[PrecisionName, Precision] = {
    "float32": Precision(),
    "tf32": Precision(compute="tf32"),
    "bf16-mixed": Precision(compute="bfloat16"),
    "fp16-mixed": Precision(compute="float16", loss_scale="dynamic"),
    "bf16-true": Precision(store="bfloat16"),
    "fp16-true": Precision(store="float16", loss_scale="dynamic"),
}


def find_precision(precision: "str | Precision | None") -> Precision:
    """Return a precision by name; None is "float32". Raise PlanError for an unknown name."""
    if isinstance(precision, Precision):
        return precision
    name: Any = "float32" if precision is None else precision
    if not isinstance(name, str) or name not in NAMED:
        text = str(precision)
        near = "bf16" if "bf" in text else "fp16" if "16" in text or "half" in text else ""
        advice = (
            f'Write "{near}-mixed", or "{near}-true" to store the weights so, too' if near else "Name one"
        )
        raise PlanError(
            f"Expected a precision, one of {', '.join(NAMED)}, got {precision!r}. {advice}; "
            "ab.Precision(store=..., compute=...) says each dtype by itself."
        )
    return NAMED[cast("PrecisionName", name)]


def check_non_finite(policy: object) -> None:
    """Raise a PlanError unless the value is one of `NON_FINITE_POLICIES`."""
    if policy not in NON_FINITE_POLICIES:
        raise PlanError(
            f'Expected non_finite to be one of {NON_FINITE_POLICIES}, got {policy!r}. "raise" stops and '
            'names the rows, "drop" leaves them and their weight out, "skip" makes no update.'
        )
