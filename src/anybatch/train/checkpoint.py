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
from torch import Tensor, contiguous_format, equal, float32, nn, save as torch_save
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch.core import SHORT_DTYPES, AnybatchError, CheckpointError, torch_private as private
from anybatch.precision import Masters
from anybatch.train.serialize import Packer, digest_of, unpack

FORMAT = "checkpoint 1"
_NO_MASTERS = Masters()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """The verified contents of a checkpoint file, on the CPU; see `save`."""

    path: Path
    model: dict[str, Any]  # state dict, with float32 master weights instead of 16-bit weights
    loss: dict[str, Any]  # state dict, empty if the loss is no module
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
    """Write a checkpoint atomically: the file is the old one or the new one, never a part.

    If the path is a symlink, its target is written. Tensors go into one safetensors file, shared tensors
    (tied weights) once; other values go into its header as JSON, together with a SHA-256 of both.

    Args:
        path: the file; its folder must exist.
        model: module whose state dict is saved.
        loss: a loss that is a module; it may hold trained parameters.
        optimizers, schedulers: in the order for `restore`.
        masters: the float32 master weights (`Step.masters`), saved instead of the 16-bit weights.
        progress: nested numbers, strings, tuples, lists, dicts and tensors of the caller.
        random: the random state, from `anybatch.state.rng.capture_process`.

    Raises:
        CheckpointError: a value cannot be written without pickle, or the file cannot be written. An earlier
            file of that name is unchanged.
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
    metadata = {"format": "pt", "anybatch": FORMAT, "document": text}
    metadata["sha256"] = digest_of(packer.tensors, text)
    write(path, lambda file: save_file(packer.tensors, file, metadata=metadata))


def write(
    path: Path,
    make: Callable[[Path], object],
    advice: str = "Choose another place.",
    kind: type[AnybatchError] = CheckpointError,
) -> None:
    """Write a file by `write_whole`; raise an error of this kind, with the advice, if that fails."""
    try:
        write_whole(path, make)
    except (SafetensorError, OSError, RuntimeError) as error:  # torch.save raises RuntimeError
        reason = getattr(error, "strerror", None) or error
        raise kind(f"{path}: expected a file that can be written, got: {reason}. {advice}") from None


def export(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a plain state dict as .safetensors, .pt or .pth, for `load_state_dict` in any program.

    Raises CheckpointError for another ending, a value that is no tensor for .safetensors, or a file that
    cannot be written. An earlier file of that name is unchanged.
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
            if is_safe:  # safetensors refuses shared memory
                plain[name] = plain[name].clone(memory_format=contiguous_format)
        elif is_safe:
            raise CheckpointError(
                f"{path}: expected a state dict of tensors, got {type(value).__name__} for {name!r}. "
                "Choose a name that ends in .pt."
            )
    write(path, lambda file: save_file(plain, file, {"format": "pt"}) if is_safe else torch_save(plain, file))


def load(path: str | Path) -> Checkpoint:
    """Read a checkpoint and verify every byte of it; raise CheckpointError if the file is not intact."""
    path = Path(path)
    if not os.path.isfile(path):  # Path.is_file() raises on names that are too long
        raise CheckpointError(f"{path}: expected a checkpoint, got no file of that name. Check the path.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            # Copies, because tensors of safe_open are views of the file, which may change after verification.
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
    """Load a checkpoint into a model, optimizers and schedulers; everything is checked first.

    16-bit weights are float32 in a checkpoint, so a float32 model can load them too. Without optimizers other
    16-bit tensors may also be float32 in the model, which is exact.

    Args:
        checkpoint: the result of `load`; it is not changed.
        model: model with the same parameters and buffers: names, shapes and dtypes.
        loss: loss module with the same parameters and buffers; None to leave it out.
        optimizers, schedulers: of the same classes and parameter groups; empty to leave them out.
        masters: `Step.masters`; they are loaded, and the 16-bit weights are rounded from them.

    Raises:
        CheckpointError: the checkpoint is of another model, optimizer or scheduler; nothing was changed.
    """
    _check_module(checkpoint, checkpoint.model, model, masters, may_widen=not optimizers)
    if loss is not None:
        _check_module(checkpoint, checkpoint.loss, loss, masters, may_widen=not optimizers)
    if optimizers:
        _check_classes(checkpoint, "optimizers", [name for name, *_ in checkpoint.optimizers], optimizers)
        for (_, _, names), optimizer in zip(checkpoint.optimizers, optimizers, strict=True):
            _check_groups(checkpoint.path, names, _parameter_names(model, loss, optimizer), optimizer)
    if schedulers:
        _check_classes(checkpoint, "schedulers", [name for name, _ in checkpoint.schedulers], schedulers)
    # load_state_dict may still refuse a state; then everything is put back.
    before = [(optimizer.state, optimizer.param_groups) for optimizer in optimizers]
    states = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
    try:
        # Copies, because optimizers keep these tensors and write into them.
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
    optimizer.load_state_dict(dict(state))  # casts the state to the dtype of the parameters, undone below
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            own: dict[str, Any] = optimizer.state.get(parameter, {})
            for name, value in state["state"].get(index, {}).items():
                if isinstance(value, Tensor) and isinstance(own.get(name), Tensor):
                    own[name] = own[name] if own[name].dtype == value.dtype else value.to(own[name].device)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: `write` makes a temporary file, which is synced and then renamed.

    If the path is a symlink, its target is written. After an OSError an earlier file is unchanged.
    """
    path = Path(os.path.realpath(path))
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    for stray in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # left by a killed process
        shutil.rmtree(stray, ignore_errors=True)
    # In a new folder, because safetensors also makes temporary files, with unknown names.
    folder = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        folder.mkdir()
        temporary = folder / path.name
        write(temporary)
        temporary.chmod(folder.stat().st_mode & 0o666)  # the umask's mode, not the owner's only
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # the file is complete; not every system can sync a folder
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
    return {private.plain_name(name): value for name, value in state.items()}


def _named_as_in(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: state[private.plain_name(name)] for name in module.state_dict()}


def _forms(state: Mapping[str, Any], widened: Container[str]) -> dict[str, str]:
    """Return dtype and shape of each tensor; 16-bit tensors named in `widened` count as float32."""
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


def _check_groups(path: Path, there: list[list[str]], here: list[list[str]], optimizer: Optimizer) -> None:
    if there != here:
        sizes = [[len(group) for group in groups] for groups in (here, there)]
        pairs = zip(chain(*here), chain(*there), strict=False)
        first = next((f": {one} where it has {other}" for one, other in pairs if one != other), "")
        raise CheckpointError(
            f"{path}: expected {type(optimizer).__name__} with groups of {sizes[0]} parameters, "
            f"got {sizes[1]}{first}. Make the optimizer from the same parameters in the same order."
        )


def _parameter_names(model: nn.Module, loss: nn.Module | None, optimizer: Optimizer) -> list[list[str]]:
    of_loss = () if loss is None else loss.named_parameters(prefix="loss")
    named = chain(of_loss, model.named_parameters())
    names = {id(parameter): private.plain_name(name) for name, parameter in named}
    groups = [group["params"] for group in optimizer.param_groups]
    return [[names.get(id(one), "not the model's") for one in group] for group in groups]
