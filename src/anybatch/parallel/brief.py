"""Brief messages of a step: numbers, and a hash of all that is the same on every rank"""

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import fsum
from struct import pack, unpack_from
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.engine import Gradient, Sums
from anybatch.parallel.buckets import Buckets, flat_of
from anybatch.parallel.group import Sent


def brief(message: Mapping[str, Any], terms: Sequence[str], *, is_early: bool, has_tail: bool) -> bytes:
    """Return a message in brief: 1, a hash of 15 bytes, and float64 numbers.

    Args:
        message: in full.
        terms: of the loss, also where this rank has no rows.
        is_early: sent before the last backward.
        has_tail: gradients are sent along.
    """
    same = message["layout"], message["scale"], message["order"][0], terms, message["drift"]
    unit = math.nan if message["unit"] is None else message["unit"]
    plain = [unit, message["shared"], message["rows"], message["dropped"], is_early, has_tail]
    each = [message[key].get(name, 0.0) for key in ("weights", "totals") for name in terms]
    hashed = blake2b(repr(same).encode(), digest_size=15).digest()
    return b"\1" + hashed + pack(f"{len(plain) + len(each)}d", *plain, *each)


def read(briefs: Sequence[bytes], message: Mapping[str, Any], terms: Sequence[str]) -> list[dict[str, Any]]:
    """Return messages in full from brief ones with the hash of this `message`."""
    said, form = list[dict[str, Any]](), f"{6 + 2 * len(terms)}d"
    for one in briefs:
        unit, shared, rows, dropped, early, tail, *each = unpack_from(form, one, 16)
        said.append(
            {
                **message,
                "unit": None if math.isnan(unit) else unit,
                "shared": bool(shared),
                "rows": int(rows),
                "dropped": int(dropped),
                "early": bool(early),
                "tail": bool(tail),
                "weights": dict(zip(terms, each, strict=False)),
                "totals": dict(zip(terms, each[len(terms) :], strict=True)),
            }
        )
    return said


def tail_of(bank: Gradient, like: Mapping[nn.Parameter, torch.dtype]) -> Tensor:
    """Return few gradients in one vector, and 1 for each that there is."""
    parts = [bank[p].reshape(-1) if p in bank else flat_of(None, p, dtype) for p, dtype in like.items()]
    return torch.cat([*parts, torch.tensor([float(p in bank) for p in like], dtype=parts[0].dtype)])


def added(
    tails: Sequence[Tensor],
    said: Sequence[Mapping[str, Any]],
    weights: Mapping[str, float],
    parameters: Sequence[nn.Parameter],
) -> Gradient:
    """Add up the gradients in messages, in the order of ranks, each multiplied by its factor."""
    whole = next(iter(weights.values()))
    factors = [1.0 if one["unit"] is None else one["unit"] / whole for one in said]
    total = tails[0] * factors[0]  # also what counts gradients: only zeros stay zeros
    for tail, factor in zip(tails[1:], factors[1:], strict=True):
        total.add_(tail * factor)
    *values, has = total.split([*[p.numel() for p in parameters], len(parameters)])
    pairs = zip(parameters, values, has.tolist(), strict=True)
    return {p: value.view(p.shape) for p, value, count in pairs if count}


class Early:
    """The message of a step that was sent before its last backward, and the buckets sent since."""

    def __init__(self, message: Mapping[str, Any], sent: Sent, buckets: Buckets) -> None:
        self.message, self.sent, self.buckets = message, sent, buckets
        self._said: list[dict[str, Any]] = []
        self.weights: dict[str, float] | None = None  # of all ranks; empty if no bucket may be sent

    def heard(self) -> list[dict[str, Any]]:
        """Return the messages of all ranks."""
        self._said = self._said or self.sent.heard()
        return self._said


def weights_of(said: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the weight of each term over all ranks."""
    add = max if any(one["shared"] for one in said) else fsum
    names = next((one["weights"] for one in said if one["weights"]), {})
    return {name: add([one["weights"].get(name, 0.0) for one in said]) for name in names}


def bank_of(sums: Sums) -> Gradient | None:
    """Return the gradient sums here, if one factor divides them and none is sparse; else None."""
    banks = {} if sums.gradients is None else sums.gradients.parted()
    (bank,) = banks.values() if len(banks) == 1 else [{}]
    is_one = len(banks) < 2 and not any(one.is_sparse for one in bank.values())
    return bank if is_one else None


def factor_of(sums: Sums, weights: Mapping[str, float]) -> float:
    """Return the factor of the one bank of gradient sums here, after `bank_of`."""
    factors = {} if sums.division.divisors is not None else sums.division.factors(weights)
    return float(next(iter(factors.values()), 1.0))
