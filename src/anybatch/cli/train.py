"""`anybatch train` and `anybatch eval`: from options to a result, as numbers and as text."""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from anybatch.core import CheckpointError, DataError, PlanError, format_bytes, format_count, format_seconds
from anybatch.data import Split, hold_out, load
from anybatch.recipes import Recipe, find_recipe, recipe_names
from anybatch.step import Step
from anybatch.train import (
    BEST,
    LAST,
    Trainer,
    accuracy,
    checkpoint,
    learning_rate,
    peak_bytes,
    to_json,
    write_whole,
)

SETTINGS = "settings.json"  # in the folder of a run: the options it was started with
_NOT_KEPT = ("command", "run", "resume", "out", "quiet", "json")
_MAY_CHANGE = (
    "epochs",
    "data",
    "micro_batch",
    "memory",
    "device",
)  # the trainer looks at the rows themselves


def train(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """`anybatch train`: train a recipe; the result as numbers and as text."""
    _check(options)
    recipe = find_recipe(options.recipe)
    split = load(options.data)
    device = find_device(options.device)
    trainer, out = _prepare(options, recipe, split, device)
    _write_settings(options, out / SETTINGS)
    before_updates, before_seconds = trainer.updates, trainer.seconds
    try:
        trainer.fit(epochs=options.epochs)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped after {trainer.updates} updates; go on with: anybatch train --resume {out}"
        ) from None
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
    """Refuse options out of range, before anything is read or written."""
    check_rows(options)
    _check_range(options, "epochs", "at least 1", options.epochs >= 1)
    _check_range(options, "lr", "above 0", 0 < options.lr < math.inf)
    _check_range(options, "momentum", "from 0 to below 1", 0 <= options.momentum < 1)
    _check_range(options, "label-smoothing", "from 0 to 1", 0 <= options.label_smoothing <= 1)
    _check_range(options, "warm-up", "at least 0", options.warm_up >= 0)
    _check_range(options, "validation", "from 0 to below 1", 0 <= options.validation < 1)
    _check_range(options, "seed", "from 0 to 2**63 - 1", 0 <= options.seed < 2**63)
    if options.resume and not Path(options.resume, LAST).is_file():
        raise CheckpointError(
            f"{options.resume}: expected the folder of a run, got no file {LAST} in it. Check the path."
        )
    if options.recipe is None and options.resume:
        raise CheckpointError(
            f"{options.resume}: expected {SETTINGS} with the options of the run, got no such file. Name the "
            "recipe and all options that it was started with."
        )
    if options.recipe is None:
        raise PlanError(f"Expected a recipe, got none. Name one of: {', '.join(recipe_names())}.")


def read_settings(folder: str) -> dict[str, Any]:
    """The options that the run in a folder was started with; none where an earlier version wrote it."""
    path = Path(folder, SETTINGS)
    try:
        kept = dict(json.loads(path.read_bytes()))
        if any(isinstance(value, dict | list) for value in kept.values()):
            raise ValueError("other values")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected the options of a run as JSON, got {error}. Delete the file, and name the "
            "recipe and all options that the run was started with."
        ) from None
    return {name: value for name, value in kept.items() if name not in _NOT_KEPT}


def check_same(was: argparse.Namespace, now: argparse.Namespace) -> None:
    """Refuse options that would make it another run."""
    changed: list[str] = []
    for name, had in vars(was).items():
        given = getattr(now, name)
        if name not in (*_NOT_KEPT, *_MAY_CHANGE) and given != had:
            option = name if name == "recipe" else f"--{name.replace('_', '-')}"
            changed.append(f"{option} {given} where it had {had}")
    if now.out and Path(now.out).resolve() != Path(now.resume).resolve():
        changed.append(f"--out {now.out}")
    if changed:
        raise CheckpointError(
            f"{now.resume}: expected the options of the run, got {', '.join(changed)}. Leave them out, or "
            "start a new run without --resume."
        )


