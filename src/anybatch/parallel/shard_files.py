"""Checkpoints of sharded models: a folder that all ranks write, and any other number of ranks loads."""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch.core import CheckpointError
from anybatch.parallel.group import Group, exchange, rank, ranks

FORMAT = "shards 1"
_WHOLE = "whole.json"
_FOLDER = re.compile(r"step-(\d+)\+*")  # with a + for each time that this step was saved again


def save(
    path: str | Path,
    step: int,
    *,
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    schedulers: Sequence[LRScheduler] = (),
    progress: Mapping[str, Any] | None = None,
    keep: int = 2,
    group: Group = None,
    write: Callable[[Path], object] | None = None,
) -> None:
    """Write `path/step-N`: each rank writes its shards, with `torch.distributed.checkpoint`.

    All ranks call it. A folder is complete once it has its name: it is written under another one, with a
    SHA-256 of each file, and renamed when all ranks are done.

    Args:
        path: the folder of the run, which all ranks see.
        step: the number N of updates made.
        model: a sharded model, or a plain one.
        optimizers: optimizers, in the order for `restore`.
        schedulers: schedulers whose state JSON can hold, in the order for `restore`.
        progress: nested numbers, strings, lists and dicts with names, as JSON; those of rank 0.
        keep: how many folders stay, at least 1. Those of later steps, which will be repeated, do not.
        group: the ranks; None for the default process group.
        write: writes further files; called on rank 0 with the new folder.

    Raises:
        CheckpointError: a rank cannot write. Earlier folders are unchanged.
        RankError: a rank has ended.

    Example:
        >>> from tempfile import mkdtemp
        >>> model, folder = nn.Linear(3, 2), mkdtemp()
        >>> save(folder, 10, model=model, progress={"epoch": 1})
        >>> restore(folder, model=model)
        {'epoch': 1}
    """
    root, name = Path(path), f"step-{step:08}"
    writing, is_first = root / f".{name}.tmp", rank(group) == 0

    def prepare() -> None:
        for stray in root.glob(".step-*.tmp"):  # left by killed processes
            shutil.rmtree(stray)
        writing.mkdir(parents=True)

    def finish() -> None:
        if write is not None:
            write(writing)
        digests = {one.name: _digest(one) for one in sorted(writing.iterdir())}
        with (writing / _WHOLE).open("w") as file:
            json.dump({**document, "files": digests}, file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        same = [one.name for one in _folders(root) if one.name.rstrip("+") == name]
        made = root / (f"{same[0]}+" if same else name)
        os.replace(writing, made)
        earlier = [one for one in _folders(root) if one.name < name]
        for old in {*_folders(root)} - {made, *earlier[: keep - 1]}:
            shutil.rmtree(old, ignore_errors=True)

    _together(prepare, is_first, group)
    state, fresh = _state(model, optimizers)
    document = {
        "format": FORMAT,
        "progress": dict(progress or {}),
        "schedulers": [one.state_dict() for one in schedulers],
        "optimizers": [type(one).__name__ for one in optimizers],
        "fresh": fresh,
    }
    _together(lambda: save_shards(state, checkpoint_id=writing, process_group=group), True, group)
    _together(finish, is_first, group)


def restore(
    path: str | Path,
    *,
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    schedulers: Sequence[LRScheduler] = (),
    group: Group = None,
    read: Callable[[Path], object] | None = None,
) -> dict[str, Any]:
    """Load the newest intact folder of `save` into a model, optimizers and schedulers; return `progress`.

    All ranks call it, and their number may differ from that of `save`; the model may also be unsharded. Rank
    0 verifies every byte first. The metadata of torch.distributed.checkpoint is a pickle: load only folders
    that you wrote.

    Args:
        path: the folder of the run, or one of its folders `step-N`.
        model: a model with the same parameters and buffers.
        optimizers: optimizers of the same classes and groups; empty to leave them out.
        schedulers: schedulers as they were saved; empty to leave them out.
        group: the ranks; None for the default process group.
        read: reads further files; called on each rank with the folder, before anything is changed.

    Raises:
        CheckpointError: there is no intact folder, or it is of another model. Then nothing was changed.
    """
    found = list[Path]()
    _together(lambda: found.append(_newest(Path(path))), rank(group) == 0, group)
    if ranks(group) > 1:
        names = [one["name"] for one in exchange({"name": found[0].name if found else ""}, group)]
        found = [Path(path) if Path(path).name == names[0] else Path(path) / names[0]]
    folder = found[0]
    made = json.loads((folder / _WHOLE).read_text())
    if schedulers and len(schedulers) != len(made["schedulers"]):
        raise CheckpointError(
            f"{folder}: expected {len(made['schedulers'])} schedulers, as they were saved, got "
            f"{len(schedulers)}. Make the same ones, or leave them out."
        )
    state, _ = _state(model, optimizers)
    _check(folder, state["model"], made["optimizers"], [type(one).__name__ for one in optimizers])
    if not optimizers:
        del state["optimizers"]
    if read is not None:
        _together(lambda: read(folder), True, group)
    _together(lambda: load(state, checkpoint_id=folder, process_group=group), True, group)
    options = StateDictOptions(strict=True)
    if optimizers:
        set_optimizer_state_dict(model, optimizers, state["optimizers"], options=options)
    set_model_state_dict(model, state["model"], options=options)
    for one, is_fresh in zip(optimizers, made["fresh"], strict=False):
        if is_fresh:
            one.state.clear()
    for one, saved in zip(schedulers, made["schedulers"], strict=False):
        one.load_state_dict(saved)
    return made["progress"]


def whole(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a sharded model, gathered to the host of rank 0; all ranks call it."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def is_run(path: Path) -> bool:
    """Return True if there is a folder of `save` in a folder, or it is one."""
    return os.path.isdir(path) and bool(_folders(path))


def _state(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[dict[str, Any], list[bool]]:
    """Return the tensors of this rank, and which optimizers have no state yet: torch makes some for these."""
    fresh = [not one.state for one in optimizers]
    model_state, optimizer_state = get_state_dict(model, optimizers)
    for one, is_fresh in zip(optimizers, fresh, strict=True):
        if is_fresh:
            one.state.clear()
    return {"model": model_state, "optimizers": optimizer_state}, fresh


def _check(folder: Path, model: Mapping[str, Any], there: Sequence[str], here: Sequence[str]) -> None:
    """Raise CheckpointError for a checkpoint of another model or other optimizers."""
    saved: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    forms = {name: tuple(one.size) for name, one in saved.items() if name.startswith("model.")}
    own = {f"model.{name}": tuple(one.shape) for name, one in model.items()}
    if odd := sorted(name for name in forms.keys() | own.keys() if forms.get(name) != own.get(name)):
        name = odd[0]
        raise CheckpointError(
            f"{folder}: expected a checkpoint of this model, got another's: {name.removeprefix('model.')} is "
            f"{forms.get(name, 'missing')} there and {own.get(name, 'missing')} here ({len(odd)} differ). "
            "Build it as it was when the checkpoint was written."
        )
    if here and here != there:
        raise CheckpointError(
            f"{folder}: expected optimizers {there}, as they were saved, got {here}. Make the same ones, or "
            "leave them out."
        )


def _folders(root: Path) -> list[Path]:
    """Return the complete folders, the newest first; or the folder itself, if it is one of them."""
    if (root / _WHOLE).is_file():
        return [root]
    found = [one for one in root.glob("step-*") if _FOLDER.fullmatch(one.name)]
    return sorted(found, reverse=True)


def _newest(root: Path) -> Path:
    errors = [f"{root}: expected a folder step-N with a checkpoint, got none. Check the path."]
    for folder in _folders(root):
        try:
            made = json.loads((folder / _WHOLE).read_text())
            files = {one.name: _digest(one) for one in folder.iterdir() if one.name != _WHOLE}
            if (made["format"], made["files"]) == (FORMAT, files):
                if errors[1:]:
                    warnings.warn(f"{errors[1]} Going on from {folder} instead.", stacklevel=2)
                return folder
            odd = [name for name in made["files"] if files.get(name) != made["files"][name]]
            reason = f"others in {odd[:3]}"
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        errors.append(f"{folder}: expected the files that were saved, got {reason}.")
    raise CheckpointError(errors[-1])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _together(work: Callable[[], object], is_mine: bool, group: Group) -> None:
    """Do some work on this rank, and raise on all ranks if it fails on one."""
    failed: Exception | None = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)  # one process
            if is_mine:
                work()
    except Exception as error:
        failed = error
    said = {"failed": type(failed).__name__ if failed else "", "said": str(failed)[:300]}
    told = exchange(said, group) if ranks(group) > 1 else []
    if isinstance(failed, CheckpointError):
        raise failed
    if failed is not None:
        raise CheckpointError(
            f"Expected a checkpoint that can be written and read, got {type(failed).__name__}: {failed}. "
            "Earlier checkpoints are unchanged."
        ) from failed
    for number, one in enumerate(told):
        if one["failed"]:
            raise CheckpointError(
                f"Expected all ranks to finish a checkpoint, got {one['failed']} on rank {number}: "
                f"{one['said']}"
            )
