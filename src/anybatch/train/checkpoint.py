"""Checkpoints: one safetensors file, written atomically, verified on load, never unpickled."""

import copy
import errno
import glob
import json
import os
import shutil
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, contiguous_format, equal, float32, nn
from torch import save as torch_save
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch.core import SHORT_DTYPES, CheckpointError
from anybatch.core import torch_private as private
from anybatch.precision import Masters
from anybatch.train.serialize import Packer, digest_of, unpack

FORMAT = "checkpoint 1"
_NO_MASTERS = Masters()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """What a file held, verified, on the CPU; see `save`."""

    path: Path
    model: dict[str, Any]  # state dict, with float32 weights in the place of those stored short
    loss: dict[str, Any]  # state dict, empty where the loss is no module
    optimizers: list[tuple[str, dict[str, Any], list[list[str]]]]  # class, state dict, names in each group
    schedulers: list[tuple[str, dict[str, Any]]]  # class, state dict
    progress: dict[str, Any]
    random: dict[str, Any]


def save(
    path: str | Path,
    *,
    model: nn.Module,
    loss: nn.Module | None = None,
    optimizers: Sequence[Optimizer] = (),
    schedulers: Sequence[LRScheduler] = (),
    masters: Masters = _NO_MASTERS,
    progress: Mapping[str, Any] | None = None,
    random: Mapping[str, Any] | None = None,
) -> None:
    """Write everything needed to go on: the file is the old one or the new one, never half of it.

    Where the path is a symlink, its target is written.
    Tensors go into one safetensors file, shared ones (tied weights) once; all else goes into its header as
    JSON, together with a SHA-256 of both.

    Args:
        path: the file; its folder must exist.
        model: whose state dict is kept, as are those of optimizers and schedulers.
        loss: a loss that is a module, which may hold trained parameters.
        optimizers: in the order in which `restore` gets them.
        schedulers: likewise.
        masters: the float32 weights behind those that are stored short (`Step.masters`), kept in their place.
        progress: nested numbers, strings, tuples, lists, dicts and tensors of the caller's, such as the state
            of an open window (`Window.state`).
        random: the same, as `anybatch.state.rng.capture_process` gives it.

    Raises:
        CheckpointError: a value that cannot be written without pickle, or a file that cannot be written. An
            earlier file of that name stays as it was.

    Example:
        >>> import tempfile, torch
        >>> model = nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/a.safetensors", model=model, progress={"epoch": 3})
        ...     found = load(f"{folder}/a.safetensors")
        >>> found.progress, torch.equal(found.model["weight"], model.weight)
        ({'epoch': 3}, True)
    """
    path = Path(path)
    packer = Packer()
    document = {
        "model": packer.pack(_plain(masters.state_dict(model)), "model"),
        "loss": packer.pack({} if loss is None else _plain(masters.state_dict(loss)), "loss"),
        "optimizers": packer.pack(
            [(type(o).__name__, o.state_dict(), _parameter_names(model, loss, o)) for o in optimizers],
            "optimizers",
        ),
        "schedulers": packer.pack([(type(s).__name__, s.state_dict()) for s in schedulers], "schedulers"),
        "progress": packer.pack(dict(progress or {}), "progress"),
        "random": packer.pack(dict(random or {}), "random"),
    }
    text = json.dumps(document, allow_nan=False)
    metadata = {
        "format": "pt",
        "anybatch": FORMAT,
        "document": text,
        "sha256": digest_of(packer.tensors, text),
    }
    _write(path, lambda file: save_file(packer.tensors, file, metadata=metadata))


def _write(path: Path, write: Callable[[Path], object]) -> None:
    try:
        write_whole(path, write)
    except (SafetensorError, OSError, RuntimeError) as error:  # which torch.save raises
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{path}: expected a file that can be written, got: {reason}. Choose another place."
        ) from None


