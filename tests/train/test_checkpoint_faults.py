"""A checkpoint that is damaged or foreign is refused; one that cannot be written leaves the earlier one."""

import copy
import json
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as parse, save_file
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR, StepLR

from anybatch.core.errors import CheckpointError
from anybatch.train import checkpoint, serialize
from anybatch.train.checkpoint import load, restore, save
from tests.snapshots import same


def write(path: Path, number: float = 1.0) -> Path:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, number)
    save(path, model=model, optimizers=[optim.SGD(model.parameters(), lr=0.1)], progress={"number": number})
    return path


def number_in(path: Path) -> float:
    found = load(path)
    assert torch.equal(found.model["weight"], torch.full((2, 2), found.progress["number"]))
    return found.progress["number"]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.exit, ("a pickle was run",)


# ---- reading


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "got no file of that name"),
        (lambda path: path.mkdir(), "got no file of that name"),
        (lambda path: path.touch(), "cannot be read"),
        (lambda path: path.write_text("weights"), "cannot be read"),
        (lambda path: torch.save(Evil(), path), "pickled files are never opened"),
        (lambda path: save_file({"weight": torch.ones(2)}, path), "got 'a file of another program'"),
        (lambda path: save_file({}, path, {"anybatch": "checkpoint 2"}), "got 'checkpoint 2'"),
        (lambda path: save_file({}, path, {"anybatch": "checkpoint 1"}), "SHA-256 differs"),
    ],
    ids=["missing", "folder", "empty", "text", "pickle", "others", "later", "unsigned"],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    path = tmp_path / "some.safetensors"
    make(path)
    with pytest.raises(CheckpointError, match=rf"some\.safetensors: expected .*{message}.*[.;] \w"):
        load(path)


