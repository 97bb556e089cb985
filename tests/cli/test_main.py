"""The command line on small real files: train, resume, evaluate, and every refusal."""

import gzip
import json
import random
import runpy
import struct
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)

from anybatch.cli import main as cli
from anybatch.engine.plan import Plan
from anybatch.memory.ledger import Ledger
from anybatch.train import Trainer, checkpoint

FAST = ["--batch-size", "16", "--micro-batch", "5", "--lr", "0.05", "--quiet", "--device", "cpu"]


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like MNIST's with a few rows: bright left halves are class 0, bright right halves class 1."""
    folder = tmp_path_factory.mktemp("mnist")
    draw = random.Random(0)
    for stem, rows in (("train", 50), ("t10k", 20)):
        labels = [row % 2 for row in range(rows)]
        pixels = bytes(
            draw.randrange(100, 256) if (column >= 14) == bool(label) else draw.randrange(160)
            for label in labels
            for _ in range(28)
            for column in range(28)
        )
        images = struct.pack(">4I", 0x803, rows, 28, 28) + pixels
        (folder / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, rows) + bytes(labels))
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_train_then_evaluate(mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    code, printed, _ = run(
        capsys, "train", "lenet5", "--data", mnist, *FAST, "--epochs", 4, "--out", out, "--json"
    )
    told = json.loads(printed)
    assert code == 0
    assert told["accuracy"] > 0.9
    assert told["updates"] == 4 * 4
    assert "Infinity" not in (out / "settings.json").read_text()  # of --clip-norm: it is no JSON
    assert run(capsys, "train", "--resume", out)[0] == 0
    assert told["checkpoint"] == str(out / "last.safetensors")
    assert min(told[name] for name in ("loss", "seconds", "samples_per_second", "peak_bytes")) > 0, told

    code, printed, _ = run(capsys, "eval", out, "--data", mnist, "--micro-batch", 3, "--json")
    again = json.loads(printed)
    assert code == 0
    assert again["accuracy"] == told["accuracy"]
    assert again["rows"] == 20
    # Other micro-batches may add up in another order; a float32 sum of 20 losses agrees to six digits.
    assert f"{again['loss']:.5f}" == f"{told['loss']:.5f}"
    _, printed, _ = run(capsys, "eval", out, "--data", mnist)
    assert printed.splitlines()[-1] == f"test accuracy {told['accuracy']:.4f}"


def test_same_seed_same_figures_and_no_run_overwrites_another(
    mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for seed in (1, 1, 2):
        arguments = ("--epochs", 2, "--seed", seed, "--out", tmp_path / "run", "--json")
        _, printed, _ = run(capsys, "train", "lenet5", "--data", mnist, *FAST, *arguments)
        told.append(json.loads(printed))
    assert [Path(one["checkpoint"]).parent.name for one in told] == ["run", "run-2", "run-3"]
    assert told[0]["loss"] == told[1]["loss"]
    assert told[0]["loss"] != told[2]["loss"]


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed", "fp16-true"])
def test_a_resumed_run_ends_like_an_undisturbed_one_and_is_evaluated(
    precision: str, mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "lenet5", "--data", mnist, *FAST, "--precision", precision, "--non-finite", "drop"]
    arguments += ["--warm-up", 3]
    run(capsys, *arguments, "--epochs", 3, "--out", tmp_path / "whole")
    run(capsys, *arguments, "--epochs", 1, "--out", tmp_path / "parts")
    code, printed, _ = run(capsys, *arguments, "--epochs", 3, "--resume", tmp_path / "parts", "--json")
    assert code == 0
    told = json.loads(printed)
    whole, parts = (checkpoint.load(tmp_path / name / "last.safetensors") for name in ("whole", "parts"))
    assert all(value.equal(parts.model[name]) for name, value in whole.model.items())
    assert whole.progress["scale"] == parts.progress["scale"]
    assert whole.progress["updates"] == parts.progress["updates"] == 3 * 4

    code, printed, _ = run(capsys, "eval", tmp_path / "parts", "--data", mnist, "--json")  # in float32
    assert code == 0
    # Scores in 16 bits agree to two digits or so.
    assert abs(json.loads(printed)["loss"] - told["loss"]) < 0.05 * told["loss"]


STARTED = ["--epochs", "1", "--momentum", "0.5", "--validation", "0.2", "--warm-up", "3", "--clip-norm", "9"]


@pytest.fixture
def started(mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of a run of one epoch, with options that are not the default ones."""
    assert run(capsys, "train", "lenet5", "--data", mnist, *FAST, *STARTED, "--out", tmp_path / "run")[0] == 0
    return tmp_path / "run"


def test_resume_and_the_folder_are_enough(
    started: Path,
    mnist: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["lenet5", "--data", mnist, *FAST, *STARTED, "--epochs", 3, "--out", tmp_path / "whole"]
    run(capsys, "train", *arguments)
    monkeypatch.chdir(tmp_path)  # --data was a path from somewhere else
    code, printed, _ = run(capsys, "train", "--resume", started, "--epochs", 2, "--micro-batch", 3, "--json")
    assert (code, json.loads(printed)["updates"]) == (0, 2 * 3)
    settings = json.loads((started / "settings.json").read_text())
    assert (settings["epochs"], settings["micro_batch"], settings["batch_size"]) == (2, 3, 16)
    code, printed, _ = run(capsys, "train", "--resume", "run", "--epochs", 3, "--micro-batch", 5, "--quiet")
    assert (code, "best" in printed) == (0, True)
    whole, parts = (checkpoint.load(tmp_path / name / "last.safetensors") for name in ("whole", "run"))
    assert whole.progress["run"] == parts.progress["run"]
    assert whole.progress["updates"] == parts.progress["updates"] == 3 * 3
    code, printed, _ = run(capsys, "train", "--resume", "run", "--json")  # to epoch 3, which is done
    assert json.loads(printed)["updates"] == 3 * 3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--momentum", "0.9"], "--momentum 0.9 where it had 0.5"),
        (["--batch-size", "8", "--seed", "1"], "--batch-size 8 where it had 16, --seed 1 where it had 0"),
        (["--clip-norm", "inf"], "--clip-norm inf where it had 9.0"),
        (["--precision", "bf16-mixed"], "--precision bf16-mixed where it had float32"),
        (["--out", "other"], "--out other"),
    ],
)
def test_resume_refuses_options_that_the_run_did_not_have(
    started: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    before = {path.name: path.read_bytes() for path in started.iterdir()}
    code, printed, error = run(capsys, "train", "--resume", started, "--epochs", 2, *more)
    assert (code, printed) == (1, "")
    assert words in error
    assert "Leave them out, or start a new run" in error
    assert {path.name: path.read_bytes() for path in started.iterdir()} == before
    same = ["lenet5", *FAST, *STARTED, "--epochs", 2]  # the same once more is no contradiction
    assert run(capsys, "train", *same, "--resume", started, "--out", started)[0] == 0


@pytest.mark.parametrize("text", [None, "{", "[1]", '{"recipe": {}}', '{"lr": [1]}'])
def test_resume_without_settings_that_can_be_read(
    started: Path, mnist: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    """Runs of earlier versions have none: they go on with the same options, and are refused with others."""
    (started / "settings.json").unlink() if text is None else (started / "settings.json").write_text(text)
    code, _, error = run(capsys, "train", "--resume", started)
    assert (code, "settings.json" in error) == (1, True)
    if text is None:
        again = ["train", "lenet5", "--data", mnist, *FAST, *STARTED, "--epochs", 2, "--resume", started]
        code, _, error = run(capsys, *again, "--momentum", 0.9)
        assert (code, "momentum 0.5 there and 0.9 here" in error) == (1, True)
        assert run(capsys, *again)[0] == 0
        assert run(capsys, "train", "--resume", started)[0] == 0  # now it has them


def test_interrupted_training_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(self: Trainer, *, epochs: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "fit", stop)
    code, printed, error = run(capsys, "train", "lenet5", "--out", tmp_path / "run", "--quiet")
    assert (code, printed) == (130, "")
    assert f"stopped after 0 updates; go on with: anybatch train --resume {tmp_path / 'run'}" in error


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"anybatch {metadata.version('anybatch')}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "lenet6"], "lenet5"),
        (["train"], "Expected a recipe, got none"),
        (["train", "lenet5", "--data", "no/such/folder"], "no/such/folder"),
        (["train", "lenet5", "--data", "{mnist}", "--micro-batch", "0"], "to be at least 1, got 0"),
        (["train", "lenet5", "--data", "{mnist}", "--memory", "100kB"], "The smallest budget"),
        (["train", "lenet5", "--data", "{mnist}", "--epochs", "0"], "--epochs"),
        (["train", "lenet5", "--data", "{mnist}", "--validation", "1.5"], "1.5"),
        (["train", "lenet5", "--data", "{mnist}", "--lr", "-1"], "--lr"),
        (["train", "lenet5", "--data", "{mnist}", "--warm-up", "-1"], "warm-up"),
        (["train", "lenet5", "--lr-scale", "linear", "--base-batch-size", "0"], "base_batch"),
        (["train", "lenet5", "--data", "{mnist}", "--resume", "{mnist}"], "no file"),
        (["train", "lenet5", "--data", "{mnist}", "--seed", "9" * 30], "--seed"),
        (["train", "lenet5", "--data", "{mnist}", "--device", "meta"], "meta"),
        (["check", "lenet5", "--rows", "1"], "--rows to be at least 2, got 1. See anybatch check --help"),
        (["plan", "lenet5", "--batch-size", "-3"], "--batch-size to be at least 1, got -3. See"),
        (["plan", "lenet6"], "Expected a target, got 'lenet6'"),
        (["eval", "nowhere.safetensors"], "nowhere.safetensors"),
        (["eval", "{mnist}/t10k-labels-idx1-ubyte"], "safetensors"),
    ],
)
def test_refusals_are_one_message_and_leave_nothing(
    mnist: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, error = run(capsys, *[argument.format(mnist=mnist) for argument in arguments])
    assert code == (2 if arguments[0] == "check" else 1)
    assert printed == ""
    assert error.startswith(f"anybatch {arguments[0]}: ")
    assert words in error
    assert len(error.replace(str(mnist), "")) <= 300 or words == "The smallest budget"
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []  # not even an empty folder of a run


TARGETS = """
import torch
from torch import nn

def sound():
    return nn.Linear(3, 1), nn.MSELoss(), (torch.ones(9, 3), torch.arange(9.0)[:, None])

def meeting():
    layers = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    return layers, nn.MSELoss(), (torch.eye(9)[:, :3], torch.arange(9.0)[:, None])

def without_values():
    with torch.device("meta"):
        return sound()

def talking():
    print("I print what I like")
    return sound()

def endless():
    raise KeyboardInterrupt

def failing():
    return nn.Linear(2, 1), nn.MSELoss(), (torch.ones(9, 3), torch.arange(9.0)[:, None])
"""


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the current directory."""
    name = f"cli_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    return name


def test_check_says_exact_and_only_then_returns_0(targets: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = run(capsys, "check", f"{targets}:sound", "--rows", 5, "--json")
    assert code == 0
    assert json.loads(printed)["exact"] is True

    code, printed, _ = run(capsys, "check", f"{targets}:meeting", "--micro-batch", 4, "--json")
    told = json.loads(printed)
    assert code == 1
    assert told["cuts"][0] == "4+4+1"
    assert told["findings"][0]["culprit"] == "0 (BatchNorm1d)"

    code, printed, _ = run(capsys, "check", f"{targets}:meeting", "--batch-norm", "frozen", "--device", "cpu")
    assert (code, printed.partition(":")[0]) == (0, "exact")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "{}:without_values"], "Expected a model with values to check, got 2 of its tensors"),
        (["plan", "{}:sound", "--memory", "much"], "'much'"),
        (["plan", "{}:sound", "--device", "tpu"], "'tpu'"),
        (["plan", "{}:failing", "--memory", "1MB"], "Error"),
        (["plan", "{}:sound", "--memory", "10", "--estimate"], "The smallest budget"),
        (["check", "{}:failing"], "could not check: RuntimeError"),
    ],
)
def test_targets_that_cannot_be_checked_or_planned(
    targets: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, printed, error = run(capsys, *[one.format(targets) for one in arguments])
    assert (code, printed) == (2 if arguments[0] == "check" else 1, "")
    assert error.startswith(f"anybatch {arguments[0]}: ")
    assert words in error


def test_json_is_all_that_is_printed_whatever_the_target_prints(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("check", "plan"):
        code, printed, error = run(capsys, command, f"{targets}:talking", "--json")
        assert (code, printed.count("\n"), error) == (0, 1, "I print what I like\n")
        assert json.loads(printed)
        code, printed, _ = run(capsys, command, f"{targets}:endless", "--json")
        assert (code, json.loads(printed)) == (130, {"error": "interrupted"})


def test_json_has_null_for_what_it_cannot_say(
    mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "lenet5", "--data", mnist, *FAST, "--epochs", 1, "--lr", 1e30, "--json"]
    code, printed, _ = run(capsys, *arguments, "--non-finite", "skip", "--out", tmp_path / "run")
    assert code == 0
    assert json.loads(printed, parse_constant=pytest.fail)["loss"] is None


def test_plan_is_a_table_and_one_json_object(targets: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", f"{targets}:sound", "--batch-size", 30, "--memory", "1MB", "--json", "--estimate"]
    code, printed, _ = run(capsys, *arguments, "--plot", "memory.svg")
    told = json.loads(printed)
    assert code == 0
    assert Plan.from_json(json.dumps(told["plan"])) == Plan(rows=30, micro_batch=30)
    assert Ledger.from_json(json.dumps(told["ledger"])).peak == told["peak"] <= told["budget"] == 10**6
    assert Path("memory.svg").exists()


def test_the_package_runs_as_a_module(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["anybatch", "plan", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("anybatch", run_name="__main__")
    assert "or a card that need not be here: cuda:t4" in " ".join(capsys.readouterr().out.split())
