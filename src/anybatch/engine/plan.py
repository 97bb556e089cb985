"""Plan: everything decided, nothing done; prints as a table, round-trips through JSON."""

import dataclasses
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from anybatch.batchnorm import BatchNormChoice, check_batch_norm
from anybatch.core import Cut, PlanError, cut_sizes
from anybatch.precision import NAMED, NonFinitePolicy, Precision, check_non_finite

FLOAT32 = NAMED["float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one logical step is carried out.

    Attributes:
        rows: rows of the batch; 0 where the caller brings micro-batches one by one.
        micro_batch: rows of each micro-batch; the last one takes what is left.
        clip_norm: largest 2-norm of the gradient, infinity for no clipping.
        clip_value: largest absolute value of its entries, infinity for no clipping; not with `clip_norm`.
        accumulate: dtype of gradient sums, as in "float32"; "auto" for float32 or the parameter's if wider.
        batch_norm: statistics of BatchNorm in training mode: "micro" for those of each micro-batch, "frozen"
            for the running ones; None where nothing was chosen, so a batch whose rows meet there is not cut.
        cut: rows of each micro-batch where they differ, as after memory ran out; empty where each has
            `micro_batch` rows and the last one what is left.
        blocks: (name, policy) of each block of the model whose activations are not kept
            (`anybatch.recompute`), in the order of the names.
        foreach: whether the optimizers update all parameters in common operations, which is faster on a GPU
            and takes more memory; None for what each optimizer is set to.
        precision: in which dtypes (`anybatch.Precision`).
        non_finite: what becomes of a micro-batch whose loss or gradient is not finite, at a loss scale of 1:
            "raise", "drop" (its rows and their weight leave the step) or "skip" (no update).
        is_cut: False where the whole batch is one micro-batch.

    Raises:
        PlanError: a value that cannot be carried out.

    Example:
        >>> plan = Plan(rows=10, micro_batch=4)
        >>> plan.micro_batches
        3
        >>> Plan.from_json(plan.to_json()) == plan
        True
        >>> print(plan)
        rows         10
        micro_batch  4, 4, 2 rows
        clip_norm    none
        accumulate   auto
        blocks       all kept
        foreach      as set
        precision    float32
        non_finite   raise
    """

    rows: int
    micro_batch: int
    clip_norm: float = math.inf
    accumulate: str = "auto"
    batch_norm: BatchNormChoice | None = None
    cut: tuple[int, ...] = ()
    blocks: tuple[tuple[str, str], ...] = ()
    foreach: bool | None = None
    precision: Precision = FLOAT32
    non_finite: NonFinitePolicy = "raise"
    clip_value: float = math.inf
    is_cut: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Read several times in each micro-batch of a window.
        object.__setattr__(self, "is_cut", self.rows != self.micro_batch or len(self.cut) > 1)
        if self.rows:
            check_micro_batch(self.micro_batch)
        if self.micro_batch > self.rows:
            raise PlanError(
                f"Expected micro_batch to be at most the {self.rows} rows of the batch, "
                f"got {self.micro_batch}. Pass a smaller one, or leave it out for the uncut batch."
            )
        _check_clip("clip_norm", self.clip_norm)
        _check_clip("clip_value", self.clip_value)
        if not (math.isinf(self.clip_norm) or math.isinf(self.clip_value)):
            raise PlanError(
                f"Expected clip_norm or clip_value, got both: {self.clip_norm} and {self.clip_value}. Leave "
                "one out: clip_norm keeps the direction of the gradient, clip_value clamps each entry."
            )
        check_batch_norm(self.batch_norm)
        if self.cut and (sum(self.cut) != self.rows or min(self.cut) < 1 or max(self.cut) > self.micro_batch):
            raise PlanError(
                f"Expected a cut into parts of 1 to {self.micro_batch} rows, {self.rows} in all, "
                f"got {self.cut}. Leave it out for parts of equal size."
            )
        check_non_finite(self.non_finite)
        if self.accumulate != "auto":
            parse_dtype(self.accumulate)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each micro-batch, in order."""
        return self.cut or tuple(cut_sizes(self.rows, self.micro_batch))

    @property
    def parts(self) -> Cut:
        """The row indices of each micro-batch, in order."""
        return _parts(self.rows, self.micro_batch, self.cut)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the batch is cut into."""
        return len(self.cut) or -(-self.rows // (self.micro_batch or 1))

    @property
    def accumulation_dtype(self) -> torch.dtype | None:
        """The dtype asked for gradient sums; None where each parameter's own decides."""
        return None if self.accumulate == "auto" else parse_dtype(self.accumulate)

    def to_json(self) -> str:
        """Return the plan as one JSON object; no clipping is null, because JSON knows no infinity."""
        values = dataclasses.asdict(self)
        del values["is_cut"]
        values["precision"] = self.precision.to_dict()
        return json.dumps(values | {name: None for name in _CLIPS if math.isinf(values[name])})

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read what `to_json` wrote.

        Raises:
            PlanError: it is something else.
        """
        try:
            values: dict[str, Any] = {"clip_value": None, **json.loads(text)}
            values |= {name: math.inf for name in _CLIPS if values[name] is None}
            values["cut"] = tuple(values.get("cut", ()))
            values["precision"] = Precision(**values.get("precision", {}))
            values["blocks"] = tuple((name, policy) for name, policy in values.get("blocks", ()))
            return Plan(**values)
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise PlanError(
                f"Expected a plan as Plan.to_json writes it, got {text!r} ({error}). Write it anew."
            ) from None

    def __str__(self) -> str:
        counts = Counter(policy for _, policy in self.blocks)
        blocks = [f"{policy} {count}" for policy, count in sorted(counts.items())]
        table = {
            "rows": str(self.rows) if self.rows else "as they come",
            "micro_batch": self._cut_in_words(),
            "clip_norm": "none" if math.isinf(self.clip_norm) else str(self.clip_norm),
            # A row would read as if somebody had chosen.
            **({} if math.isinf(self.clip_value) else {"clip_value": str(self.clip_value)}),
            "accumulate": self.accumulate,
            **({} if self.batch_norm is None else {"batch_norm": self.batch_norm}),
            "blocks": ", ".join(blocks) or "all kept",
            "foreach": "as set" if self.foreach is None else "yes" if self.foreach else "no",
            "precision": str(self.precision),
            "non_finite": self.non_finite,
        }
        return "\n".join(f"{name:12} {value}" for name, value in table.items())

    def _cut_in_words(self) -> str:
        if not self.rows:
            return "as they come"
        if self.micro_batches <= 4:
            return f"{', '.join(map(str, self.sizes))} rows"
        if self.cut:
            return f"{self.micro_batches} of {min(self.cut)} to {max(self.cut)} rows"
        full, rest = divmod(self.rows, self.micro_batch)
        return f"{full} x {self.micro_batch} rows" + f", then {rest}" * (rest > 0)


@lru_cache(maxsize=256)  # batches of an epoch have one or two sizes
def _parts(rows: int, micro_batch: int, sizes: tuple[int, ...]) -> Cut:
    return Cut.of_sizes(sizes or cut_sizes(rows, micro_batch))


def parse_dtype(name: str) -> torch.dtype:
    """Return a floating dtype by name, of at least two bytes: torch does not add narrower ones."""
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2:
        return dtype
    raise PlanError(
        f"Expected a floating dtype to accumulate in, got {name!r}. "
        "Use torch.float32, torch.float64 or torch.bfloat16."
    )


def check_micro_batch(micro_batch: object) -> None:
    """Refuse what is no number of rows.

    Raises:
        PlanError: not a whole number, or below 1.
    """
    if not isinstance(micro_batch, int) or isinstance(micro_batch, bool):
        raise PlanError(
            f"Expected micro_batch to be a whole number of rows, got {micro_batch!r}. "
            'Pass an int, or leave it out for the uncut batch; memory="auto" chooses one.'
        )
    if micro_batch < 1:
        raise PlanError(
            f"Expected micro_batch to be at least 1 row, got {micro_batch}. Leave it out for the uncut batch."
        )


_CLIPS = ("clip_norm", "clip_value")


def _check_clip(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise PlanError(
            f"Expected {name} to be a positive number, got {value!r}. Leave it out for no clipping."
        )