def test_a_file_with_less_or_more_than_its_bytes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    data = path.read_bytes()
    for changed in (*[data[: len(data) * part // 16] for part in range(16)], data + b"\0"):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="cannot be read"):
            load(path)


def test_a_flipped_bit_anywhere_is_refused(tmp_path: Path) -> None:
    """Or means the same, as upper case does in the digits of an escaped letter."""
    path = write(tmp_path / "a")
    data, expected = path.read_bytes(), load(path)
    accepted = []
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            found = load(path)
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            accepted.append(place)
            for name in ("model", "progress", "optimizers"):
                assert same(getattr(found, name), getattr(expected, name))
    assert len(accepted) <= len("formatpt"), f"bytes {accepted}"  # a note to other programs: "format": "pt"


@pytest.mark.parametrize(
    ("change", "signed"),
    [
        (lambda document: document["progress"].update(number=2.0), False),
        (lambda document: document["optimizers"].clear(), False),
        (lambda document: document.pop("random"), True),
        (lambda document: document.update(more=1), True),
        *[
            (lambda document, number=number: document["progress"].update(number=number), True)
            for number in ({"$": "tensor", "of": "nowhere"}, {"$": "dict", "of": 3}, {"$": "function"})
        ],
    ],
    ids=map(str, range(7)),
)
def test_other_json_is_refused_and_so_is_what_means_nothing_with_the_right_digest(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], signed: bool
) -> None:
    path = write(tmp_path / "a")
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    metadata = header["__metadata__"]
    document = json.loads(metadata["document"])
    change(document)
    metadata["document"] = json.dumps(document)
    if signed:
        metadata["sha256"] = serialize.digest_of(parse(data), metadata["document"])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(CheckpointError, match="what `save` writes" if signed else "SHA-256 differs"):
        load(path)


# ---- writing


class Killed(BaseException):
    """What no handler of errors catches."""


def failing(error: BaseException) -> Callable[..., None]:
    def fail(*args: object, **options: object) -> None:
        raise error

    return fail


def half_written(tensors: dict[str, Any], path: Path, **options: Any) -> None:
    path.write_bytes(b"half")
    raise OSError(28, "No space left on device")


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "full disk": (checkpoint, "save_file", half_written),
    "killed in the middle": (checkpoint, "save_file", failing(Killed())),
    "interrupted": (os, "fsync", failing(KeyboardInterrupt())),
    "not on disk": (os, "fsync", failing(OSError(5, "Input/output error"))),
    "not replaced": (os, "replace", failing(PermissionError(13, "Permission denied"))),
    "killed before it counts": (os, "replace", failing(Killed())),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("earlier", [False, True])
def test_a_failed_write_leaves_the_earlier_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, earlier: bool
) -> None:
    path = tmp_path / "a.safetensors"
    if earlier:
        write(path, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(*FAULTS[fault])
        with pytest.raises((CheckpointError, Killed, KeyboardInterrupt)) as caught:
            write(path, 2.0)
    if caught.type is CheckpointError:
        assert re.search(r"a\.safetensors: expected a file that can be written, got: \w+", str(caught.value))
    assert list(tmp_path.iterdir()) == [path] * earlier
    if earlier:
        assert number_in(path) == 1.0


def test_a_folder_that_cannot_be_synced_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(22, "Invalid argument")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert number_in(write(tmp_path / "a")) == 1.0


def test_a_new_checkpoint_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "a[1]"
    for name in (".a[1].123.tmp", ".a1.123.tmp"):  # the first was left by a process that was killed
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_bytes(b"of a file")
    assert number_in(write(path, 1.0)) == 1.0
    assert number_in(write(path, 2.0)) == 2.0
    assert {path.name for path in tmp_path.iterdir()} == {"a[1]", ".a1.123.tmp"}


@pytest.mark.parametrize("fault", [None, "full disk", "killed before it counts"])
def test_a_link_stays_a_link_and_its_target_is_written_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    link, between, target = tmp_path / "link", tmp_path / "between", tmp_path / "disk" / "a"
    target.parent.mkdir()
    link.symlink_to("between")
    between.symlink_to("disk/a")
    write(link, 1.0)  # a link without a file makes one
    with monkeypatch.context() as patched:
        if fault:
            patched.setattr(*FAULTS[fault])
        with pytest.raises((CheckpointError, Killed)) if fault else nullcontext():
            write(link, 2.0)
    assert link.is_symlink()
    assert between.is_symlink()
    assert not target.is_symlink()
    assert number_in(link) == number_in(target) == (1.0 if fault else 2.0)
    assert list(target.parent.iterdir()) == [target]
    (tmp_path / "other").touch()  # others may read a checkpoint as they may read any file
    assert target.stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize(
    ("name", "reason"), [("no/a", "No such file"), (".", "[Ii]s a directory|busy"), ("circle", "[Ll]evels")]
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(CheckpointError, match=f"expected a file that can be written, got: .*({reason})"):
        write(tmp_path / name)
    assert list(tmp_path.rglob("*")) == [tmp_path / "circle"]


# ---- of another model, optimizer or scheduler

Optimizers, Schedulers = list[Optimizer], list[LRScheduler]


class Net(nn.Module):
    def __init__(self, *, width: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, width), nn.Linear(3, width)
        if tied:
            self.two.weight = self.one.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Refusing(Net):
    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        raise RuntimeError("refused")


def sgd(*names: str) -> Callable[[nn.Module], Optimizers]:
    """With a group of parameters for each of these layers; the empty name is the model."""

    def make(model: nn.Module) -> Optimizers:
        groups = [{"params": list(model.get_submodule(name).parameters())} for name in names]
        return [optim.SGD(groups, lr=0.1, momentum=0.9)]

    return make


def steps(*sizes: int) -> Callable[[Optimizers], Schedulers]:
    def make(optimizers: Optimizers) -> Schedulers:
        parts: list[LRScheduler] = [StepLR(optimizers[0], size) for size in sizes]
        return parts[:1] if not sizes[1:] else [SequentialLR(optimizers[0], parts, [*range(1, len(sizes))])]

    return make


def prepare(parts: dict[str, Any]) -> tuple[nn.Module, Optimizers, Schedulers]:
    model = parts.get("model", Net)()
    optimizers = parts.get("optimizers", sgd(""))(model)
    schedulers = parts.get("schedulers", steps(2))(optimizers)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.rand_like(parameter)
        for part in (*optimizers, *schedulers):
            part.step()
    return model, optimizers, schedulers


@pytest.mark.parametrize(
    ("there", "here", "message"),
    [
        ({"model": lambda: nn.Linear(3, 3)}, {}, "checkpoint of this Net, .*one.bias: nothing there"),
        ({"model": partial(Net, width=4)}, {}, r"one.bias: float32 \(4,\) there, float32 \(3,\) here"),
        ({}, {"model": partial(Net, tied=True)}, "one.weight and two.weight: two values there, one tied"),
        ({"optimizers": lambda m: [optim.AdamW(m.parameters())]}, {}, r"\['SGD'\], got \['AdamW'\]"),
        ({"optimizers": sgd("one", "two")}, {}, r"groups of \[4\] parameters, got \[2, 2\]"),
        (
            {"optimizers": sgd("one", "two")},
            {"optimizers": sgd("two", "one")},
            "two.weight where it has one.weight",
        ),
        ({"schedulers": steps(2, 3)}, {}, r"schedulers \['StepLR'\], got \['SequentialLR'\]"),
        ({"schedulers": steps(2, 3, 4)}, {"schedulers": steps(2, 3)}, "schedulers take, got IndexError"),
        # Too late for its own parameters, but optimizers and schedulers go back.
        ({"model": Refusing}, {"model": Refusing}, "RuntimeError: refused"),
    ],
    ids=map(str, range(9)),
)
def test_another_model_optimizer_or_scheduler_is_refused_and_left_as_it_was(
    tmp_path: Path, there: dict[str, Any], here: dict[str, Any], message: str
) -> None:
    path = tmp_path / "a.safetensors"
    model, optimizers, schedulers = prepare(there)
    save(path, model=model, optimizers=optimizers, schedulers=schedulers)
    model, optimizers, schedulers = prepare(here)
    parts = (*optimizers, *schedulers)
    weights = copy.deepcopy(dict(model.state_dict()))
    before = copy.deepcopy([part.state_dict() for part in parts])
    with pytest.raises(CheckpointError, match=rf"a\.safetensors: expected .*{message}.*[.] \w") as caught:
        restore(load(path), model=model, optimizers=optimizers, schedulers=schedulers)
    if not isinstance(model, Refusing):
        assert same(dict(model.state_dict()), weights), caught.value
    assert same([part.state_dict() for part in parts], before)
    for part in parts:
        part.step()  # and it still works


def test_ties_there_may_be_two_parameters_here(tmp_path: Path) -> None:
    one, other = Net(tied=True), Net()
    save(tmp_path / "a", model=one)
    restore(load(tmp_path / "a"), model=other)
    assert torch.equal(other.one.weight, one.one.weight)
    assert torch.equal(other.two.weight, one.one.weight)
    assert other.one.weight is not other.two.weight
