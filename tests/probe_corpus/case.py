"""A case of the corpus: a model, a loss and a batch as a user brings them, and what is wrong with them."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import nn

from anybatch.core.batch import Collate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """What goes into the self-test, and what must come out.

    Attributes:
        model, loss, batch, collate: as for `ab.Step`; the loss may also return a bare mean.
        name: of the function that makes the case.
        kinds: kinds of findings of which one must be made; empty for a sound case.
        culprit: a pattern that the culprit or the text of such a finding must match.
        dtype: in which the case can be run; float32 where the user's own code holds on to it.
        repad: gives a collated batch with other content in its padded places.
    """

    model: nn.Module
    loss: Any
    batch: Any
    collate: Collate | None = None
    name: str = ""
    kinds: frozenset[str] = frozenset()
    culprit: str = ""
    dtype: torch.dtype = torch.float64
    repad: Callable[[Any], Any] = lambda batch: batch


Make = Callable[[], Case]


def entry(corpus: list[Make], *kinds: str, culprit: str = "") -> Callable[[Make], Make]:
    """Put what a function makes into a corpus, from a seed of its own, without moving the global stream."""

    def add(make: Make) -> Make:
        name = make.__name__

        @wraps(make)
        def seeded() -> Case:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(zlib.crc32(name.encode()))
                return replace(make(), name=name, kinds=frozenset(kinds), culprit=culprit)

        corpus.append(seeded)
        return seeded

    return add
