"""Checkpoints: folders of safetensors files, one of each rank that writes, and one JSON; never unpickled."""

import copy
import hashlib
import json
import os
import re
import shutil
import stat
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, equal, float32, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch.core import SHORT_DTYPES, CheckpointError, check_whole, is_shard, torch_private as private
from anybatch.parallel import stored
from anybatch.parallel.group import Group, exchange, rank, ranks
from anybatch.parallel.stored import Packer, parse_json, unpack
from anybatch.parallel.wrappers import is_sharded
from anybatch.precision import Masters

FORMAT, INDEX, BEST = "checkpoint 2", "checkpoint.json", "best"
_FOLDER = re.compile(r"step-(\d+)(?:\+(\d+))?")  # numbered where a step was saved again
_FILE = re.compile(r"rank-\d+\.safetensors")
_PARTS = ("model", "loss", "optimizers", "schedulers", "progress", "random")
_DAMAGE = OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, SafetensorError
_NO_MASTERS = Masters()


class Checkpoint:
    """A verified checkpoint; see `load`. Its parts are read to the CPU when they are first used."""

    path: Path  # the folder `step-N`
    model: dict[str, Any]  # state dict, with float32 master weights instead of 16-bit weights
    loss: dict[str, Any]  # state dict, empty if the loss is no module
    optimizers: list[tuple[str, dict[str, Any], list[list[str]]]]  # class, state dict, names in each group
    schedulers: list[tuple[str, dict[str, Any], list[list[str]]]]  # class, state dict, nothing
    progress: dict[str, Any]
    random: dict[str, Any]

    def __init__(self, path: Path, *, is_hashed: bool) -> None:
        self.path = path
        try:
            index = parse_json(_regular(path / INDEX).read_bytes())
            digest = index.pop("sha256")
            if (index["format"], _digest(index)) != (FORMAT, digest):
                raise ValueError(f"the format {index['format']!r}, or a {INDEX} whose SHA-256 differs")
            files: dict[str, str] = index["files"]
            for name, expected in files.items():
                if not _FILE.fullmatch(name):
                    raise ValueError(f"a file named {name!r}")
                with _regular(path / name).open("rb") as file:
                    if is_hashed and hashlib.file_digest(file, "sha256").hexdigest() != expected:
                        raise ValueError(f"other bytes in {name}: their SHA-256 differs")
            forms = {name: stored.forms_in(path / name) for name in files}
            self.tensors = {
                key: stored.Stored(key, path, forms, **one) for key, one in index["tensors"].items()
            }
            self.packed: dict[str, Any] = index["document"]
            if self.packed.keys() != {*_PARTS}:
                raise ValueError(f"the parts {sorted(self.packed)}")
            unpack(self.packed, self.tensors.__getitem__)  # raises for what `save` does not write
        except _DAMAGE as error:
            raise CheckpointError(
                f"{path}: expected what `save` wrote, got {type(error).__name__}: {error}. It is truncated, "
                "damaged or of another program; use an earlier checkpoint."
            ) from None

    def __getattr__(self, name: str) -> Any:
        if name not in _PARTS:
            raise AttributeError(name)
        vars(self)[name] = found = self.read(name)
        return found

    def read(self, part: str, likes: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """Read a part once more; for DTensors in `likes`, by key or its start, only this rank's slices.

        The slices of weights are local tensors on the CPU, those of optimizers DTensors.
        """

        def read(key: str) -> Any:
            like = likes.get(key, likes.get(key.rpartition("/")[0]))
            return self.tensors[key].read(like, is_local=part != "optimizers")

        try:
            return unpack(self.packed[part], cache(read))  # tied tensors are one
        except _DAMAGE as error:
            raise CheckpointError(
                f"{self.path}: expected the files that were verified, got {type(error).__name__}: {error}. "
                "Leave them in place until they are read."
            ) from error


def save(
    path: str | Path,
    step: int,
    *,
    model: nn.Module,
    loss: nn.Module | None = None,
    optimizers: Sequence[Optimizer] = (),
    schedulers: Sequence[LRScheduler] = (),
    masters: Masters = _NO_MASTERS,
    progress: Mapping[str, Any] | None = None,
    random: Mapping[str, Any] | None = None,
    keep: int = 1,
    group: Group = None,
) -> Path:
    """Write the folder `path/step-N` and return it; the last complete one stays until this one is complete.

    It is written under another name, synced, and renamed. Of a model with `fully_shard` all ranks call this,
    and each writes its slices; of another one a single rank does. Shared tensors (tied weights) are written
    once. Values go into `checkpoint.json`, with a SHA-256 of it and of each file.

    Raises:
        CheckpointError: a value cannot be written without pickle, or a rank cannot write. Earlier folders are
            unchanged.
        RankError: a rank has ended.
    """
    check_whole("step", step, least=0)
    check_whole("keep", keep, least=0)
    root, packer, modules, me = Path(path), Packer(), _modules(model, loss), rank()
    is_many, writing = is_sharded(model), root / f".step-{step:08}.tmp"
    members = dist.get_process_group_ranks(group) if is_many else [me]
    together, is_first = partial(_together, group=group, is_many=is_many), me == members[0]
    try:
        with together(root):
            values: dict[str, Any] = {
                part: _plain(masters.state_dict(module)) for part, module in modules.items()
            }
            values |= {"progress": dict(progress or {}), "random": dict(random or {})}
            for what, several in (("optimizers", optimizers), ("schedulers", schedulers)):
                values[what] = [
                    (type(one).__name__, one.state_dict(), _parameter_names(modules, one)) for one in several
                ]
            document = {part: packer.pack(values.get(part, {}), part) for part in _PARTS}
            cuts = {key: stored.slices_of(value, members[0]) for key, value in packer.tensors.items()}
            if others := {one for _, slices, _ in cuts.values() for one in slices} - {*members}:
                raise CheckpointError(
                    f"{path}: expected a model with fully_shard, or whole tensors on this rank, got slices "
                    f"on the ranks {sorted(others)}. Save it with torch.distributed.checkpoint."
                )
            if is_first:
                root.mkdir(parents=True, exist_ok=True)
                for stray in root.glob(".step-*.tmp"):  # left by killed processes
                    shutil.rmtree(stray)
                writing.mkdir()
        mine = writing / _file(me)
        with together(mine) as digests:
            own = {key: value for key, value in packer.tensors.items() if me in cuts[key][1]}
            digests.append(stored.write_tensors(mine, own))
        with together(root) as names:
            if is_first:
                index = {
                    "format": FORMAT,
                    "files": {_file(member): one for member, one in zip(members, digests, strict=True)},
                    "tensors": {
                        key: {
                            "dtype": str(packer.tensors[key].dtype).removeprefix("torch."),
                            "shape": [*packer.tensors[key].shape],
                            "dim": dim,
                            "slices": [(_file(member), *place) for member, place in slices.items()],
                        }
                        for key, (dim, slices, _) in cuts.items()
                    },
                    "document": document,
                }
                names.append(_finish(writing, index, step, keep))
        return root / names[0]
    finally:
        if is_first:
            shutil.rmtree(writing, ignore_errors=True)


def _finish(writing: Path, index: Mapping[str, Any], step: int, keep: int) -> str:
    """Write the index, rename the folder and delete others; return its name."""
    with (writing / INDEX).open("wb") as file:
        file.write(json.dumps({**index, "sha256": _digest(index)}, allow_nan=False).encode())
        stored.sync(file)
    stored.sync_folder(writing)
    root = writing.parent
    there = folders(root)
    again = [_order(one)[1] + 1 for one in there if _order(one)[0] == step]
    name = f"step-{step:08}" + (f"+{again[0]}" if again else "")
    os.replace(writing, root / name)
    stored.sync_folder(root)
    earlier = [one for one in there if _order(one)[0] < step]
    for old in {*there} - {*earlier[: max(keep, 1) - 1]}:
        shutil.rmtree(old, ignore_errors=True)
    return name


def load(path: str | Path, *, is_many: bool = False, group: Group = None) -> Checkpoint:
    """Find the newest intact checkpoint of a folder; every byte is verified.

    Raises:
        CheckpointError: there is no intact checkpoint. A warning tells if it is not the last one.
    """
    root, found = Path(path), None
    with _together(root, group, is_many=is_many) as names:
        if not is_many or rank(group) == 0:
            found = _newest(root)
            names.append(str(found.path.relative_to(root)))
    return found or Checkpoint(root / names[0], is_hashed=False)


def restore(
    checkpoint: Checkpoint,
    *,
    model: nn.Module,
    loss: nn.Module | None = None,
    optimizers: Sequence[Optimizer] = (),
    schedulers: Sequence[LRScheduler] = (),
    masters: Masters = _NO_MASTERS,
    group: Group = None,
) -> None:
    """Load a checkpoint into a model, optimizers and schedulers; everything is checked and read first.

    Any number of ranks loads what any number wrote, with `fully_shard` or without; each reads the slices that
    it needs. 16-bit weights are float32 in a checkpoint, so a float32 model can load them too. Without
    optimizers other 16-bit tensors may also be float32 in the model, which is exact.

    Raises:
        CheckpointError: the checkpoint is of another model, optimizer or scheduler; nothing was changed.
    """
    modules = _modules(model, loss)
    with _together(checkpoint.path, group, is_many=is_sharded(model)):
        _check(checkpoint, modules, optimizers, schedulers, masters)
        likes: dict[str, Any] = {
            f"{part}/{private.plain_name(name)}": value
            for part, module in modules.items()
            for name, value in module.state_dict().items()
        }
        for number, optimizer in enumerate(optimizers):
            parameters = chain(*(group["params"] for group in optimizer.param_groups))
            likes |= {f"optimizers/{number}/1/state/{at}": one for at, one in enumerate(parameters)}
        found: dict[str, Any] = {part: checkpoint.read(part, likes) for part in modules}
        found["optimizers"] = checkpoint.read("optimizers", likes) if optimizers else []
        found["schedulers"] = checkpoint.read("schedulers") if schedulers else []
    # load_state_dict may still refuse a state; then everything is put back.
    undo: list[Callable[[], object]] = [
        partial(one.__setstate__, {"state": one.state, "param_groups": one.param_groups})
        for one in optimizers
    ]
    undo += [partial(one.load_state_dict, copy.deepcopy(one.state_dict())) for one in schedulers]
    try:
        for (_, state, _), scheduler in zip(found["schedulers"], schedulers, strict=True):
            scheduler.load_state_dict(state)
        for (_, state, _), optimizer in zip(found["optimizers"], optimizers, strict=True):
            _load_optimizer(optimizer, state)
        for part, module in reversed(modules.items()):
            weights = module.state_dict()
            for name, value in weights.items():
                saved = found[part][private.plain_name(name)]
                if is_shard(value):  # in place: there may be no room for more on the device
                    private.local(value).copy_(saved)
                else:
                    weights[name] = saved
            masters.load_state_dict(module, weights)
    except Exception as error:
        for put_back in undo:
            put_back()
        raise CheckpointError(
            f"{checkpoint.path}: expected a state that the model, optimizers and schedulers take, got "
            f"{type(error).__name__}: {error}. Make them as they were when the checkpoint was written."
        ) from error


def folders(root: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first; or the folder itself, if it is one."""
    if os.path.isfile(root / INDEX):  # Path.is_file() raises on names that are too long
        return [root]
    found = root.glob("step-*") if os.path.isdir(root) else ()
    return sorted(filter(_order, found), key=_order, reverse=True)


def has_run(root: Path) -> bool:
    """Return True if a folder has checkpoints, also those that only earlier versions read."""
    return bool(folders(root) or folders(root / BEST)) or _is_old(root)


def _order(folder: Path) -> tuple[int, ...]:
    found = _FOLDER.fullmatch(folder.name)
    return tuple(int(one or 0) for one in found.groups()) if found else ()


def _is_old(path: Path) -> bool:
    return os.path.isfile(path) or any(
        os.path.exists(path / name) for name in ("last.safetensors", "whole.json")
    )


def _newest(root: Path) -> Checkpoint:
    reason = f"{root}: expected a checkpoint, got no folder with one. Check the path."
    if _is_old(root):
        reason = (
            f"{root}: expected a checkpoint, which is a folder, got a file, or those of anybatch 0.2, which "
            "only that version reads (pickled files are never opened). Finish the run with it."
        )
    errors: list[CheckpointError] = []
    for folder in [*folders(root), *folders(root / BEST)]:
        try:
            found = Checkpoint(folder, is_hashed=True)
        except CheckpointError as error:
            errors.append(error)
            continue
        if errors:
            warnings.warn(f"{errors[0]} Going on from {folder} instead.", stacklevel=3)
        return found
    raise errors[0] if errors else CheckpointError(reason)


def _regular(path: Path) -> Path:
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise ValueError(f"{path.name}, which is a link or no file")
    return path


def _file(member: int) -> str:
    return f"rank-{member}.safetensors"


def _digest(index: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, allow_nan=False).encode()).hexdigest()


@contextmanager
def _together(path: Path, group: Group, *, is_many: bool) -> Generator[list[str]]:
    """Raise on all ranks if the block fails on one; give the text that each adds to the list to all."""
    texts, failed = list[str](), None
    try:
        yield texts
    except OSError as error:
        where = f" on rank {rank()}" if is_many else ""
        failed = CheckpointError(
            f"{error.filename or path}: expected a checkpoint that can be written and read, got{where}: "
            f"{error.strerror or error}. Make room, or choose another folder; earlier ones are unchanged."
        )
        failed.__cause__ = error
    except Exception as error:
        failed = error
    said = {"failed": type(failed).__name__ if failed else "", "said": str(failed)[:300], "texts": texts}
    heard = exchange(said, group) if is_many and ranks(group) > 1 else [said]
    if failed is not None:
        raise failed
    for number, one in enumerate(heard):
        if one.get("failed"):
            raise CheckpointError(
                f"Expected all ranks to finish a checkpoint, got {one['failed']} on rank {number}: "
                f"{one['said']}"
            )
    texts[:] = [text for one in heard for text in one.get("texts", ())]


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    optimizer.load_state_dict(dict(state))  # casts the state to the dtype of the parameters, undone below
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            own: dict[str, Any] = optimizer.state.get(parameter, {})
            for name, value in state["state"].get(index, {}).items():
                if isinstance(value, Tensor) and isinstance(own.get(name), Tensor):
                    own[name] = own[name] if own[name].dtype == value.dtype else value.to(own[name].device)


def _check(
    checkpoint: Checkpoint,
    modules: Mapping[str, nn.Module],
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LRScheduler],
    masters: Masters,
) -> None:
    """Raise CheckpointError if a checkpoint is of another model, loss, optimizer or scheduler."""
    there: dict[str, str] = {}
    here: dict[str, str] = {}
    ties: list[str] = []
    for part, module in modules.items():
        state = unpack(checkpoint.packed[part], checkpoint.tensors.__getitem__)
        own = _plain(masters.state_dict(module))
        there |= _forms(part, state, {} if optimizers else own)
        here |= _forms(part, own, {})
        names: dict[int, str] = {}
        for name, value in _plain(module.state_dict(keep_vars=True)).items():
            first = names.setdefault(id(value), name) if isinstance(value, Tensor) else name
            one, other = state.get(first), state.get(name)
            if one and other and one is not other and not equal(one.read(), other.read()):
                ties.append(f"{first} and {name}: two values there, one tied parameter here")
    for what, mine in (("optimizers", optimizers), ("schedulers", schedulers)):
        if mine:
            there |= _labels(what, [(kind, names) for kind, _, names in unpack(checkpoint.packed[what], str)])
            here |= _labels(what, [(type(one).__name__, _parameter_names(modules, one)) for one in mine])
    odd = ties + [
        f"{name}: {there.get(name, 'nothing')} there, {here.get(name, 'nothing')} here"
        for name in there | here
        if there.get(name) != here.get(name)
    ]
    if odd:
        shown = "; ".join(odd[:3]) + f"; and {len(odd) - 3} more" * (len(odd) > 3)
        raise CheckpointError(
            f"{checkpoint.path}: expected a checkpoint of this {type(modules['model']).__name__}, its "
            f"optimizers and schedulers, got another's: {shown}. Make them as they were when it was written."
        )


def _modules(model: nn.Module, loss: nn.Module | None) -> dict[str, nn.Module]:
    return {"model": model} if loss is None else {"model": model, "loss": loss}


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    return {private.plain_name(name): value for name, value in state.items()}


def _forms(part: str, state: Mapping[str, Any], wide: Mapping[str, Any]) -> dict[str, str]:
    """Return dtype and shape of each tensor; 16-bit tensors that are float32 in `wide` count as float32."""
    forms: dict[str, str] = {}
    for name, value in state.items():
        form = "a value"
        if isinstance(value, Tensor | stored.Stored):
            is_wide = value.dtype in SHORT_DTYPES and getattr(wide.get(name), "dtype", None) == float32
            form = f"{float32 if is_wide else value.dtype} {tuple(value.shape)}".removeprefix("torch.")
        forms[f"{'loss ' * (part == 'loss')}{name}"] = form
    return forms


def _labels(what: str, found: Iterable[tuple[str, list[list[str]]]]) -> dict[str, str]:
    """Return the class of each optimizer or scheduler, and the name of each parameter in its groups."""
    labels: dict[str, str] = {}
    for number, (kind, groups) in enumerate(found):
        labels[f"{what[:-1]} {number}"] = kind
        for place, names in enumerate(groups):
            start = f"{what[:-1]} {number}, group {place}, parameter"
            labels |= {f"{start} {at}": name for at, name in enumerate(names)}
    return labels


def _parameter_names(modules: Mapping[str, nn.Module], optimizer: Any) -> list[list[str]]:
    names: dict[int, str] = {}
    for part, module in modules.items():
        for name, parameter in module.named_parameters(prefix="loss" * (part == "loss")):
            names.setdefault(id(parameter), private.plain_name(name))
    groups = [group["params"] for group in getattr(optimizer, "param_groups", ())]
    return [[names.get(id(one), "not the model's") for one in group] for group in groups]
