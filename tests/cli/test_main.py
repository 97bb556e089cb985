"""The command line on small real files: train, resume, evaluate, check, plan, and every refusal."""

import json
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)
import torch
from safetensors.torch import load_file

from anybatch.cli import main as cli, plan as plan_action, target
from anybatch.cli.options import APART, LATER, PlanOptions, Run, options_of, parse
from anybatch.core.errors import PlanError
from anybatch.engine import Plan
from anybatch.train import Trainer, checkpoint
from tests.check.conftest import unhurried as unhurried
from tests.data.test_files import idx_bytes
from tests.snapshots import same

FAST = ["--batch-size", "16", "--micro-batch", "5", "--lr", "0.05", "--quiet", "--device", "cpu"]
STARTED = ["--epochs", "1", "--momentum", "0.5", "--validation", "0.2", "--warm-up", "3", "--clip-norm", "9"]


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: Any) -> Path:
    """A folder like MNIST's with a few rows: bright left halves are class 0, bright right halves class 1."""
    folder = tmp_path_factory.mktemp("mnist")
    generator = torch.Generator().manual_seed(0)
    for stem, rows in (("train", 50), ("t10k", 20)):
        labels = torch.arange(rows) % 2
        pixels = torch.randint(160, (rows, 28, 28), generator=generator)
        pixels += 80 * ((torch.arange(28) >= 14) == labels[:, None].bool())[:, None]
        for name, values in (("images-idx3", pixels), ("labels-idx1", labels)):
            (folder / f"{stem}-{name}-ubyte").write_bytes(idx_bytes(values.to(torch.uint8)))
    return folder


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    return cli.main([str(argument) for argument in arguments]), *capsys.readouterr()


