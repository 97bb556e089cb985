"""A checkpoint that is damaged or foreign is refused; one that cannot be written leaves the earlier one."""

import copy
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from anybatch.core.errors import CheckpointError
from anybatch.parallel import stored
from anybatch.parallel.checkpoint import INDEX, load, restore, save
from tests.snapshots import same
from tests.train.runs import Killed, raising


def write(path: Path, number: float = 1.0) -> Path:
    nn.init.constant_((model := nn.Linear(2, 2)).weight, number)
    optimizers = [optim.SGD(model.parameters(), lr=0.1)]
    return save(path, 0, model=model, optimizers=optimizers, progress={"number": number})


def number_in(path: Path) -> float:
    found = load(path)
    assert torch.equal(found.model["weight"], torch.full((2, 2), found.progress["number"]))
    return found.progress["number"]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.exit, ("a pickle was run",)


FILE = "rank-0.safetensors"
Index = dict[str, Any]


def signed(folder: Path, change: Callable[[Index], object]) -> None:
    """Change the JSON of a checkpoint, with the right digests: as one who means harm would."""
    index = json.loads((folder / INDEX).read_bytes())
    del index["sha256"]
    index["files"] = {FILE: hashlib.sha256((folder / FILE).read_bytes()).hexdigest()}
    change(index)
    index["sha256"] = hashlib.sha256(json.dumps(index).encode()).hexdigest()
    (folder / INDEX).write_text(json.dumps(index))


def refused(folder: Path, told: str) -> None:
    with pytest.raises(CheckpointError, match=rf"expected .*{told}.*[.;] \w") as caught:
        load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(("make", "message"), [
    (lambda path: None, "got no folder"),
    (lambda path: path.mkdir(), "got no folder"),
    (lambda path: torch.save(Evil(), path), "pickled files are never opened"),
    (lambda path: (path.mkdir(), save_file({}, path / "last.safetensors")), "only that version reads"),
    (lambda path: (path.mkdir(), (path / "whole.json").touch()), "only that version reads"),
    (lambda path: (path.mkdir(), (path / INDEX).touch()), "JSONDecodeError"),
    (lambda path: (path.mkdir(), (path / INDEX).mkdir()), "got no folder"),
], ids=["missing", "folder", "pickle", "old", "old shards", "empty", "folders"])  # fmt: skip
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    make(tmp_path / "some")
    refused(tmp_path / "some", message)


