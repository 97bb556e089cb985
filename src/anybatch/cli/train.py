"""`anybatch train`, `eval` and `export`: from options to a result, as numbers and as text."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LinearLR

from anybatch.cli import options as kinds
from anybatch.cli.target import find_training
from anybatch.core import Callback, accelerator, counted, errors, format_bytes, format_count, format_seconds
from anybatch.memory import find_device as meter_device, parse_memory
from anybatch.observe import GradientFlow
from anybatch.parallel import ParameterServer, is_launched, launch, rank, start_under_torchrun
from anybatch.recipes import RECIPES, Training, find_recipe
from anybatch.step import Step
from anybatch.train import (
    EMA,
    EarlyStopping,
    Metrics,
    Trainer,
    accuracy,
    checkpoint,
    files,
    peak_bytes,
    to_json,
)

_FILES = (kinds.SETTINGS, "log.jsonl")  # of a run, besides its checkpoints

#: The optimizers of `--optimizer`.
OPTIMIZERS: dict[str, Any] = {name.lower(): getattr(torch.optim, name) for name in ("SGD", "AdamW", "Adam")}


def train(options: kinds.Run) -> tuple[dict[str, Any], str]:
    """Run `anybatch train`: train a recipe or a target; return the result as numbers and as text."""
    if options.print_config:
        kept = kinds.to_keep(options)
        if ":" not in options.recipe:
            find_recipe(options.recipe)
        return kept, json.dumps(kept, indent=2)
    _check(options)
    start_under_torchrun()
    torch.manual_seed(options.seed)  # before the user's function makes its model
    training, options = _found(options)
    device = find_device(options.device)
    trainer, out = _prepare(options, training.to(device), device)
    if not rank():
        _write_settings(options, out / kinds.SETTINGS)
    before_updates, before_seconds = trainer.updates, trainer.seconds
    strategy = trainer.step.strategy
    servers = strategy if isinstance(strategy, ParameterServer) else None
    try:
        with servers or nullcontext():
            trainer.fit(epochs=options.epochs)
    except errors.AnybatchError:
        if not (trainer.updates or rank()):
            _remove_files(out)
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped after {trainer.updates} updates; go on with: anybatch train --resume {out}"
        ) from None
    test = {} if training.test is None else trainer.evaluate(training.test)
    if test and not rank():
        with (out / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(to_json({"event": "test", "updates": trainer.updates, **test}) + "\n")
    seconds = trainer.seconds - before_seconds
    rows_per_update = (trainer.train.count or 0) / (trainer.train.per_epoch(options.batch_size) or 1)
    rows = (trainer.updates - before_updates) * rows_per_update
    result = {
        **_told(test),
        "updates": trainer.updates,
        "seconds": seconds,
        "samples_per_second": rows / seconds if seconds else 0.0,
        "peak_bytes": peak_bytes(device),
        "checkpoint": str((checkpoint.folders(out) or [out])[0]),
        "log": str(out / "log.jsonl"),
        **({"servers": dict(servers.counts)} if servers else {}),
    }
    return result, _summary(result, out, trainer)


def starts_ranks(options: kinds.Run, arguments: Sequence[str]) -> bool:
    """Run `anybatch train --ranks N` if N is above 1; raise RankError if a rank fails."""
    if options.ranks == 1 or options.print_config or is_launched():
        return False
    _check(options)
    out = _folder(options)
    try:
        launch(options.ranks, ["anybatch", *arguments, "--out", str(out)])
    except (errors.RankError, KeyboardInterrupt) as error:
        how = f"Go on with: anybatch train --resume {out}" if checkpoint.folders(out) else ""
        raise type(error)(f"{error} {how}".strip()) from None
    return True


def recipe_options(options: kinds.Command) -> dict[str, Any]:
    """Return the options of recipes that were given."""
    names = dict.fromkeys(option for recipe in RECIPES.values() for option in recipe.options)
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _found(options: kinds.Run) -> tuple[Training, kinds.Run]:
    """Return the training, and the options with what its recipe decides."""
    training = find_training(options.recipe, options.data, options.seed, recipe_options(options))
    if training.optimizer is not None:
        if given := [name for name in ("optimizer", "lr") if getattr(options, name) is not None]:
            raise errors.PlanError(
                f"Expected no options for the optimizer of {training.name}, which makes its own, got "
                f"{', '.join(given)}. Leave them out."
            )
        return training, options
    data, optimizer, lr = None, "adamw", 1e-3
    if ":" not in options.recipe:
        own = find_recipe(options.recipe)
        data, optimizer, lr = options.data or own.data, own.optimizer, own.lr
    return training, replace(
        options, data=data, optimizer=options.optimizer or optimizer, lr=options.lr or lr
    )


def _check(options: kinds.Run) -> None:
    """Raise an error for options that do not go together."""
    if options.servers is not None and options.ranks > 1:
        raise errors.PlanError(f"Expected --ranks to be 1 with --servers, got {options.ranks}. Change it.")
    if options.patience is not None and not options.validation:
        raise errors.PlanError(
            f"Expected --patience to be given with --validation above 0, got {options.patience}. Change it."
        )
    _servers(options)
    if options.resume and not checkpoint.has_run(Path(options.resume)):
        raise errors.CheckpointError(
            f"{options.resume}: expected the folder of a run, got none with a checkpoint. Check the path."
        )
    if not options.recipe:
        if options.resume:
            raise errors.CheckpointError(
                f"{options.resume}: expected {kinds.SETTINGS} with the options of the run, got no such file. "
                "Name the recipe and all options that it was started with."
            )
        raise errors.PlanError(
            f"Expected a recipe, got none. Name one of: {', '.join(RECIPES)}, or package.module:function."
        )
    if options.resume:
        kinds.check_same(options)


def _remove_files(folder: Path) -> None:
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # folders with other files stay
        folder.rmdir()
        folder.parent.rmdir()


def _write_settings(options: kinds.Run, path: Path) -> None:
    kept = kinds.to_keep(options)
    if options.data is not None and options.data not in [recipe.data for recipe in RECIPES.values()]:
        kept["data"] = os.path.abspath(options.data)  # a resume may have another working directory
    text = to_json(kept) + "\n"
    files.write(
        path, lambda file: file.write_text(text, encoding="utf-8"), "Choose another folder.", errors.DataError
    )


def _prepare(options: kinds.Run, training: Training, device: torch.device) -> tuple[Trainer, Path]:
    model, optimizer = training.model, training.optimizer or _make_optimizer(options, training.model)
    lr = float(optimizer.param_groups[0]["lr"])
    servers = _servers(options)
    step = Step(
        model,
        training.loss,
        optimizer,
        micro_batch=options.micro_batch,
        memory=options.memory,
        clip_norm=options.clip_norm,
        precision=options.precision,
        collate=training.collate,
        # Callbacks do not get the gradients of workers.
        callbacks=[] if servers else [GradientFlow(model, ratio=_has_room(options.memory, model, device))],
        options=replace(
            training.options,
            non_finite=options.non_finite,
            scheduler=_warm_up(optimizer, options.warm_up),
            strategy=servers or "auto",
        ),
    )
    # Held-out rows: a function's are for validation, a recipe's for the test at the end.
    train, validation = training.train, training.test if ":" in options.recipe else None
    if options.validation:
        train, validation = training.hold_out(options.validation, options.seed)
    callbacks: list[Callback] = [_metrics(training)]
    callbacks += [] if options.ema is None else [EMA(options.ema)]
    by, larger = ("accuracy", True) if training.scores else ("loss", False)
    if options.patience is not None:
        callbacks.append(EarlyStopping(by, patience=options.patience, larger_is_better=larger))
    out = _folder(options)
    trainer = Trainer(
        step,
        train,
        validation,
        batch_size=options.batch_size,
        seed=options.seed,
        best_by=by,
        larger_is_better=larger,
        out=out,
        config={"lr": lr, "data": training.name} | _config(options, training),
        progress=not options.quiet,
        save_minutes=options.save_minutes,
        keep=options.keep,
        callbacks=callbacks,
    )
    if options.resume:
        trainer.resume(out)
    return trainer, out


def _servers(options: kinds.Run) -> ParameterServer | None:
    if options.servers is None:
        if given := [name for name in ("workers", "cluster") if getattr(options, name) is not None]:
            raise errors.PlanError(
                f"Expected --servers with --{given[0]}, got none. Say --servers 1 as well."
            )
        return None
    workers = 2 if options.workers is None else options.workers
    return ParameterServer(options.servers, workers, units=max(8, workers), cluster=options.cluster)


def _has_room(memory: str | None, model: torch.nn.Module, device: torch.device) -> bool:
    if memory is None:
        return True
    weights = sum(one.nbytes for one in model.parameters() if not is_lazy(one))
    return 6 * weights <= parse_memory(memory, meter_device(device))  # AdamW needs four; plus a margin


def _make_optimizer(options: kinds.Run, model: torch.nn.Module) -> torch.optim.Optimizer:
    if not [*model.parameters()]:
        raise errors.PlanError(
            f"Expected a model with parameters, got {type(model).__name__} with none. Return the model to "
            "train."
        )
    more = {"momentum": options.momentum} if options.optimizer == "sgd" else {}
    return OPTIMIZERS[options.optimizer or "adamw"](model.parameters(), lr=options.lr, **more)


def _warm_up(optimizer: torch.optim.Optimizer, updates: int) -> list[LinearLR]:
    """Return a scheduler that makes update k at k / updates of the learning rate (Goyal et al. 2017)."""
    return [LinearLR(optimizer, start_factor=1 / updates, total_iters=updates - 1)] if updates else []


def _metrics(training: Training) -> Metrics:
    scores = training.scores
    if not scores:
        return Metrics()
    return Metrics(accuracy=lambda outputs, targets: accuracy(scores(outputs), targets))


def _config(options: kinds.Run, training: Training) -> dict[str, Any]:
    kept = ("recipe", "momentum", "clip_norm", "warm_up", "validation", "patience", "ema")
    config = {name: getattr(options, name) for name in kept}
    if ":" not in options.recipe:
        config |= {**find_recipe(options.recipe).options, **recipe_options(options)}
    if options.optimizer != "sgd":
        config["optimizer"] = options.optimizer
    if training.vocabulary:
        config["vocabulary"] = training.vocabulary
    return config


def _summary(result: dict[str, Any], out: Path, trainer: Trainer) -> str:
    done = (
        f"trained     {format_count(result['updates'])} updates in {format_seconds(result['seconds'])}, "
        f"{format_count(result['samples_per_second'])} samples/s, peak memory "
        f"{format_bytes(result['peak_bytes'])}"
    )
    if not result["seconds"]:
        done = f"finished    already, after {counted(trainer.epoch, 'epoch')}; train on with --epochs"
    lines = [done, f"checkpoint  {result['checkpoint']}"]
    if trainer.stopped:
        lines.append(f"stopped     {trainer.stopped}")
    if trainer.best is not None:
        best = f"(validation {trainer.best_by} {trainer.best:.4f})"
        lines.append(f"best        {out / checkpoint.BEST}  {best}")
    if told := [f"{name} {many:,}" for name, many in result.get("servers", {}).items() if many]:
        lines.append(f"servers     {', '.join(told)}")
    lines += [
        f"log         {result['log']}",
        f"page        written by: anybatch report {out}{_figures(result)}",
    ]
    return "\n".join(lines)


def export(options: kinds.ExportOptions) -> tuple[dict[str, Any], str]:
    """Run `anybatch export`: write only the weights of a checkpoint."""
    path = Path(options.checkpoint)
    found = checkpoint.load(_best(path))
    state = found.model
    if options.ema:
        averages = [kept["average"] for name, kept in found.progress.get("callbacks", ()) if name == "EMA"]
        if not averages or not averages[0]:
            raise errors.CheckpointError(
                f"{found.path}: expected averaged weights, got a checkpoint with {len(averages)} averages. "
                "Train with --ema, or leave --ema out."
            )
        tied = {id(state[name]): value for name, value in averages[0].items()}  # one tensor under two names
        state = {name: tied.get(id(value), value) for name, value in state.items()}
    files.export(state, options.out)
    tensors = sum(isinstance(value, torch.Tensor) for value in state.values())
    text = f"checkpoint  {found.path}\nweights     {options.out}  ({tensors} tensors)"
    return {"weights": options.out, "tensors": tensors, "checkpoint": str(found.path)}, text


def _best(path: Path) -> Path:
    best = path / checkpoint.BEST
    return best if checkpoint.folders(best) else path


def _told(values: dict[str, Any]) -> dict[str, float]:
    return {name: values[name] for name in ("loss", "accuracy") if name in values}


def _figures(result: dict[str, Any]) -> str:
    return "".join(f"\ntest {name} {value:.4f}" for name, value in _told(result).items())


def evaluate(options: kinds.EvalOptions) -> tuple[dict[str, Any], str]:
    """Run `anybatch eval`: evaluate a checkpoint on held-out rows."""
    found = checkpoint.load(_best(Path(options.checkpoint)))
    path = found.path
    config = found.progress.get("config", {})
    if "recipe" not in config:
        raise errors.CheckpointError(
            f"{path}: expected a checkpoint of a recipe, got one without a recipe's name. Load it from "
            "Python instead."
        )
    name, seed = config["recipe"], found.progress["run"]["seed"]
    asked = {} if ":" in name else {one: config[one] for one in find_recipe(name).options if one in config}
    data = options.data
    for settings in [folder / kinds.SETTINGS for folder in path.parents[:2]]:
        data = kinds.read(settings).get("data") if data is None and settings.exists() else data
    torch.manual_seed(seed)  # as `train` does: the user's function may draw its rows
    training = find_training(name, data, seed, asked)
    if training.vocabulary != config.get("vocabulary", ""):
        raise errors.CheckpointError(
            f"{path}: expected the text that the model was trained on, got {training.name} with another "
            f"vocabulary. Name that text, which was {config.get('data')}, with --data."
        )
    training = training.to(find_device(options.device))
    checkpoint.restore(found, model=training.model)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=1.0)  # makes no update
    size, collate = options.micro_batch, training.collate
    step = Step(training.model, training.loss, optimizer, micro_batch=size, collate=collate)
    rows = training.train if training.test is None else training.test
    # The batch size of the training, because a whole-batch loss depends on it.
    trainer = Trainer(
        step, rows, batch_size=found.progress["run"]["batch_size"], callbacks=[_metrics(training)]
    )
    values = trainer.evaluate(rows)
    result = {**_told(values), "rows": trainer.train.count, "checkpoint": str(path)}
    return result, f"checkpoint  {path}{_figures(result)}"


def _folder(options: kinds.Run) -> Path:
    if options.resume:
        return Path(options.resume)
    wanted = folder = Path(options.out or f"runs/{options.recipe.replace(':', '.')}")
    number = 1
    while checkpoint.has_run(folder) or any((folder / name).exists() for name in _FILES):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    if folder != wanted and not rank():
        sys.stderr.write(f"{wanted} holds another run; this one goes into {folder}\n")
    return folder


def find_device(name: str) -> torch.device:
    """Return the device of a name; "auto" is the accelerator if there is one. Each rank has its own."""
    here = accelerator.find() or "cpu"
    if name == "auto":
        name = "cpu" if here == "mps" else here  # MPS has no float64, and nothing was tried there
    if name == here != "cpu" and is_launched():
        name = f"{name}:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # raises on a device without memory, such as meta
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise errors.PlanError(
            f"Expected a device of this machine, got {name!r} ({reason}). Use "
            f"{', '.join({'cpu': 0, here: 0})} or auto."
        ) from None
    return device
