"""Messages of a step: brief, with a hash of what is the same on every rank, or in full."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import fsum
from typing import Any

import torch
from torch import nn

from anybatch.core import AnybatchError, LossError, NonFiniteLossError, PlanError, RankError
from anybatch.engine import Gradient, Strategy, Sums
from anybatch.parallel.buckets import Buckets
from anybatch.parallel.compression import Codec
from anybatch.parallel.fingerprint import Drift, fingerprint, hash_of, refuse_differences, refuse_drift
from anybatch.parallel.group import Group, Message, exchange

NO_UPDATE = "No rank has made the update."
_SAME = "layout", "order", "drift"  # of a message: the same on every rank

Messages = Sequence[Mapping[str, Any]]  # of all ranks


@dataclass(slots=True)
class Early:
    """A message sent before the sum of gradients is over, and the buckets sent since."""

    message: Mapping[str, Any]
    buckets: Buckets
    sent: Message | None = None  # None if the message has to be sent in full, and no bucket before it
    weights: dict[str, float] | None = None  # of all ranks; empty if no bucket may be sent, None until asked


def weights_of(said: Messages) -> dict[str, float]:
    """Return the weight of each term over all ranks."""
    add = max if any(one["shared"] for one in said) else fsum
    names = next((one["weights"] for one in said if one["weights"]), {})
    return {name: add([one["weights"].get(name, 0.0) for one in said]) for name in names}


def bank_of(sums: Sums) -> Gradient | None:
    """Return the gradient sums here, if one factor divides them and none is sparse; else None."""
    banks = {} if sums.gradients is None else sums.gradients.parted()
    bank = next(iter(banks.values()), {})
    return None if len(banks) > 1 or any(one.is_sparse for one in bank.values()) else bank


def factor_of(said: Mapping[str, Any], weights: Mapping[str, float]) -> float:
    """Return the factor of the one bank of gradient sums of a rank that says this."""
    return 1.0 if said["unit"] is None else said["unit"] / next(iter(weights.values()))


class Speaker(Strategy):
    """The messages of a step: brief where all ranks are alike, else in full; errors where they are not."""

    def __init__(self, compression: Codec | None, group: Group) -> None:
        self.compression, self.group = compression, group
        self._fingerprint: dict[str, str] = {}
        self._is_known = False  # the fingerprints of all ranks agree
        self._is_told = False  # all ranks know that this step has failed
        self.drift = Drift()
        self._drift: dict[str, Any] = {}  # to compare, of this step
        self._like: dict[nn.Parameter, torch.dtype] = {}  # of gradients, in the order of buckets
        self._order, self._is_ordered = "", False  # a hash of it, "" for the reverse; all ranks agree
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
            "layout": [len(self._like), self._nbytes(), sums.task.progress.updates],
            "drift": self._drift,
            "order": self._order,
        }

    def _nbytes(self) -> int:
        return sum(p.numel() * dtype.itemsize for p, dtype in self._like.items())

    def _refuse(self, said: Messages) -> None:
        """Raise on all ranks if they differ in what no rank may."""
        self._is_told = True  # of what follows
        layouts = [one["layout"] for one in said]
        if any(one != layouts[0] for one in layouts):
            raise PlanError(
                "Expected the same parameters trained and as many updates made on every rank, got "
                f"parameters, bytes and updates {layouts}. After an error in an update, load the last "
                f"checkpoint. {NO_UPDATE}"
            )
        refuse_drift([one["drift"] for one in said])
        named = [one["weights"] for one in said if one["weights"]]
        if any(one.keys() != named[0].keys() for one in named):
            raise LossError(
                f"Expected the same terms of the loss on every rank, got {[*map(list, named)]}. {NO_UPDATE}"
            )
        self._is_told = False

    def _brief(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with a hash of what is the same on every rank; in full if that may be new."""
        drift = message.get("drift")
        is_known = self._is_known and self._is_ordered and not self.is_lockstep
        if drift is None or not is_known or drift["touched"] or drift["rows"]:
            return message
        same = hash_of([message[key] for key in _SAME])
        return {"hash": same} | {key: one for key, one in message.items() if key not in _SAME}

    def _agree(self, message: Mapping[str, Any], sent: Message | None = None) -> Messages:
        """Exchange messages, in full if ranks differ; raise if a rank has failed, or another model."""
        if not self._is_known:
            message = {**message, "is": self._fingerprint}
        heard = exchange(self._brief(message), self.group) if sent is None else sent.heard()
        said = self._understood(message, heard) or self._understood(message, exchange(message, self.group))
        self._is_told = True  # of what follows
        if len({"parts" in one for one in said}) > 1:
            raise PlanError(
                "Expected SyncBatchNorm in the same mode on every rank, got it in training on ranks "
                f"{[number for number, one in enumerate(said) if 'parts' in one]} only. {NO_UPDATE}"
            )
        if not self._is_known:
            refuse_differences([one["is"] for one in said])
            self._is_known = True
        self._is_told = False
        return said

    def _understood(self, message: Mapping[str, Any], heard: Messages) -> Messages:
        """Return messages in full; none if ranks have to send theirs in full; raise if a rank has failed."""
        for number, one in enumerate(heard):
            if "failed" in one:
                # Every rank skips the same update when non_finite="skip".
                kind = NonFiniteLossError if one["failed"] == NonFiniteLossError.__name__ else RankError
                when = f" after update {one['made']}, which all ranks have made" if one.get("made") else ""
                self._is_told = True
                raise kind(
                    f"Expected all ranks to finish, got {one['failed']} on rank {number}{when}, which says "
                    f"{one['said']!r}. {'No rank has made another.' if when else NO_UPDATE}"
                )
        is_same = len({one.get("hash") for one in heard}) == 1
        return [{**message, **one} if "hash" in one else one for one in heard] if is_same else ()

    def _factor(self, early: Early) -> float | None:
        """Return the factor of the gradients here; None if nothing may be sent, as ranks differ."""
        # It waits for the others' last forward: all send at one place of backward, among other collectives.
        if early.weights is None and early.sent is not None:
            early.weights = {}
            with suppress(AnybatchError):  # `close` raises it again
                early.weights = weights_of(self._understood(early.message, early.sent.heard()))
        weights = early.weights or {}
        return factor_of(early.message, weights) if any(weights.values()) else None

    def _compare(self, said: Messages) -> None:
        """Compare everything if a rank loaded something; warn of equal rows."""
        drifts = [one["drift"] for one in said]
        self.drift.warn_of_same_rows(drifts)
        if any(one["touched"] for one in drifts):
            written = {*self.drift.written}
            self._fingerprint = fingerprint(self._task, self._settings, self.compression, written)
            self._is_known = False
            self._agree({})