@pytest.mark.parametrize("name", [FILE, INDEX])
def test_a_file_that_was_cut_extended_or_has_one_flipped_bit_is_refused(tmp_path: Path, name: str) -> None:
    made = write(tmp_path)
    data = (made / name).read_bytes()
    flipped = [data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :] for i in range(len(data))]
    cut = [*[data[: len(data) * part // 16] for part in range(16)], data + b"\0"]
    for changed in (*cut, *flipped):
        (made / name).write_bytes(changed)
        refused(made, "truncated, damaged" if changed in cut else "")


def weight(**values: Any) -> Callable[[Index], object]:
    return lambda index: index["tensors"]["model/weight"].update(values)


def sliced(*slices: Any) -> Callable[[Index], object]:
    return weight(slices=[[FILE, *one] for one in slices])


LIES: dict[str, Callable[[Index], object]] = {
    "overlapping": sliced((0, 2), (1, 2)),
    "missing": sliced((0, 1)),
    "out of range": sliced((0, 3)),
    "no numbers": sliced((0, "2")),
    "NaN": sliced((0, float("nan"))),
    "another dimension": weight(dim=2),
    "an absurd shape": weight(shape=[2**40, 2**40]),
    "a wider dtype": weight(dtype="float64"),
    "a dtype of the same size": weight(dtype="int32"),
    "more": weight(more=1),
    "of another file": weight(slices=[["rank-1.safetensors", 0, 2]]),
    "another format": lambda index: index.update(format="checkpoint 3"),
    "an unknown kind": lambda index: index["document"]["progress"].update(number={"$": "function"}),
    "no tensor": lambda index: index["tensors"].update(other=index["tensors"]["model/weight"]),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    made = write(tmp_path)
    signed(made, LIES[lie])
    refused(made, "what `save` wrote")


def linked(folder: Path) -> None:
    shutil.move(folder / FILE, folder.parent / "elsewhere")
    (folder / FILE).symlink_to("../elsewhere")


def renamed(name: str) -> Callable[[Path], object]:
    return lambda folder: signed(folder, lambda index: index.update(files={name: index["files"][FILE]}))


def headed(folder: Path) -> None:
    """A header of 2^60 bytes."""
    (folder / FILE).write_bytes((2**60).to_bytes(8, "little") + b"{}")
    signed(folder, lambda index: None)


def text(value: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(value)


def pickled(folder: Path) -> None:
    torch.save(Evil(), folder / FILE)
    signed(folder, lambda index: None)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle": (pickled, "SafetensorError"),
    "of another checkpoint": (lambda at: shutil.copy(write(at / "b", 2.0) / FILE, at), "other bytes in"),
    "a symlink": (linked, "a link or no file"),
    "an absolute path": (renamed("/etc/passwd"), "a file named"),
    "a header of 2^60 bytes": (headed, "SafetensorError"),
    "NaN": (text('{"sha256": NaN}'), "not JSON"),
    "a name twice": (text('{"sha256": "", "files": {}, "files": {}}'), "a name twice"),
    "10 MB of brackets": (text("[" * 10_000_000), "RecursionError"),
    "a long number": (text('{"sha256": ' + "9" * 5000 + "}"), "ValueError"),
}


@pytest.mark.parametrize("what", ODD)
def test_files_that_mean_harm_are_refused_by_name(tmp_path: Path, what: str) -> None:
    first = save(tmp_path, 1, model=nn.Linear(2, 2), keep=2)
    shutil.copytree(write(tmp_path / "other"), made := tmp_path / "step-00000002")
    change, told = ODD[what]
    change(made)
    refused(made, told)
    with pytest.warns(UserWarning, match=f"Going on from {first} instead"):
        assert load(tmp_path).path == first


def failing(error: BaseException) -> Callable[..., None]:
    return lambda *args, **options: raising(error)()


def half_written(path: Path, tensors: dict[str, Any]) -> None:
    path.write_bytes(b"half")
    raise OSError(28, "No space left on device")


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "full disk": (stored, "write_tensors", half_written),
    "killed in the middle": (stored, "write_tensors", failing(Killed())),
    "not on disk": (os, "fsync", failing(OSError(5, "Input/output error"))),
    "killed before it counts": (os, "replace", failing(Killed())),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("earlier", [False, True])
def test_a_failed_write_leaves_the_earlier_checkpoint_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, earlier: bool
) -> None:
    made = [write(tmp_path, 1.0)] if earlier else []
    with monkeypatch.context() as patched:
        patched.setattr(*FAULTS[fault])
        with pytest.raises((CheckpointError, Killed)) as caught:
            write(tmp_path, 2.0)
    if caught.type is CheckpointError:
        assert re.search(r"expected a checkpoint that can be written.*, got: \w+", str(caught.value))
    assert list(tmp_path.iterdir()) == made
    if earlier:
        assert number_in(tmp_path) == 1.0


def test_newest_folders_stay_and_later_ones_go(tmp_path: Path) -> None:
    (tmp_path / "step-of-mine").mkdir()
    for step, keep, names in (
        (1, 2, "01 ne"), (3, 2, "01 03 ne"), (4, 2, "03 04 ne"), (5, 3, "03 04 05 ne"), (4, 3, "+1 03 ne"),
        (10**9, 1, "00 ne"), (10**9 + 1, 2, "00 01 ne"),
    ):  # fmt: skip
        made = save(tmp_path, step, model=nn.Linear(1, 1), keep=keep)
        assert sorted(path.name[-2:] for path in tmp_path.iterdir()) == names.split()
        assert load(tmp_path).path == made


@pytest.mark.parametrize(("name", "reason"), [("file/a", "Not a directory"), ("file", "File exists")])
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"expected a checkpoint that can be written.*got: ({reason})"):
        write(tmp_path / name)
    assert {*tmp_path.rglob("*")} == {tmp_path / "file"}


class Refusing(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        raise RuntimeError("refused")


def layers(width: int = 3, *, tied: bool = False) -> Any:
    made = nn.ModuleDict({"one": nn.Linear(3, width), "two": nn.Linear(3, width)})
    if tied:
        made["two"].weight = made["one"].weight
    return made


def sgd(*names: str) -> Callable[[nn.Module], Optimizer]:
    """With a group of parameters for each of these layers; the empty name is the model."""
    groups = lambda m: [{"params": [*m.get_submodule(name).parameters()]} for name in names]  # noqa: E731
    return lambda model: optim.SGD(groups(model), lr=0.1, momentum=0.9)


WHOLE = sgd("")


def prepare(model: Any = layers, optimizer: Any = WHOLE, schedule: Any = StepLR) -> dict[str, Any]:
    made = model()
    optimizers = [optimizer(made)]
    parts = {"optimizers": optimizers, "schedulers": [schedule(optimizers[0], 2)]}
    for parameter in made.parameters():
        parameter.grad = torch.rand_like(parameter)
    for part in (*parts["optimizers"], *parts["schedulers"]):
        part.step()
    return {"model": made, **parts}


@pytest.mark.parametrize(("there", "here", "message"), [
    ({"model": lambda: nn.Linear(3, 3)}, {}, "of this ModuleDict, .*bias: .* there, nothing here"),
    ({"model": lambda: layers(4)}, {}, r"one.bias: float32 \(4,\) there, float32 \(3,\) here"),
    ({}, {"model": lambda: layers(tied=True)}, "one.weight and two.weight: two values there, one tied"),
    ({"optimizer": lambda m: optim.AdamW(m.parameters())}, {}, "optimizer 0: AdamW there, SGD here"),
    ({"optimizer": sgd("one", "two")}, {"optimizer": sgd("two", "one")}, "one.weight there, two.weight"),
    ({"schedule": lambda o, _: ExponentialLR(o, 0.9)}, {}, "scheduler 0: ExponentialLR there, StepLR"),
    # Too late for its own parameters, but optimizers and schedulers go back.
    (*[{"model": lambda: Refusing(3, 3)}] * 2, "RuntimeError: refused"),
], ids=map(str, range(7)))  # fmt: skip
def test_another_model_optimizer_or_scheduler_is_refused_and_left_as_it_was(
    tmp_path: Path, there: dict[str, Any], here: dict[str, Any], message: str
) -> None:
    path = tmp_path / "a"
    save(path, 0, **prepare(**there))
    made = prepare(**here)
    parts = (*made["optimizers"], *made["schedulers"])
    weights = copy.deepcopy(dict(made["model"].state_dict()))
    before = copy.deepcopy([part.state_dict() for part in parts])
    with pytest.raises(CheckpointError, match=rf"a.step-00000000: expected .*{message}.*[.] \w"):
        restore(load(path), **made)
    assert isinstance(made["model"], Refusing) or same(dict(made["model"].state_dict()), weights)
    assert same([part.state_dict() for part in parts], before)
    for part in parts:
        part.step()  # and it still works
