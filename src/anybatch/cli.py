"""The same verbs on the command line: `anybatch train`, `anybatch eval`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from anybatch import data, recipes, rng
from anybatch.data import Dataset
from anybatch.errors import AnybatchError, CheckpointError, PlanError
from anybatch.step import Step
from anybatch.train import checkpoint, learning_rate
from anybatch.train.metrics import accuracy
from anybatch.train.progress import ProgressBar, peak_bytes
from anybatch.train.trainer import BEST, LAST, Trainer
from anybatch.units import format_bytes, format_count, format_seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 refused with a message, 130 interrupted.

    Example:
        >>> main(["eval", "nowhere.safetensors", "--data", "digits"])
        1
    """
    options = _parser().parse_args(arguments)
    try:
        result, text = options.run(options)
    except AnybatchError as error:
        print(f"anybatch {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"anybatch {options.command}: interrupted", file=sys.stderr)
        return 130
    print(text)
    if options.json:
        print(json.dumps(result))
    return 0


def _train(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    recipe = recipes.find(options.recipe)
    split = data.load(options.data)
    device = _device(options.device)
    lr = options.lr
    if options.lr_scale:
        lr = learning_rate.scale(
            lr, batch_size=options.batch_size, base_batch_size=options.base_batch_size, rule=options.lr_scale
        )
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(rng.derive_seed(options.seed, "model"))
    model = recipe.build_model(split.train, generator).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=options.momentum)
    schedulers = [learning_rate.warm_up(optimizer, updates=options.warm_up)] if options.warm_up else []
    step = Step(
        model,
        recipe.build_loss().to(device),
        optimizer,
        micro_batch=options.micro_batch,
        clip_norm=options.clip_norm,
        scheduler=schedulers,
    )
    train, validation = _hold_out(split.train, options.validation, options.seed)
    out = Path(options.resume) if options.resume else _free_folder(Path(options.out or f"runs/{recipe.name}"))
    trainer = Trainer(
        step,
        train,
        validation,
        batch_size=options.batch_size,
        seed=options.seed,
        metrics={"accuracy": accuracy},
        best_by="accuracy",
        larger_is_better=True,
        out=out,
        config={
            "recipe": recipe.name,
            "data": str(options.data),
            "lr": lr,
            "momentum": options.momentum,
            "warm_up": options.warm_up,
        },
        watchers=() if options.quiet else (ProgressBar(device),),
    )
    if options.resume:
        _resume(trainer, out)
    before_updates, before_seconds = trainer.updates, trainer.seconds
    try:
        trainer.fit(epochs=options.epochs)
    except KeyboardInterrupt:
        print(
            f"stopped after {trainer.updates} updates; go on with the same command and --resume {out}",
            file=sys.stderr,
        )
        raise
    test = trainer.evaluate((split.test.inputs, split.test.targets))
    rows = (trainer.updates - before_updates) * options.batch_size
    seconds = trainer.seconds - before_seconds
    result = {
        "accuracy": test["accuracy"],
        "loss": test["loss"],
        "updates": trainer.updates,
        "seconds": seconds,
        "samples_per_second": rows / seconds if seconds else 0.0,
        "peak_bytes": peak_bytes(device),
        "checkpoint": str(out / LAST),
        "log": str(out / "log.txt"),
    }
    return result, _summary(result, out, trainer)


def _summary(result: dict[str, Any], out: Path, trainer: Trainer) -> str:
    best = (
        f"best        {out / BEST}  (validation accuracy {trainer.best:.4f})\n"
        if trainer.best is not None
        else ""
    )
    return (
        f"trained     {format_count(result['updates'])} updates in {format_seconds(result['seconds'])}, "
        f"{format_count(result['samples_per_second'])} samples/s, peak memory "
        f"{format_bytes(result['peak_bytes'])}\n"
        f"checkpoint  {result['checkpoint']}\n{best}"
        f"logs        {out / 'log.txt'}, {out / 'log.jsonl'}\n"
        f"test loss {result['loss']:.4f}\n"
        f"test accuracy {result['accuracy']:.4f}"
    )


def _evaluate(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    path = Path(options.checkpoint)
    if path.is_dir():
        path = path / (BEST if (path / BEST).exists() else LAST)
    found = checkpoint.load(path)
    config = found.progress.get("config", {})
    if "recipe" not in config:
        raise CheckpointError(
            f"{path}: expected a checkpoint of a recipe, got one without a recipe's name. Load it from "
            "Python instead."
        )
    recipe = recipes.find(config["recipe"])
    split = data.load(options.data)
    device = _device(options.device)
    model = recipe.build_model(split.test, torch.Generator().manual_seed(0)).to(device)
    checkpoint.restore(found, model=model)
    step = Step(
        model,
        recipe.build_loss().to(device),
        torch.optim.SGD(model.parameters(), lr=1.0),
        micro_batch=options.micro_batch,
    )
    rows = (split.test.inputs, split.test.targets)
    values = Trainer(step, rows, batch_size=max(1, len(split.test)), metrics={"accuracy": accuracy}).evaluate(
        rows
    )
    result = {
        "accuracy": values["accuracy"],
        "loss": values["loss"],
        "rows": len(split.test),
        "checkpoint": str(path),
    }
    text = f"checkpoint  {path}\ntest loss {values['loss']:.4f}\ntest accuracy {values['accuracy']:.4f}"
    return result, text


def _resume(trainer: Trainer, out: Path) -> None:
    """Go on in a folder, if it is the same experiment: the cut may differ, what determines the result "
    "may not."""
    trainer.resume(out)
    # The trainer's own config is what this command line says; the file's is what the run began with.
    was = checkpoint.load(out / LAST).progress["config"]
    changed = {
        name: (was.get(name), value)
        for name, value in trainer.config.items()
        if name != "data" and was.get(name) != value
    }
    if changed:
        differences = ", ".join(f"{name} {old} there and {new} here" for name, (old, new) in changed.items())
        raise CheckpointError(
            f"{out}: expected a run with the same options, got {differences}. Repeat the options of the "
            "first start."
        )


def _hold_out(train: Dataset, fraction: float, seed: int) -> tuple[Any, Any]:
    """Split validation rows off the training rows, in an order of their own; none for a fraction of 0."""
    if not 0 <= fraction < 1:
        raise PlanError(
            f"Expected --validation to be a fraction from 0 to below 1, got {fraction}. Use 0.1 for a tenth."
        )
    held_out = round(len(train) * fraction)
    if not held_out:
        return (train.inputs, train.targets), None
    generator = torch.Generator().manual_seed(rng.derive_seed(seed, "validation"))
    order = torch.randperm(len(train), generator=generator)
    first, rest = order[:held_out].sort().values, order[held_out:].sort().values
    return (train.inputs[rest], train.targets[rest]), (train.inputs[first], train.targets[first])


def _free_folder(wanted: Path) -> Path:
    """The folder wanted, or the next one that holds no earlier run: no run ever overwrites another."""
    folder, number = wanted, 1
    while (folder / LAST).exists() or (folder / "log.txt").exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise PlanError(
            f"Expected a device of this machine, got {name!r} ({reason}). Use cpu, cuda or auto."
        ) from None
    return device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="anybatch", description="Train with any batch size in the memory you have, and the same result."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train", help="train a recipe on real data", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    train.set_defaults(run=_train)
    train.add_argument("recipe", help=f"one of: {', '.join(recipes.names())}")
    train.add_argument("--batch-size", type=int, default=128, help="rows of one update")
    train.add_argument(
        "--epochs", type=int, default=10, help="passes over the training rows, those before a resume included"
    )
    train.add_argument("--lr", type=float, default=0.01, help="learning rate")
    train.add_argument("--momentum", type=float, default=0.9, help="momentum of SGD")
    train.add_argument(
        "--clip-norm",
        type=float,
        default=float("inf"),
        help="largest norm of the gradient of the whole batch",
    )
    train.add_argument(
        "--lr-scale",
        choices=learning_rate.RULES,
        help="scale the learning rate from --base-batch-size to --batch-size",
    )
    train.add_argument("--base-batch-size", type=int, default=128, help="batch size that --lr was found for")
    train.add_argument(
        "--warm-up", type=int, default=0, help="updates over which the learning rate rises to its value"
    )
    train.add_argument(
        "--validation",
        type=float,
        default=0.0,
        help="fraction of the training rows held out to choose the best checkpoint",
    )
    train.add_argument("--seed", type=int, default=0, help="determines initial weights and the order of rows")
    train.add_argument(
        "--out",
        help="folder for checkpoints and logs; default runs/RECIPE. An earlier run is never overwritten",
    )
    train.add_argument("--resume", metavar="FOLDER", help="go on with the run in this folder")
    train.add_argument("--quiet", action="store_true", help="no progress bar and no line per epoch")
    evaluate = commands.add_parser(
        "eval",
        help="evaluate a checkpoint on held-out rows",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    evaluate.set_defaults(run=_evaluate)
    evaluate.add_argument("checkpoint", help="a checkpoint, or the folder of a run")
    for command in (train, evaluate):
        command.add_argument(
            "--data", default="digits", help="digits, or a folder with MNIST (IDX) or CIFAR-10 (binary) files"
        )
        command.add_argument(
            "--micro-batch", type=int, help="rows that go through the model together; default: all of a batch"
        )
        command.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, auto")
        command.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser
