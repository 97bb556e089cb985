"""The same verbs on the command line: `anybatch train`, `anybatch eval`, `anybatch check`."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from anybatch import data, recipes, target
from anybatch.check import check
from anybatch.errors import AnybatchError, CheckpointError, PlanError
from anybatch.meetings import CHOICES
from anybatch.step import Step
from anybatch.train import checkpoint, learning_rate
from anybatch.train.metrics import accuracy
from anybatch.train.progress import peak_bytes
from anybatch.train.trainer import BEST, LAST, Trainer
from anybatch.units import format_bytes, format_count, format_seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 refused or not exact, 130 interrupted.

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
    return 0 if result.get("exact", True) else 1


def _train(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    _check(options)
    recipe = recipes.find(options.recipe)
    split = data.load(options.data)
    device = _device(options.device)
    trainer, out = _prepare(options, recipe, split, device)
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
    seconds = trainer.seconds - before_seconds
    updates_per_epoch = -(-trainer.train.count // options.batch_size)
    rows = (trainer.updates - before_updates) * trainer.train.count / updates_per_epoch
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


def _check(options: argparse.Namespace) -> None:
    """Refuse numbers that nothing could be trained with, before anything is read or written."""
    ranges = {
        "epochs": ("at least 1", options.epochs >= 1),
        "batch-size": ("at least 1", options.batch_size >= 1),
        "lr": ("above 0", 0 < options.lr < math.inf),
        "momentum": ("from 0 to below 1", 0 <= options.momentum < 1),
        "label-smoothing": ("from 0 to 1", 0 <= options.label_smoothing <= 1),
        "warm-up": ("at least 0", options.warm_up >= 0),
        "validation": ("from 0 to below 1", 0 <= options.validation < 1),
        "seed": ("from 0 to 2**63 - 1", 0 <= options.seed < 2**63),
    }
    for name, (range_, holds) in ranges.items():
        if not holds:
            value = getattr(options, name.replace("-", "_"))
            raise PlanError(f"Expected --{name} to be {range_}, got {value}. See anybatch train --help.")
    if options.resume and not Path(options.resume, LAST).is_file():
        raise CheckpointError(
            f"{options.resume}: expected the folder of a run, got no file {LAST} in it. Check the path."
        )


def _prepare(
    options: argparse.Namespace, recipe: recipes.Recipe, split: data.Split, device: torch.device
) -> tuple[Trainer, Path]:
    """Build model, step and trainer as the options say, and go on with an earlier run if they say so."""
    lr = options.lr
    if options.lr_scale:
        lr = learning_rate.scale(
            lr, batch_size=options.batch_size, base_batch_size=options.base_batch_size, rule=options.lr_scale
        )
    torch.manual_seed(options.seed)
    model = recipe.build_model(split.train, torch.Generator().manual_seed(options.seed)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=options.momentum)
    step = Step(
        model,
        recipe.build_loss(options.label_smoothing).to(device),
        optimizer,
        micro_batch=options.micro_batch,
        clip_norm=options.clip_norm,
        scheduler=[learning_rate.warm_up(optimizer, updates=options.warm_up)] if options.warm_up else [],
    )
    train, validation = split.train, None
    if options.validation:
        train, held_out = data.hold_out(split.train, options.validation, options.seed)
        validation = (held_out.inputs, held_out.targets)
    kept = ("recipe", "momentum", "label_smoothing", "clip_norm", "warm_up", "validation")
    out = Path(options.resume) if options.resume else _free_folder(Path(options.out or f"runs/{recipe.name}"))
    trainer = Trainer(
        step,
        (train.inputs, train.targets),
        validation,
        batch_size=options.batch_size,
        seed=options.seed,
        metrics={"accuracy": accuracy},
        best_by="accuracy",
        larger_is_better=True,
        out=out,
        config={"lr": lr, "data": train.name} | {name: getattr(options, name) for name in kept},
        progress=not options.quiet,
    )
    if options.resume:
        trainer.resume(out)
    return trainer, out


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
        recipe.build_loss(config["label_smoothing"]).to(device),
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


def _check_exactness(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    found = target.find(options.target, options.data)
    if options.device != "auto" or ":" not in options.target:  # a function's own choice stands
        found = found.to(_device(options.device))
    report = check(
        found.model,
        found.loss,
        found.batch,
        collate=found.collate,
        micro_batch=options.micro_batch,
        rows=options.rows,
        batch_norm=options.batch_norm,
    )
    return json.loads(report.to_json()), str(report)


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
        torch.ones(1, device=device).item()  # a device without memory, such as meta, has no value to give
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
    train = _command(commands, "train", "train a recipe on real data", _train)
    train.add_argument("recipe", help=f"one of: {', '.join(recipes.names())}")
    add = train.add_argument
    add("--batch-size", type=int, default=128, help="rows of one update, at least 1")
    add("--epochs", type=int, default=10, help="passes over the training rows in all, at least 1")
    add("--lr", type=float, default=0.01, help="learning rate, above 0")
    add("--momentum", type=float, default=0.9, help="momentum of SGD, from 0 to below 1")
    add("--label-smoothing", type=float, default=0.0, help="how far targets are smoothed, from 0 to 1")
    add("--clip-norm", type=float, default=math.inf, help="largest norm of the whole batch's gradient")
    add("--lr-scale", choices=learning_rate.RULES, help="scale --lr from --base-batch-size to --batch-size")
    add("--base-batch-size", type=int, default=128, help="the batch size that --lr was found for")
    add("--warm-up", type=int, default=0, help="updates over which the learning rate rises, 0 for none")
    add("--validation", type=float, default=0.0, help="fraction of training rows held out, from 0 to below 1")
    add("--seed", type=int, default=0, help="determines initial weights and the order of rows")
    add("--out", help="folder for checkpoints and logs, by default runs/RECIPE; no run overwrites another")
    add("--resume", metavar="FOLDER", help="go on with the run in this folder")
    add("--quiet", action="store_true", help="no progress bar and no line per epoch")
    evaluate = _command(commands, "eval", "evaluate a checkpoint on held-out rows", _evaluate)
    evaluate.add_argument("checkpoint", help="a checkpoint, or the folder of a run")
    checked = _command(
        commands, "check", "prove that split equals whole, or find what prevents it", _check_exactness
    )
    checked.add_argument(
        "target", help="package.module:function that returns (model, loss, batch), or a recipe"
    )
    checked.add_argument(
        "--rows", type=int, help="rows to check on, at least 2; a few that differ if not given"
    )
    checked.add_argument("--batch-norm", choices=CHOICES, help="what a step does with BatchNorm")
    return parser


def _command(commands: Any, name: str, purpose: str, run: Callable[..., Any]) -> argparse.ArgumentParser:
    """A command with the options that all commands share."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=purpose, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--data", default="digits", help="digits, or a folder with MNIST (IDX) or CIFAR-10 (binary) files")
    add(
        "--micro-batch", type=int, help="rows that go through the model together; all of a batch if not given"
    )
    add("--device", default="auto", help="cpu, cuda, cuda:1 or auto")
    add("--json", action="store_true", help="print one JSON object as the last line")
    return parser
