"""Padding positions of a batch, found by masks, padding tokens or ignored labels."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import Padding, tree
from anybatch.losses.inputs import TARGET_KEYS

IGNORED = -100  # ignored label of torch and transformers
_BY_PLACE = re.compile("ids|token|mask|label|target|position|embed|segment")  # one entry per position
_BESIDE = re.compile("position|type|segment")  # integers that are no tokens
_PICTURES = re.compile("pixel|image|patch|vision|input_features")  # images or spectra
_Leaves = list[tuple[int, str, Tensor]]  # index, path in the nest, tensor


def find_paddings(batch: Any, model: nn.Module, keep: Sequence[str | int] = ()) -> Iterator[Padding]:
    """Yield the padding for each size that tensors of the batch have on their second axis.

    Sources are masks (an `attention_mask`, or a mask whose ones come first or last in every row), else the
    model's padding token, else labels of -100 if only targets have that size. A position whose label differs
    from those in padding is not padding. A row of padding only counts as full. Padding is at the start if
    every row has content in the last position. Columns in `keep` are neither trimmed nor read.
    """
    kept = {*map(repr, keep)}
    nest = tree.flatten(batch)
    is_pair = tree.is_sequence(batch) and len(batch) == 2
    leaves: _Leaves = [
        (at, path, leaf)
        for at, (path, leaf) in enumerate(zip(nest.paths, nest.leaves, strict=True))
        if tree.column(path) not in kept
    ]
    embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding)]
    named = getattr(getattr(model, "config", None), "pad_token_id", None)
    tokens = {one for one in [named, *[one.padding_idx for one in embeddings]] if isinstance(one, int)}
    for length in dict.fromkeys(
        leaf.shape[1] for _, _, leaf in leaves if leaf.dim() == 2 and leaf.shape[1] > 1
    ):
        alike = [one for one in leaves if one[2].dim() > 1 and one[2].shape[1] == length]
        targets = [one for one in alike if one[2].dim() == 2 and _is_of_target(one[1], is_pair)]
        found = _told(alike, targets, tokens)
        if found is None:
            continue
        source, content = found
        content = content | ~content.any(1, keepdim=True)
        for _, _, leaf in targets:
            if not _is_constant(leaf, content):
                content = content | (leaf != IGNORED).to(content.device)
        first, last = content.int().argmax(1), length - content.flip(1).int().argmax(1)
        is_left = bool((last == length).all() and (first > 0).any())
        valid = length - first if is_left else last
        axes = [(at, axis) for at, path, leaf in leaves for axis in _axes(path, leaf, length, content)]
        yield Padding(
            length=length, valid=tuple(valid.tolist()), source=source, axes=tuple(axes), is_left=is_left
        )


def _told(alike: _Leaves, targets: _Leaves, tokens: set[int]) -> tuple[str, Tensor] | None:
    flat = [one for one in alike if one[2].dim() == 2]
    others = [one for one in flat if one not in targets]
    masks = [(path, content) for _, path, leaf in others if (content := _by_mask(path, leaf)) is not None]
    if masks:
        return f"batch{masks[0][0]}", torch.stack([one.to(masks[0][1].device) for _, one in masks]).any(0)
    ids = [leaf for _, path, leaf in flat if _is_integer(leaf) and not _BESIDE.search(path.lower())]
    inputs = [leaf for _, _, leaf in others if any(leaf is one for one in ids)]
    for token in sorted(tokens) if inputs else ():
        # The union over all tensors: targets may be longer than inputs.
        content = torch.stack([(leaf != token) & (leaf != IGNORED) for leaf in ids]).any(0)
        if all(_has_inside(leaf, token) for leaf in inputs):
            continue  # an ordinary token: it occurs inside rows too
        return f"the model's padding token {token}", content
    beside = [one[1] for one in alike if one not in targets]  # decoder inputs are made of targets
    is_only = all("decoder" in path or _PICTURES.search(path.lower()) for path in beside)
    if targets and is_only and all(map(_is_integer, [leaf for _, _, leaf in targets])):
        return f"batch{targets[0][1]}", torch.stack([leaf != IGNORED for _, _, leaf in targets]).any(0)
    return None


def _by_mask(path: str, leaf: Tensor) -> Tensor | None:
    name = path.lower()
    is_named = "mask" in name or "pad" in name
    if not (is_named or leaf.dtype == torch.bool) or "global" in name:
        return None
    if leaf.dtype != torch.bool and not ((leaf == 0) | (leaf == 1)).all():
        return None
    ones = leaf.bool()
    if "attention_mask" in name:
        return ones
    if "pad" in name and ones[:, 0].all() and not ones[:, -1].any():
        ones = ~ones  # torch's convention, if both are possible
    for edge, sign in ((0, 1), (-1, -1)):  # padding goes to the end, or begins at the start
        valid = ones if ones[:, edge].all() else ~ones
        if valid[:, edge].all() and (sign * valid.int().diff(dim=1) <= 0).all():
            return valid
    return None


def _has_inside(leaf: Tensor, token: int) -> bool:
    steps = (leaf != token).int().diff(dim=1)
    return not ((steps <= 0).all() or (steps >= 0).all())


def _axes(path: str, leaf: Tensor, length: int, content: Tensor) -> list[int]:
    axes = [axis for axis in range(1, leaf.dim()) if leaf.shape[axis] == length]
    name = path.lower()
    if leaf.dim() > 2 and (leaf.dtype == torch.bool or "mask" in name):
        return axes
    if axes[:1] != [1]:
        return []
    # The number of features, or of image patches, may equal the length by chance.
    is_sequence = leaf.dim() == 3 and not _PICTURES.search(name)
    return [1] if is_sequence or _BY_PLACE.search(name) or _is_constant(leaf, content) else []


def _is_constant(leaf: Tensor, content: Tensor) -> bool:
    filled = leaf[~content.to(leaf.device)]
    return bool((filled == filled[:1]).all())


def _is_integer(leaf: Tensor) -> bool:
    return leaf.dtype in (torch.int64, torch.int32)


def _is_of_target(path: str, is_pair: bool) -> bool:
    if "pad" in path.lower():
        return False
    last = path.lower().strip("[]'.").rpartition("['")[2]
    return (
        last in TARGET_KEYS
        or any(word in last for word in ("target", "label", "loss"))
        or (is_pair and path.startswith("[1]"))
    )
