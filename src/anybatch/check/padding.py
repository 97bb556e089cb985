"""Padding: where it is, rows without it, and the module that looks at it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from anybatch.check.passes import Calls, Key
from anybatch.check.rows import Cut, Part, is_close, shorten
from anybatch.core import tree
from anybatch.losses import TARGET_KEYS

Places = tuple[int, int]  # of a padded row, and valid ones of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Places at the end of rows, or at their start, that only fill them up."""

    length: int  # of the padded rows
    valid: tuple[int, ...]  # how many places of each row are not filled up
    source: str  # what says so, in words
    is_left: bool = False  # whether they are at the start

    @property
    def is_masked(self) -> bool:
        """Whether a mask tells the model where padding is; otherwise the padding itself does."""
        return self.source.startswith("batch")


def find_padding(batch: Any, model: nn.Module) -> Padding | None:
    """Places that are filled up, told by a mask that ends every row, or by the model's padding token."""
    nest = tree.flatten(batch)
    is_pair = isinstance(batch, tuple | list) and len(cast("Sequence[Any]", batch)) == 2
    for path, leaf in zip(nest.paths, nest.leaves, strict=True):
        named = any(word in path.lower() for word in ("mask", "pad"))
        if _is_of_target(path, is_pair):
            continue
        if leaf.dim() == 2 and (named or leaf.dtype == torch.bool):
            valid = _valid_by_mask(leaf)
            if "attention" in path.lower() and (of_left := _valid_by_mask(leaf.flip(1), is_valid=True)):
                return Padding(length=leaf.shape[1], valid=of_left, source=f"batch{path}", is_left=True)
            if valid is not None:
                return Padding(length=leaf.shape[1], valid=valid, source=f"batch{path}")
    for token in sorted(_padding_tokens(model)):
        found = _valid_by_token(nest.leaves, token)
        if found is not None:
            return Padding(length=found[0], valid=found[1], source=f"the model's padding token {token}")
    return None


def trimmed(whole: Cut, padding: Padding, micro_batch: int) -> Cut:
    """The same rows, where each micro-batch is no longer than its longest row."""

    def collate(rows: list[int]) -> Any:
        length = max(1, *[padding.valid[row] for row in rows])
        return tree.map_leaves(lambda leaf: _shorten(leaf[rows], padding, length), whole.data)

    rows = list(range(len(whole.part.rows)))
    return Cut(data=rows, micro_batch=micro_batch, part=whole.part, collate=collate)


def refilled(whole: Cut, padding: Padding, micro_batch: int) -> Cut:
    """The same rows with other content in padded places; masks and targets stay."""
    nest = tree.flatten(whole.data)
    filled = torch.arange(padding.length) >= torch.tensor(padding.valid)[:, None]
    filled = filled.flip(1) if padding.is_left else filled

    def refill(path: str, leaf: Tensor) -> Tensor:
        named = any(word in path.lower() for word in ("mask", "pad", *TARGET_KEYS[:-1]))
        if leaf.dim() < 2 or leaf.shape[1] != padding.length or named or leaf.dtype == torch.bool:
            return leaf
        there = filled.to(leaf.device).view(*filled.shape, *[1] * (leaf.dim() - 2))
        word = leaf[:, -1:] if padding.is_left else leaf[:, :1]
        return torch.where(there, word + 1 if leaf.is_floating_point() else word, leaf)

    leaves = [refill(path, leaf) for path, leaf in zip(nest.paths, nest.leaves, strict=True)]
    return replace(whole, data=nest.build(iter(leaves)), micro_batch=micro_batch)


def first_difference(
    parts: Iterable[Part],
    padded: Calls,
    short: Calls,
    tolerance: float,
    padding: Padding | None = None,
    *,
    is_left: bool = False,
) -> tuple[str, str] | None:
    """The first module that gets the same in valid places but returns other values, and the first in it."""
    for part in parts:
        places = None if padding is None else (padding.length, padding.valid[part.rows[0]])
        table, differing = short.table(part), set[Key]()
        for call in padded.table(part).values():  # those inside of a call come before it
            other = table.get(call.key)
            if other is None or _agree(call.outputs, other.outputs, tolerance, places, is_left) is not False:
                continue
            differing.add(call.key)
            if _agree(call.inputs, other.inputs, tolerance, places, is_left) is not False:
                return call.key[0], next(one.key[0] for one in call.flat() if one.key in differing)
    return None


def _agree(
    padded: Sequence[Tensor], short: Sequence[Tensor], tolerance: float, places: Places | None, is_left: bool
) -> bool | None:
    if len(padded) != len(short):
        return None
    found: list[bool] = []
    for a, b in zip(padded, short, strict=True):
        if places is not None:
            shape = [places[1] if size == places[0] and axis else size for axis, size in enumerate(b.shape)]
            b = cast("Tensor", shorten(b, shape, from_end=is_left))
        value = shorten(a, b.shape, from_end=is_left)
        if value is None:
            return None
        found.append(is_close(b, value, tolerance))
    return all(found)


def _is_of_target(path: str, is_pair: bool) -> bool:
    """Whether it is a target, or says which targets count: what goes in may be there all the same."""
    if "pad" in path.lower():
        return False
    last = path.lower().strip("[]'.").rpartition("['")[2]
    return (
        last in TARGET_KEYS
        or any(word in last for word in ("target", "label", "loss"))
        or (is_pair and path.startswith("[1]"))
    )


def _valid_by_mask(mask: Tensor, *, is_valid: bool = False) -> tuple[int, ...] | None:
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        return None
    valid = mask.bool() if is_valid or bool(mask[:, 0].bool().all()) else ~mask.bool()
    ends = bool((valid.int().diff(dim=1) <= 0).all())  # once filled up, filled up to the end
    return (
        tuple(valid.sum(1).tolist()) if ends and bool(valid[:, 0].all()) and not bool(valid.all()) else None
    )


def _valid_by_token(leaves: Sequence[Tensor], token: int) -> tuple[int, tuple[int, ...]] | None:
    for leaf in leaves:
        if leaf.dim() == 2 and leaf.dtype in (torch.int64, torch.int32) and leaf.shape[1] > 1:
            alike = [other for other in leaves if other.shape == leaf.shape and not other.is_floating_point()]
            # The longest that any of the leaves has there: targets may end later than what goes in.
            content = torch.stack([(other != token) & (other != -100) for other in alike]).any(0)
            places = torch.arange(1, leaf.shape[1] + 1, device=leaf.device)
            valid = (content * places).amax(1)
            own = ((leaf != token) * places).amax(1)
            if bool(((leaf == token) & (places < own[:, None])).any()):
                continue  # a word like others: it stands inside rows too
            if bool((valid < leaf.shape[1]).any()) and bool((leaf == token).any()):
                return leaf.shape[1], tuple(valid.tolist())
    return None


def _padding_tokens(model: nn.Module) -> set[int]:
    found = {
        module.padding_idx
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None
    }
    named = getattr(getattr(model, "config", None), "pad_token_id", None)
    return found | ({named} if isinstance(named, int) else set())


def _shorten(leaf: Tensor, padding: Padding, wanted: int) -> Tensor:
    """Along the first axis of that length after the rows; along all of them for a mask of pairs of places."""
    start = padding.length - wanted if padding.is_left else 0
    axes = [axis for axis in range(1, leaf.dim()) if leaf.shape[axis] == padding.length]
    for axis in axes if leaf.dim() > 3 or leaf.dtype == torch.bool else axes[:1]:
        leaf = leaf.narrow(axis, start, wanted)
    return leaf