def export(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a plain state dict, for `load_state_dict` of the same model in any program.

    Args:
        state: the state dict.
        path: ends in .safetensors, or in .pt or .pth for `torch.load(path, weights_only=True)`.

    Raises:
        CheckpointError: another ending, values that are no tensors in a safetensors file, or a file that
            cannot be written. An earlier file of that name stays as it was.
    """
    path, state = Path(path), _plain(state)
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise CheckpointError(
            f"{path}: expected a file name that ends in .safetensors, .pt or .pth, got {path.suffix!r}. "
            "Choose the format by one of these."
        )
    is_safe = path.suffix == ".safetensors"
    plain: dict[str, Any] = dict(state)
    for name, value in state.items():
        if isinstance(value, Tensor):
            plain[name] = value.detach().cpu()
            if is_safe:  # which refuses shared memory
                plain[name] = plain[name].clone(memory_format=contiguous_format)
        elif is_safe:
            raise CheckpointError(
                f"{path}: expected a state dict of tensors, got {type(value).__name__} for {name!r}. "
                "Choose a name that ends in .pt."
            )
    _write(
        path, lambda file: save_file(plain, file, {"format": "pt"}) if is_safe else torch_save(plain, file)
    )


def load(path: str | Path) -> Checkpoint:
    """Read a file and verify every byte of it, before anything is made of it.

    Raises:
        CheckpointError: it is missing, truncated, changed, or no checkpoint of anybatch.
    """
    path = Path(path)
    if not os.path.isfile(path):  # Path.is_file() raises on names that are too long
        raise CheckpointError(f"{path}: expected a checkpoint, got no file of that name. Check the path.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            # Copies, because what safe_open gives is the file itself, which may change after it was verified.
            tensors: dict[str, Tensor] = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: expected a whole safetensors file, got one that cannot be read ({error}). It is "
            "truncated, damaged or of another kind (pickled files are never opened); use an earlier "
            "checkpoint."
        ) from None
    if metadata.get("anybatch") != FORMAT:
        found = metadata.get("anybatch", "a file of another program")
        raise CheckpointError(
            f"{path}: expected an anybatch {FORMAT!r}, got {found!r}. Load it with what wrote it."
        )
    text = metadata.get("document", "")
    if digest_of(tensors, text) != metadata.get("sha256"):
        raise CheckpointError(
            f"{path}: expected the bytes that were saved, got others: their SHA-256 differs. Use an "
            "earlier checkpoint."
        )
    try:
        values = {name: unpack(value, tensors) for name, value in json.loads(text).items()}
        return Checkpoint(path=path, **values)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected what `save` writes, got other values ({error}). Use an earlier checkpoint."
        ) from None


def restore(
    checkpoint: Checkpoint,
    *,
    model: nn.Module,
    loss: nn.Module | None = None,
    optimizers: Sequence[Optimizer] = (),
    schedulers: Sequence[LRScheduler] = (),
    masters: Masters = _NO_MASTERS,
) -> None:
    """Put a checkpoint into a model, optimizers and schedulers; everything is checked before any is touched.

    Weights that were stored short are float32 in a checkpoint, so it can be put into a float32 model too.
    Without optimizers other short tensors may be float32 in the model as well: no digit is lost.

    Args:
        checkpoint: what `load` gave; it stays as it is.
        model: of the same parameters and buffers: names, shapes and dtypes.
        loss: the same of a loss that is a module; None to leave it out.
        optimizers: of the same classes and parameter groups; none to leave them out.
        schedulers: of the same classes; none to leave them out.
        masters: `Step.masters`; filled as they were, and the short weights are rounded from them.

    Raises:
        CheckpointError: it is of another model, optimizer or scheduler; nothing was changed.
    """
    _check_module(checkpoint, checkpoint.model, model, masters, may_widen=not optimizers)
    if loss is not None:
        _check_module(checkpoint, checkpoint.loss, loss, masters, may_widen=not optimizers)
    if optimizers:
        _check_classes(checkpoint, "optimizers", [name for name, *_ in checkpoint.optimizers], optimizers)
        for (_, _, names), optimizer in zip(checkpoint.optimizers, optimizers, strict=True):
            _check_groups(checkpoint, names, _parameter_names(model, loss, optimizer), optimizer)
    if schedulers:
        _check_classes(checkpoint, "schedulers", [name for name, _ in checkpoint.schedulers], schedulers)
    # What a state dict must hold only its owner knows, so a refusal may still come; then all goes back.
    before = [(optimizer.state, optimizer.param_groups) for optimizer in optimizers]
    states = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
    try:
        # Copies, because optimizers take over the tensors they are given and write into them.
        for (_, state), scheduler in zip(checkpoint.schedulers, schedulers, strict=False):
            scheduler.load_state_dict(copy.deepcopy(state))
        for (_, state, _), optimizer in zip(checkpoint.optimizers, optimizers, strict=False):
            _load_optimizer(optimizer, copy.deepcopy(state))
        if loss is not None:
            masters.load_state_dict(loss, _named_as_in(loss, checkpoint.loss))
        masters.load_state_dict(model, _named_as_in(model, checkpoint.model))
    except Exception as error:
        for optimizer, (state, groups) in zip(optimizers, before, strict=True):
            optimizer.__setstate__({"state": state, "param_groups": groups})
        for scheduler, state in zip(schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        raise CheckpointError(
            f"{checkpoint.path}: expected a state that the model, optimizers and schedulers take, got "
            f"{type(error).__name__}: {error}. Make them as they were when the checkpoint was written."
        ) from error


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load, then undo torch's cast of the state to the dtype of its parameter."""
    optimizer.load_state_dict(dict(state))
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            own: dict[str, Any] = optimizer.state.get(parameter, {})
            for name, value in state["state"].get(index, {}).items():
                if isinstance(value, Tensor) and isinstance(own.get(name), Tensor):
                    own[name] = own[name] if own[name].dtype == value.dtype else value.to(own[name].device)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside the path, see that it is on disk, then put it in its place at once.

    Where the path is a symlink, its target is written. After an OSError an earlier file is as it was.
    """
    path = Path(os.path.realpath(path))
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    for stray in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # of a process that was killed
        shutil.rmtree(stray, ignore_errors=True)
    # In a folder of its own, because safetensors, too, makes temporary files, under names that only it knows.
    folder = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        folder.mkdir()
        temporary = folder / path.name
        write(temporary)
        temporary.chmod(folder.stat().st_mode & 0o666)  # what the umask says, not for the owner alone
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # the file is whole and in place; not every system can sync a folder
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_module(
    checkpoint: Checkpoint, state: Mapping[str, Any], module: nn.Module, masters: Masters, *, may_widen: bool
) -> None:
    own = _plain(masters.state_dict(module))
    wide = {name for name, value in own.items() if isinstance(value, Tensor) and value.dtype == float32}
    there, here = _forms(state, wide if may_widen else ()), _forms(own, ())
    differences = [
        f"{name}: {there.get(name, 'nothing')} there, {here.get(name, 'nothing')} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    names: dict[int, str] = {}
    for name, value in _plain(module.state_dict(keep_vars=True)).items():
        first = names.setdefault(id(value), name)
        if differences or first == name or not isinstance(value, Tensor):
            continue
        if state[first] is not state[name] and not equal(state[first], state[name]):
            differences.append(f"{first} and {name}: two values there, one tied parameter here")
    if differences:
        shown = "; ".join(differences[:3]) + f"; and {len(differences) - 3} more" * (len(differences) > 3)
        raise CheckpointError(
            f"{checkpoint.path}: expected a checkpoint of this {type(module).__name__}, got another "
            f"model's: {shown}. Build it as it was when the checkpoint was written."
        )


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """With the names of a model that is not compiled, so that either can load what the other has saved."""
    return {private.plain_name(name): value for name, value in state.items()}


def _named_as_in(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: state[private.plain_name(name)] for name in module.state_dict()}


def _forms(state: Mapping[str, Any], widened: Container[str]) -> dict[str, str]:
    """Dtype and shape of each tensor; the short ones among `widened` count as float32."""
    forms = dict.fromkeys(state, "a value")
    for name, value in state.items():
        if isinstance(value, Tensor):
            dtype = float32 if value.dtype in SHORT_DTYPES and name in widened else value.dtype
            forms[name] = f"{dtype} {tuple(value.shape)}".removeprefix("torch.")
    return forms


def _check_classes(checkpoint: Checkpoint, what: str, there: list[str], here: Iterable[object]) -> None:
    names = [type(one).__name__ for one in here]
    if there != names:
        raise CheckpointError(
            f"{checkpoint.path}: expected a checkpoint with the {what} {names}, got {there}. "
            "Make the same ones in the same order."
        )


def _check_groups(
    checkpoint: Checkpoint, there: list[list[str]], here: list[list[str]], optimizer: Optimizer
) -> None:
    if there != here:
        sizes = [[len(group) for group in groups] for groups in (here, there)]
        pairs = zip(chain(*here), chain(*there), strict=False)
        first = next((f": {one} where it has {other}" for one, other in pairs if one != other), "")
        raise CheckpointError(
            f"{checkpoint.path}: expected {type(optimizer).__name__} with groups of {sizes[0]} parameters, "
            f"got {sizes[1]}{first}. Make the optimizer from the same parameters in the same order."
        )


def _parameter_names(model: nn.Module, loss: nn.Module | None, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters of each group: state dicts know them only by their number."""
    of_loss = () if loss is None else loss.named_parameters(prefix="loss")
    names = {
        id(parameter): private.plain_name(name)
        for name, parameter in chain(of_loss, model.named_parameters())
    }
    return [
        [names.get(id(one), "not the model's") for one in group["params"]] for group in optimizer.param_groups
    ]
