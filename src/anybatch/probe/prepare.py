"""Before the first comparison: a copy that runs, rows that differ, as many as there is time for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from anybatch import tree
from anybatch.batch import Collate, TensorBatch
from anybatch.errors import BatchError
from anybatch.probe.choose import affordable, choose, rows_of, signatures, subset
from anybatch.probe.copies import Copied, Itself, Subject
from anybatch.probe.cut import Cut
from anybatch.probe.draws import Draws
from anybatch.probe.passes import Bench
from anybatch.probe.rows import Part

ALL_ROWS = 64  # a batch of at most this size is tried whole where a few rows do not run
ROWS = 8  # enough for ragged cuts of several rows
PASSES = 5  # over all rows: the whole, its cuts, and one to spare
BUDGET_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """What a check works on.

    Attributes:
        bench: where passes are made.
        whole: the chosen rows, uncut; as nested tensors where that is possible.
        samples: the same as the caller gave them, where `collate` makes the tensors of each micro-batch.
        notes: what the caller should know.
    """

    bench: Bench
    whole: Cut
    samples: Cut | None
    notes: tuple[str, ...]

    def quiet(self, seed: int) -> "Prepared":
        """The same with dropout switched off."""
        note = "dropout was switched off: which of its numbers belong to which row cannot be told"
        bench = replace(self.bench, draws=Draws(seed, is_quiet=True))
        return replace(self, bench=bench, notes=(*self.notes, note))


def prepare(
    model: nn.Module,
    loss: object,
    batch: Any,
    *,
    collate: Collate | None,
    micro_batch: int | None,
    rows: int | None,
    batch_norm: str | None,
    seed: int,
) -> Prepared:
    """Choose rows, and find the best copy of the model that runs on them.

    Raises:
        BatchError: fewer than two rows.
        Exception: whatever the model or the loss raises on these rows.
    """
    total = rows_of(batch, collate)
    if total < 2 or (rows is not None and rows < 2):
        raise BatchError(
            f"Expected at least 2 rows to cut, got {total if total < 2 else rows}. Hand over a larger batch."
        )
    wanted = min(total, rows or max(ROWS, 2 * (micro_batch or 0) + 1))
    table = signatures(batch, collate, wanted if total > ALL_ROWS else total)

    def cut(count: int) -> Cut:
        chosen = choose(table, count)
        given = subset(batch, collate, chosen)
        return Cut(given=given, micro_batch=len(chosen), part=Part.whole(len(chosen)), collate=collate)

    # Two rows may be too few for a model, and fewer than all for a loss that holds something for each row.
    sizes = [2, wanted] + [total] * (total <= ALL_ROWS)
    subject, notes, least = _subject(model, loss, [cut(size) for size in sizes], batch_norm, seed)
    wanted = max(wanted, least)
    if rows is None and micro_batch is None and least == 2:
        trial = cut(2)
        wanted = affordable(
            lambda: _bench(subject, batch_norm, seed).run(trial), wanted, passes=PASSES, budget_s=BUDGET_S
        )
    whole = cut(wanted)
    bench = _bench(subject, batch_norm, seed)
    if collate is None:
        return Prepared(bench=bench, whole=whole, samples=None, notes=notes)
    collated, note = _collated(whole, collate, bench.draws)
    return Prepared(
        bench=bench, whole=collated or whole, samples=None if note else whole, notes=(*notes, *note)
    )


def _bench(subject: Subject, batch_norm: str | None, seed: int) -> Bench:
    return Bench(subject=subject, draws=Draws(seed), batch_norm=batch_norm or "micro")


def _subject(
    model: nn.Module, loss: object, cuts: list[Cut], batch_norm: str | None, seed: int
) -> tuple[Subject, tuple[str, ...], int]:
    """In float64, else as it is, else the caller's own model; notes, and rows that it ran on."""
    makers: list[tuple[Callable[[], Subject], str]] = [
        (lambda: Copied(model, loss, torch.float64), ""),
        (lambda: Copied(model, loss, None), "it does not run in float64"),
        (lambda: Itself(model, loss), "it does not run as a copy, so the model itself was run and put back"),
    ]
    first: Exception | None = None
    last: Exception | None = None
    for make, note in makers:
        try:
            subject = make()
        except Exception as error:  # anything can be in a model, and much of it cannot be copied
            first, last = first or error, error
            continue
        for cut in cuts:
            passed = _bench(subject, batch_norm, seed).run(cut)
            if passed.error is None:
                reason = f" ({_line(first)})" if first is not None and note else ""
                return subject, (f"{note}{reason}",) if note else (), len(cut.part.rows)
            first, last = first or passed.error, passed.error
    # The loop ends here only after every maker has failed.
    assert last is not None  # noqa: S101
    raise last


def _collated(whole: Cut, collate: Collate, draws: Draws) -> tuple[Cut | None, tuple[str, ...]]:
    """All rows as one nest of tensors, so that cuts are compared on the very same padding."""
    draws.begin(whole.part)
    value = collate(list(whole.given))
    try:
        TensorBatch(value)
    except BatchError:
        return None, ()
    note = (
        () if _same(value, collate(list(whole.given))) else ("`collate` draws random numbers; it ran once",)
    )
    return Cut(given=value, micro_batch=whole.micro_batch, part=whole.part), note


def _same(one: Any, other: Any) -> bool:
    pairs = zip(tree.flatten(one).leaves, tree.flatten(other).leaves, strict=True)
    return all(a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num())) for a, b in pairs)


def _line(error: Exception | None) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:120]}"
