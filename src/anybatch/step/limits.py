"""Limits: what memory has taught about the size of a micro-batch, for each kind of row."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

PATIENCE = 16  # clean steps before a larger micro-batch is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The limit of one kind of row, and how it was met."""

    fits: int  # rows of the largest micro-batch that goes through, as far as is known
    failed: int  # rows of the smallest in which memory ran out
    clean: int = 0  # steps since then, or since the last larger one was tried
    patience: int = PATIENCE  # clean steps after which a larger one is tried

    def size(self, planned: int) -> int:
        """Return the rows to try next: those that fit, or half of the way to the plan if it is time."""
        fits = min(self.fits, planned)
        return fits if self.clean < self.patience else fits + -(-(planned - fits) // 2)


class Limits:
    """The limits met so far, by kind of row. After each failure more is tried half as often."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Limit] = {}

    def size(self, like: Hashable, planned: int) -> int:
        """Rows of a micro-batch that was planned to have as many."""
        limit = self.known.get(like)
        return planned if limit is None else limit.size(planned)

    def learn(self, like: Hashable, planned: int, *, largest: int, failed: int) -> None:
        """Learn from micro-batches of `planned` rows: `largest` went through, `failed` did not (0: none)."""
        old = self.known.get(like)
        if failed:
            half = -(-failed // 2)
            # What went through before a larger one was tried still does.
            fits = half if old is None or old.fits >= failed else max(old.fits, half)
            patience = PATIENCE if old is None else 2 * old.patience
            self.known[like] = Limit(fits=fits, failed=failed, patience=patience)
        elif old is not None and old.fits < planned:
            if largest > old.fits:
                self.known[like] = replace(old, fits=largest, clean=0)
            else:
                self.known[like] = replace(old, clean=old.clean + 1)