def _write_settings(options: argparse.Namespace, path: Path) -> None:
    kept = {name: value for name, value in vars(options).items() if name not in _NOT_KEPT}
    if options.clip_norm == math.inf:
        kept["clip_norm"] = "inf"  # JSON has no number for it
    if options.data != "digits":
        kept["data"] = os.path.abspath(options.data)  # a run may go on from another folder
    try:
        write_whole(path, lambda file: file.write_text(to_json(kept) + "\n", encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{path}: expected a file that can be written, got: {error.strerror}. Choose another folder."
        ) from None


def check_rows(options: argparse.Namespace) -> None:
    """Refuse numbers of rows that are too small."""
    for name, least in {"batch-size": 1, "micro-batch": 1, "rows": 2}.items():
        rows = getattr(options, name.replace("-", "_"), None)  # not every command has each
        _check_range(options, name, f"at least {least}", rows is None or rows >= least)


def _check_range(options: argparse.Namespace, name: str, range_: str, holds: bool) -> None:
    if not holds:
        value = getattr(options, name.replace("-", "_"))
        raise PlanError(
            f"Expected --{name} to be {range_}, got {value}. See anybatch {options.command} --help."
        )


def _prepare(
    options: argparse.Namespace, recipe: Recipe, split: Split, device: torch.device
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
        memory=options.memory,
        clip_norm=options.clip_norm,
        precision=options.precision,
        non_finite=options.non_finite,
        scheduler=[learning_rate.warm_up(optimizer, updates=options.warm_up)] if options.warm_up else [],
    )
    train, validation = split.train, None
    if options.validation:
        train, held_out = hold_out(split.train, options.validation, options.seed)
        validation = (held_out.inputs, held_out.targets)
    if options.memory and not options.resume:
        # Planned here, and remembered: a budget in which nothing fits is refused before there is a folder.
        first = slice(options.batch_size)
        step.foresee((train.inputs[first].to(device), train.targets[first].to(device)))
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
    best = ""
    if trainer.best is not None:
        best = f"best        {out / BEST}  (validation accuracy {trainer.best:.4f})\n"
    return (
        f"trained     {format_count(result['updates'])} updates in {format_seconds(result['seconds'])}, "
        f"{format_count(result['samples_per_second'])} samples/s, peak memory "
        f"{format_bytes(result['peak_bytes'])}\n"
        f"checkpoint  {result['checkpoint']}\n{best}"
        f"logs        {out / 'log.txt'}, {out / 'log.jsonl'}\n"
        f"test loss {result['loss']:.4f}\n"
        f"test accuracy {result['accuracy']:.4f}"
    )


def evaluate(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """`anybatch eval`: a checkpoint on held-out rows."""
    check_rows(options)
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
    recipe = find_recipe(config["recipe"])
    split = load(options.data)
    device = find_device(options.device)
    model = recipe.build_model(split.test, torch.Generator().manual_seed(0)).to(device)
    checkpoint.restore(found, model=model)
    step = Step(
        model,
        recipe.build_loss(config["label_smoothing"]).to(device),
        torch.optim.SGD(model.parameters(), lr=1.0),
        micro_batch=options.micro_batch,
    )
    rows = (split.test.inputs, split.test.targets)
    trainer = Trainer(step, rows, batch_size=len(split.test), metrics={"accuracy": accuracy})
    values = trainer.evaluate(rows)
    loss, right = values["loss"], values["accuracy"]
    text = f"checkpoint  {path}\ntest loss {loss:.4f}\ntest accuracy {right:.4f}"
    return {"accuracy": right, "loss": loss, "rows": len(split.test), "checkpoint": str(path)}, text


def _free_folder(wanted: Path) -> Path:
    """The folder wanted, or the next one that holds no earlier run: no run ever overwrites another."""
    folder, number = wanted, 1
    while any((folder / name).exists() for name in (LAST, SETTINGS, "log.txt")):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def find_device(name: str) -> torch.device:
    """The device of a name; "auto" is CUDA where there is any."""
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