def test_train_then_evaluate(mnist: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    arguments = ["lenet5", "--data", mnist, *FAST, "--epochs", 4, "--out", out, "--json"]
    code, printed, _ = run(capsys, "train", *arguments)
    told = json.loads(printed)
    assert (code, told["updates"], told["checkpoint"]) == (0, 4 * 4, str(out / "step-00000016"))
    assert told["accuracy"] > 0.9
    assert min(told[name] for name in ("loss", "seconds", "samples_per_second", "peak_bytes")) > 0, told
    assert "Infinity" not in (out / "settings.json").read_text()  # of --clip-norm: it is no JSON
    assert run(capsys, "train", "--resume", out)[0] == 0

    code, printed, _ = run(capsys, "eval", out, "--data", mnist, "--micro-batch", 3, "--json")
    again = json.loads(printed)
    assert (code, again["accuracy"], again["rows"]) == (0, told["accuracy"], 20)
    # Other micro-batches may add up in another order; a float32 sum of 20 losses agrees to six digits.
    assert f"{again['loss']:.5f}" == f"{told['loss']:.5f}"
    _, printed, _ = run(capsys, "eval", out)  # on the rows that are held out of the run's own data
    assert printed.splitlines()[-1] == f"test accuracy {told['accuracy']:.4f}"


def test_export_writes_weights_that_load(mnist: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    more = ["--validation", 0.2, "--ema", 0.5, "--patience", 1, "--keep", 1, "--save-minutes", 60]
    arguments = ["lenet5", "--data", mnist, *FAST, "--lr", 1e-9, "--epochs", 30, "--out", out, *more]
    code, printed, _ = run(capsys, "train", *arguments)
    assert (code, printed.splitlines()[1]) == (0, f"checkpoint  {out / 'step-00000006'}")
    assert "stopped     validation accuracy has not become better for 1 epochs" in printed
    assert [path.name for path in out.glob("step-*")] == ["step-00000006"]
    found: dict[str, Any] = {}
    for name, options in (("a.safetensors", []), ("b.safetensors", ["--ema"])):
        code, printed, _ = run(capsys, "export", out, "--out", tmp_path / name, *options, "--json")
        assert (code, json.loads(printed)["tensors"]) == (0, 10)
        found[name] = load_file(tmp_path / name)
    kept = checkpoint.load(out / "best")
    assert same(found["a.safetensors"], kept.model)
    assert same(found["b.safetensors"], dict(kept.progress["callbacks"][0][1]["average"]))
    code, _, error = run(capsys, "export", mnist, "--out", out / "c.safetensors", "--ema")
    assert (code, "got no folder with one" in error, (out / "c.safetensors").exists()) == (1, True, False)


@pytest.fixture
def started(mnist: Path, tmp_path: Path, capsys: Any) -> Path:
    assert run(capsys, "train", "lenet5", "--data", mnist, *FAST, *STARTED, "--out", tmp_path / "run")[0] == 0
    return tmp_path / "run"


@pytest.mark.parametrize(("more", "words"), [
    (["--momentum", "0.9"], "--momentum 0.9 where it had 0.5"),
    (["--batch-size", "8", "--seed", "1"], "--batch-size 8 where it had 16, --seed 1 where it had 0"),
    (["--clip-norm", "inf"], "--clip-norm inf where it had 9.0"),
    (["--precision", "bf16-mixed"], "--precision bf16-mixed where it had float32"),
    (["--out", "other"], "--out other"),
])  # fmt: skip
def test_resume_refuses_options_that_the_run_lacks(started: Path, capsys: Any, more: Any, words: str) -> None:
    before = {path: path.read_bytes() for path in started.rglob("*") if path.is_file()}
    code, printed, error = run(capsys, "train", "--resume", started, "--epochs", 2, *more)
    assert (code, printed) == (1, "")
    assert words in error
    assert "Leave them out, or start a new run" in error
    assert {path: path.read_bytes() for path in started.rglob("*") if path.is_file()} == before
    again = ["lenet5", *FAST, *STARTED, "--epochs", 2]  # the same once more is no contradiction
    assert run(capsys, "train", *again, "--resume", started, "--out", started)[0] == 0


def test_interrupted_training_says_how_to_go_on(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def stop(self: Trainer, *, epochs: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "fit", stop)
    code, printed, error = run(capsys, "train", "lenet5", "--out", tmp_path / "run", "--quiet")
    assert (code, printed) == (130, "")
    assert f"stopped after 0 updates; go on with: anybatch train --resume {tmp_path / 'run'}" in error


def test_the_table_of_options_is_that_of_the_dataclass() -> None:
    lines = ["| option | meaning | may change |", "|---|---|---|"]
    for name, one in options_of(Run).items():
        told = re.sub(r"(--[a-z-]+)", r"`\1`", one.told()).replace("<", "\\<")
        choices = f" ({', '.join(one.choices)})" if one.choices else ""
        change = "yes" if LATER in one.marks else "not kept" if APART in one.marks else ""
        lines.append(f"| `{name}` | {told}{choices} | {change} |")
    page = (Path(__file__).parents[2] / "docs" / "command.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("<!-- options -->\n")
    assert rest.partition("\n<!-- end of options -->")[0] == "\n".join(lines), "\n".join(lines)


# ---- what `anybatch check` and `anybatch plan` are pointed at, and what they say of it

POLICIES = {
    "all": 3,
    "body.blocks.1": 1,
    "body.blocks.[01]": 2,
    "selective": 3,
}  # and the blocks that run again


@pytest.mark.parametrize(("name", "words"), [
    ("lenet6", "Expected a target, got 'lenet6'. Name a function"),
    ("{here}:nowhere", "'nowhere'"),
    ("{here}:broken", "of type int"),
    ("{here}:wrong", "['MSELoss', 'tuple']"),
    ("{here}:with_two", "'Adam', 'Adam'"),
    ("no.such.module:f", "'no.such.module'"),
])  # fmt: skip
def test_refusals_say_what_came(here: str, name: str, words: str) -> None:
    with pytest.raises(PlanError) as error:
        target.find(name.format(here=here), "digits")
    assert words in str(error.value)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        target.find(f"{here}_late:f", "digits")


def test_check_says_exact_and_only_then_returns_0(here: str, capsys: Any) -> None:
    code, printed, _ = run(capsys, "check", f"{here}:make", "--rows", 5, "--json")
    assert (code, json.loads(printed)["exact"]) == (0, True)
    code, printed, _ = run(capsys, "check", f"{here}:meeting", "--micro-batch", 4, "--json")
    told = json.loads(printed)
    assert (code, told["cuts"][0]) == (1, "4+4+1")
    assert told["findings"][0]["culprit"] == "0 (BatchNorm1d)"
    code, printed, _ = run(capsys, "check", f"{here}:meeting", "--batch-norm", "frozen", "--device", "cpu")
    assert (code, printed.partition(":")[0]) == (0, "exact")


@pytest.mark.parametrize(("arguments", "told"), [
    (["check", "{}:on_meta"], "Expected a model with values to check, got"),
    (["plan", "{}:make", "--memory", "much"], "'much'"),
    (["plan", "{}:make", "--device", "tpu"], "'tpu'"),
    (["plan", "{}:failing", "--memory", "1MB"], "Error"),
    (["plan", "{}:make", "--memory", "10"], "learn the smallest"),
    (["check", "{}:failing"], "could not check: RuntimeError"),
])  # fmt: skip
def test_targets_that_cannot_be_checked_or_planned(here: str, capsys: Any, arguments: Any, told: str) -> None:
    code, printed, error = run(capsys, *[one.format(here) for one in arguments])
    assert (code, printed) == (2 if arguments[0] == "check" else 1, "")
    assert error.startswith(f"anybatch {arguments[0]}: ")
    assert told in error


@pytest.mark.parametrize("command", ["check", "plan"])
def test_json_is_all_that_is_printed_whatever_the_target_prints(here: str, capsys: Any, command: str) -> None:
    code, printed, error = run(capsys, command, f"{here}:talking", "--json")
    assert (code, printed.count("\n"), error) == (0, 1, "I print what I like\n")
    assert json.loads(printed)
    code, printed, _ = run(capsys, command, f"{here}:endless", "--json")
    assert (code, json.loads(printed)) == (130, {"error": "interrupted"})


def test_plan_is_a_table_and_one_json_object(here: str, capsys: Any) -> None:
    arguments = ["plan", f"{here}:make", "--batch-size", 30, "--memory", "1MB", "--json"]
    code, printed, _ = run(capsys, *arguments, "--plot", "memory.svg")
    told = json.loads(printed)
    assert code == 0
    assert Plan.from_json(json.dumps(told["plan"])) == Plan(rows=30, micro_batch=30)
    peak = max(sum(one["bytes"]) for one in told["ledger"]["moments"])
    assert peak == told["peak"] <= told["budget"] == 10**6
    assert Path("memory.svg").exists()


@pytest.mark.parametrize(("recompute", "blocks"), POLICIES.items())
def test_recompute_is_a_policy_or_a_pattern(here: str, recompute: str, blocks: int) -> None:
    options = [f"{here}:net", "--memory", "1MB", "--recompute", recompute]
    found, _ = plan_action.plan(parse(ArgumentParser(), PlanOptions, options))
    assert len(found["plan"]["blocks"]) == blocks
