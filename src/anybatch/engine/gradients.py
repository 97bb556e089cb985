"""Gradient sums over micro-batches, the ways to accumulate them, and their one division."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import Look, NonFinite, Number, is_shard, local, torch_private as private

Gradient = dict[nn.Parameter, Tensor]
BUCKET = 64 << 20  # bytes of gradients that are looked at together


def accumulation_dtype(parameter: torch.dtype, chosen: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of gradient sums: the chosen one, else float32 or the parameter's if that is wider.

    Adding 0.001 to a bfloat16 gradient 1,024 times is 51 % off; in float32 it is not.

    Example:
        >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    if chosen is None:
        return torch.promote_types(parameter, torch.float32)
    return chosen.to_complex() if parameter.is_complex and not chosen.is_complex else chosen


def finish(banks: Mapping[str, Gradient], factors: Mapping[str, Number]) -> Gradient:
    """Multiply the sums of each term once by its factor, in place, and add them up, in the dtype of the sums.

    Example:
        >>> p = nn.Parameter(torch.zeros(2))
        >>> finish({"one": {p: torch.ones(2)}, "two": {p: torch.ones(2)}}, {"one": 0.5, "two": 1.0})[p]
        tensor([1.5000, 1.5000])
    """
    for name, factor in factors.items():
        bank = banks.get(name)
        if bank and (isinstance(factor, Tensor) or factor != 1.0):
            multiply([*bank.values()], factor)
    first, *others = banks.values() if banks else [{}]
    for bank in others:
        for parameter, value in bank.items():
            first[parameter] = first[parameter].add_(value) if parameter in first else value
    return first


def multiply(values: Sequence[Tensor], factor: Number) -> None:
    """Multiply in place, also by a scalar of one device where tensors are on several."""
    if values and is_shard(values[0]):  # faster than a DTensor
        values = [*map(local, values)]
    if isinstance(factor, Tensor) and any(value.device != factor.device for value in values):
        for value in values:
            value.mul_(factor.to(value.device))
    else:
        private.foreach_mul_(values, factor)


class InPlace:
    """Sums that autograd accumulates itself, in `.grad`, which is None at first: no copies, no hooks."""

    def __init__(self, parameters: Sequence[nn.Parameter], name: str = "") -> None:
        self._parameters, self._name = parameters, name
        self._awaited: Sequence[nn.Parameter] = parameters  # will get a first `.grad`
        self._sums: list[Tensor] = []  # added to in place, from their first micro-batch on
        self._versions: list[int] = []
        self._has_flowed = False

    def begin(self) -> None:
        """Begin the next micro-batch: nothing of it is accepted yet."""
        if self._has_flowed:
            if self._awaited:
                self._own_memory()
            self._versions = private.versions(self._sums)

    @property
    def has_accepted(self) -> bool:
        """Return True if anything of the current micro-batch has reached the sums."""
        awaited = any(parameter.grad is not None for parameter in self._awaited)
        return awaited or private.versions(self._sums) != self._versions

    def add(
        self, values: Mapping[str, Tensor], cotangents: Mapping[str, Tensor], unscale: float = 1.0
    ) -> None:
        """One backward: add J^T c of the scalar of each term, with its own cotangent c; `unscale` is 1."""
        self._has_flowed = True
        private.run_backward([*values.values()], [*map(cotangents.__getitem__, values)])

    def _own_memory(self) -> None:
        """Give each new `.grad` memory of its own, before anything is added to it in place.

        Autograd lets `.grad` of leaves that are views of one tensor share memory, or takes a cotangent's. The
        largest comes last: it is then alone, and keeps the memory.
        """
        made = [p for p in self._awaited if p.grad is not None]
        for parameter in sorted(made, key=Tensor.numel):
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if type(gradient) is not Tensor and is_shard(gradient):
                continue  # its parts do not overlap
            if gradient.is_conj() or gradient.is_neg():  # which torch's common operations do not know
                gradient = parameter.grad = gradient.resolve_conj().resolve_neg()
            if private.holders(gradient) > private.ALONE:
                parameter.grad = gradient.clone()
        self._sums += [p.grad for p in made if p.grad is not None]
        self._awaited = [p for p in self._awaited if p.grad is None]

    def parted(self) -> dict[str, Gradient]:
        """Return the sums so far, each in memory of its own."""
        if self._awaited:
            self._own_memory()
        return self.banks

    @property
    def banks(self) -> dict[str, Gradient]:
        """The sums so far as autograd left them: they may share memory, so do not change them."""
        return {self._name: {p: p.grad for p in self._parameters if p.grad is not None}}


class Apart:
    """Sums beside `.grad`: of another dtype, one per term, or looked at before they grow.

    The gradients of a micro-batch are held until its backward is over, looked at where that is asked for, and
    then added as a whole. Where they are larger than a bucket they are added bucket by bucket as autograd
    finishes them, and freed, so that no second set of gradients exists; then a failure may come when part of
    the micro-batch is accepted.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        dtype: torch.dtype | None,
        names: Sequence[str],
        is_looked_at: bool = False,
        is_whole: bool = True,
        tell: Callable[[Mapping[str, Mapping[nn.Parameter, Tensor]]], object] | None = None,
    ) -> None:
        self._parameters = parameters
        self._dtypes = {p: accumulation_dtype(p.dtype, dtype) for p in parameters}
        self.banks: dict[str, Gradient] = {name: {} for name in names}
        self._tell = tell
        self._at, self._unscale, self._in_backward = names[0], 1.0, False
        self._waiting: dict[str, dict[nn.Parameter, Tensor]] = {}
        self._look = Look() if is_looked_at else None
        is_small = is_looked_at and sum(p.nbytes for p in parameters) <= BUCKET
        self.is_whole = is_whole or is_small
        self._nbytes = 0
        self.has_accepted = False
        take = weakref.WeakMethod(self._take)  # weakly, so that sums which nobody holds are freed
        hooked = () if self.is_whole else parameters
        hooks = [p.register_post_accumulate_grad_hook(partial(_call, take)) for p in hooked]
        self._remove = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def begin(self) -> None:
        """Begin the next micro-batch: nothing of it is accepted yet."""
        self.has_accepted = False
        self._waiting, self._nbytes = {}, 0

    def add(
        self, values: Mapping[str, Tensor], cotangents: Mapping[str, Tensor], unscale: float = 1.0
    ) -> None:
        """One backward into the only bank, or one of each term into its own; all are added at the end.

        Gradients are multiplied by `unscale`, a power of two.

        Raises:
            NonFinite: some are not finite; they were not added.
        """
        self._unscale = unscale
        parts = [(self._at, [*values])] if len(self.banks) == 1 else [(name, [name]) for name in values]
        for index, (bank, names) in enumerate(parts, 1):
            self._at = bank
            self._backward(
                [values[name] for name in names],
                [cotangents[name] for name in names],
                retain_graph=index < len(parts),
            )
        self.commit([*values.values()])

    def commit(self, values: Sequence[Tensor] = ()) -> None:
        """Add what waits, after a look at it and at the values that it came from."""
        waiting, self._waiting, self._nbytes = self._waiting, {}, 0
        if self._look is not None:
            held = [one for bank in waiting.values() for one in bank.values()]
            if not self._look.are_finite([*held, *values]):
                raise NonFinite("gradient")
        if self._tell is not None:
            self._tell(waiting)
        for name, bank in waiting.items():
            self._add(name, bank)

    def parted(self) -> dict[str, Gradient]:
        """Return the sums so far."""
        return self.banks

    def take(self, other: "InPlace | Apart") -> None:
        """Merge the sums of one `add` into these. Their memory may become ours; no `.grad` is left."""
        if isinstance(other, Apart):
            other.close()
        self._unscale, is_in_place, bank = 1.0, isinstance(other, InPlace), self.banks[self._at]
        gradients = [*map(_gradient_of, self._parameters)] if is_in_place else []
        if not (gradients and _add_together(bank, self._parameters, gradients, 1.0)):
            for name, found in other.banks.items():
                self._add(name if name in self.banks else self._at, found)
        for parameter in self._parameters if is_in_place else ():
            parameter.grad = None

    def close(self) -> None:
        """Take the hooks off."""
        self._remove()

    def _backward(
        self, values: Sequence[Tensor], cotangents: Sequence[Tensor], *, retain_graph: bool = False
    ) -> None:
        self._in_backward = True
        try:
            private.run_backward(values, cotangents, retain_graph=retain_graph)
        except BaseException:
            for parameter in self._parameters:
                parameter.grad = None
            self._waiting = {}
            raise
        finally:
            self._in_backward = False
        if self.is_whole:
            bank = self._waiting.setdefault(self._at, {})
            for parameter in self._parameters:
                gradient = parameter.grad
                if gradient is not None:
                    parameter.grad = None
                    bank[parameter] = gradient

    def _take(self, parameter: Any) -> None:
        """Hold a finished gradient until a bucket is full."""
        gradient = parameter.grad
        if not self._in_backward or gradient is None:
            return
        parameter.grad = None
        self._waiting.setdefault(self._at, {})[parameter] = gradient
        self._nbytes += 0 if gradient.is_sparse else gradient.nbytes
        if self._look is None or self._nbytes > BUCKET:
            del gradient
            self.commit()

    def _add(self, name: str, bank: Mapping[nn.Parameter, Tensor]) -> None:
        """Add gradients at once; first comes what takes memory, so that a failure changes nothing."""
        sums = self.banks[name]
        if _add_together(sums, bank, [*bank.values()], self._unscale):
            self.has_accepted = True
            return
        fresh = {p: self._first(p, g) for p, g in bank.items() if p not in sums}
        later = [(p, g.resolve_conj()) for p, g in bank.items() if p in sums]
        self.has_accepted = self.has_accepted or bool(bank)
        plain = [(p, g) for p, g in later if _is_plain(sums[p]) and _is_plain(g) and g.dtype == sums[p].dtype]
        if plain:
            private.foreach_add_([sums[p] for p, _ in plain], [g for _, g in plain], alpha=self._unscale)
        done = {p for p, _ in plain}
        rest = [(p, g) for p, g in later if p not in done]
        for p, g in sorted(rest, key=lambda pair: pair[1].is_sparse):  # sparse ones last
            sums[p] = sums[p].add_(g, alpha=self._unscale)
        sums.update(fresh)

    def _first(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """Return the first sum of a parameter, in memory of its own."""
        dtype, gradient = self._dtypes[parameter], gradient.resolve_conj().resolve_neg()
        is_alone = gradient.layout is torch.strided and private.holders(gradient) <= private.ALONE
        if gradient.dtype == dtype and is_alone:
            return gradient if self._unscale == 1.0 else gradient.mul_(self._unscale)
        wide = torch.promote_types(gradient.dtype, dtype)  # without its scale it may fit the sums only so
        value = gradient.to(wide, copy=True)
        return (value if self._unscale == 1.0 else value.mul_(self._unscale)).to(dtype)


def _add_together(
    sums: Mapping[nn.Parameter, Tensor],
    parameters: Iterable[nn.Parameter],
    gradients: Sequence[Tensor | None],
    unscale: float,
) -> bool:
    """Add gradients in one go, if they are of the same parameters and kinds as the sums; whether so."""
    if len(sums) != len(gradients) or not all(map(is_, sums, parameters)):  # hashing parameters takes long
        return False
    if any(map(is_, gradients, repeat(None))):
        return False
    totals = [*sums.values()]
    kinds = [*map(_kind, totals)]
    if not _PLAIN.issuperset(kinds) or [*map(_kind, gradients)] != kinds:
        return False
    if totals:
        private.foreach_add_(totals, gradients, alpha=unscale)
    return True


_gradient_of = attrgetter("grad")
_kind = attrgetter("dtype", "layout")


# What torch adds in one go, whatever its strides. Complex tensors may be conjugated lazily.
_PLAIN = frozenset(
    (dtype, torch.strided) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj()


def is_own_hook(hook: object) -> bool:
    """Return True for a hook of sums that are held apart."""
    return isinstance(hook, partial) and hook.func is _call


def _call(method: "weakref.WeakMethod[Callable[[Tensor], None]]", parameter: Tensor) -> None:
    bound = method()
    if bound is not None:
        bound(parameter)


def clear(parameters: Iterable[nn.Parameter]) -> None:
    """Drop the gradients of these parameters."""
    for parameter in parameters:
        parameter.grad = None
