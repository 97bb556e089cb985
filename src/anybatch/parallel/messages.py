"""Messages of a step: brief, with a hash of what is the same on every rank, or in full"""

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import fsum
from struct import pack, unpack_from
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from anybatch.core import LossError, NonFiniteLossError, PlanError, RankError
from anybatch.engine import Gradient, Strategy, Sums
from anybatch.parallel.buckets import Buckets, flat_of
from anybatch.parallel.compression import Codec
from anybatch.parallel.fingerprint import Drift, fingerprint, refuse_differences, refuse_drift
from anybatch.parallel.group import Group, Sent, exchange

_NO_UPDATE = "No rank has made the update."


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


class Speaker(Strategy):
    """The messages of a step: brief where all ranks are alike, else in full; errors where they are not."""

    def __init__(self, compression: Codec | None, group: Group) -> None:
        self.compression, self.group = compression, group
        self._fingerprint: dict[str, str] | None = None
        self._is_known = False  # the fingerprints of all ranks agree
        self._is_told = False  # all ranks know that this step has failed
        self.drift = Drift()
        self._drift: dict[str, Any] = {}  # to compare, of this step
        self._like: dict[nn.Parameter, torch.dtype] = {}  # of gradients, in the order of buckets
        self._nbytes = 0  # of all gradients
        self._order = ["", ""]  # hashes: the order of buckets, and that in which a backward finished
        self._tells_order = False  # other ranks do not know it yet
        self._terms: list[str] = []  # of the loss, in the last update
        self._task: Any = None
        self._settings: Any = None

    def _message(self, sums: Sums) -> dict[str, Any]:
        """Return what the ranks have to know of each other before an update."""
        here, _ = sums.read(sums.weigh())
        self._drift = self._drift or self.drift.message(sums)
        division = sums.division
        units = [division.coefficients[name] * one for name, one in division.provisional.items()]
        return {
            "weights": here,
            "totals": sums.totals,
            # These are the weights of all ranks: 1 for a sum, all rows for a whole-batch loss.
            "shared": division.divisors is not None,
            "unit": units[0] if len(units) == 1 and division.divisors is None else None,
            "rows": sum(sums.rows),
            "dropped": sums.dropped,
            "scale": sums.task.scale.state(),
            "layout": [len(self._like), self._nbytes, sums.task.progress.updates],
            "drift": self._drift,
            "order": [*self._order],
            "early": False,
        }

    def _refuse(self, said: Sequence[Mapping[str, Any]]) -> None:
        layouts = [one["layout"] for one in said]
        if any(one != layouts[0] for one in layouts):
            self._fail(
                PlanError,
                "Expected the same parameters trained and as many updates made on every rank, got "
                f"parameters, bytes and updates {layouts}. After an error in an update, load the last "
                "checkpoint.",
            )
        try:
            refuse_drift([one["drift"] for one in said])
        except PlanError:
            self._is_told = True
            raise
        named = [one["weights"] for one in said if one["weights"]]
        if any(one.keys() != named[0].keys() for one in named):
            self._fail(
                LossError, f"Expected the same terms of the loss on every rank, got {[*map(list, named)]}."
            )

    def _brief(self, message: Mapping[str, Any], *, is_early: bool = False, has_tail: bool = False) -> bytes:
        """Return a message in brief; empty for one that has to be sent in full."""
        drift = message["drift"]
        is_new = not self._is_known or self._tells_order or drift["touched"] or drift["rows"]
        if is_new or self.is_lockstep or not self._task.loss.is_plain:
            return b""
        self._terms = [*message["weights"]] or self._terms
        return brief(message, self._terms, is_early=is_early, has_tail=has_tail)

    def _understood(
        self, message: Mapping[str, Any], heard: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the messages after a brief one; [] to exchange them in full; raise if a rank failed."""
        self._refuse_failed(heard)
        briefs = [one.get("brief", b"") for one in heard]
        return read(briefs, message, self._terms) if len({bytes(one[:16]) for one in briefs}) == 1 else []

    def _agree(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Exchange messages in full; raise if a rank has failed, or another model."""
        if "drift" in message:
            message = {**message, "drift": self.drift.in_full(message["drift"])}
        if not self._is_known:
            message = {**message, "is": self._fingerprint}
        said = exchange(message, self.group)
        while any("brief" in one for one in said):
            self._refuse_failed(said)
            said = exchange(message, self.group)
        self._refuse_failed(said)
        if len({"parts" in one for one in said}) > 1:
            self._fail(
                PlanError,
                "Expected SyncBatchNorm in the same mode on every rank, got it in training on ranks "
                f"{[number for number, one in enumerate(said) if 'parts' in one]} only.",
            )
        if not self._is_known:
            try:
                refuse_differences([one["is"] or {} for one in said])
            except PlanError:
                self._is_told = True
                raise
            self._is_known = True
        return said

    def _refuse_failed(self, said: Sequence[Mapping[str, Any]]) -> None:
        for number, one in enumerate(said):
            if "failed" in one:
                # Every rank skips the same update when non_finite="skip".
                kind = NonFiniteLossError if one["failed"] == NonFiniteLossError.__name__ else RankError
                when = f" after update {one['made']}, which all ranks have made" if one.get("made") else ""
                self._fail(
                    kind,
                    f"Expected all ranks to finish, got {one['failed']} on rank {number}{when}, which says "
                    f"{one['said']!r}.",
                    "No rank has made another." if when else _NO_UPDATE,
                )

    def _compare(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Compare everything if a rank loaded something; warn of equal rows."""
        self.drift.warn_of_same_rows(said)
        if any(one["touched"] for one in said):
            written = {*self.drift.written}
            self._fingerprint = fingerprint(self._task, self._settings, self.compression, written)
            self._is_known = False
            self._agree({})

    def _fail(self, kind: type[Exception], said: str, update: str = _NO_UPDATE) -> NoReturn:
        self._is_told = True
        raise kind(f"{said} {update}")
