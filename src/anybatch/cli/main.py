"""The command line: `anybatch train`, `eval`, `export`, `check`, `plan`, `report` and `selftest`."""

import argparse
import json
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from anybatch.batchnorm import BATCH_NORM_CHOICES
from anybatch.check import check, refuse_without_data
from anybatch.cli import plan as plan_action, selftest, target, train as actions
from anybatch.core import AnybatchError, DataError, format_bytes
from anybatch.memory import CARDS_BY_NAME
from anybatch.observe import report_page
from anybatch.parallel import is_launched, rank, record
from anybatch.precision import NAMED, NON_FINITE_POLICIES
from anybatch.recipes import RECIPES
from anybatch.train import files, to_json, version

_TARGET = "package.module:function that returns (model, loss, batch), or a recipe"
_ROWS = "package.module:function that returns (model, loss, training rows, validation rows)"
_RECIPE_OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "norm": (str, "resnet: group (GroupNorm), whole (BatchNorm, no split), frozen, or micro (inexact)"),
    "width": (int, "resnet: channels of the first stage"),
    "image_size": (int, "resnet, clip: pixels that images in folders are brought to"),
    "task": (str, "bert: classify (lines are label<TAB>text) or mask (masked language model)"),
    "size": (str, "bert, gpt: tiny or base"),
    "block_size": (int, "bert, gpt: the most tokens or characters of a row"),
    "label_smoothing": (float, "lenet5, resnet: how far targets are smoothed, from 0 to 1"),
}
_DEVICE = "cpu, an accelerator as torch names it, or auto"
_PRECISION = f"{', '.join(NAMED)}: dtypes to store and compute in; the true ones store weights in 16 bits"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 1 refused or not exact, 2 not checked, 130 stopped."""
    options = _parser().parse_args(arguments)
    try:
        if getattr(options, "resume", None):
            options = _resumed(options.resume, arguments)
        if getattr(options, "ranks", 1) > 1 and not is_launched():
            actions.start_ranks(options, sys.argv[1:] if arguments is None else arguments)
            return 0  # rank 0 has printed the result
        # Output of the user's code must not mix with the result.
        with redirect_stdout(sys.stderr) if options.json else nullcontext():
            result, text = options.run(options)
    except AnybatchError as error:
        if is_launched():
            record(error)  # printed once, not by each rank
            return 1
        return _refuse(options, str(error))
    except Exception as error:
        if options.command not in ("check", "plan"):
            raise
        # The target is the user's code, which may raise anything.
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = str(error).strip().partition("\n")[0]
        message = f"{type(error).__name__}: {message} ({place.filename}:{place.lineno})"
        return _refuse(options, f"could not {options.command}: {message}")
    except KeyboardInterrupt as stop:
        if not is_launched():
            _refuse(options, f"interrupted. {stop}".rstrip(". "))
        return 130
    if rank():
        return 0
    if options.json or text:
        print(to_json(result) if options.json else text)
    return 0 if result.get("exact", True) else 1


def _refuse(options: argparse.Namespace, message: str) -> int:
    print(f"anybatch {options.command}: {message}", file=sys.stderr)
    if options.json:
        print(to_json({"error": message}))
    return 2 if options.command == "check" else 1


def _resumed(folder: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    kept = actions.read_settings(folder)
    parser = _parser(kept)
    options = parser.parse_args(arguments)
    if kept:
        actions.check_same(parser.parse_args(["train", "--resume", folder]), options)
    return options


def _check(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    actions.check_ranges(options)
    found = target.find(options.target, options.data, actions.recipe_options(options))
    refuse_without_data(found.model, found.loss)  # such a model cannot be moved either
    if options.device != "auto" or ":" not in options.target:  # else keep the device of the user's function
        found = found.to(actions.find_device(options.device), rows=True)
    report = check(
        found.model,
        found.loss,
        found.train,
        collate=found.collate,
        micro_batch=options.micro_batch,
        rows=options.rows,
        options=replace(found.options, batch_norm=options.batch_norm or found.options.batch_norm),
    )
    return json.loads(report.to_json()), str(report)


def _report(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Write the page of a run, or of several over one another, from their logs."""
    first, *others = options.folders
    page = report_page(first, *others).encode()
    default = Path(first).parent / "compare.html" if others else Path(first, "report.html")
    path = Path(options.out or default)
    files.write(path, lambda file: file.write_bytes(page), "Name another with --out.", DataError)
    return {"report": str(path), "bytes": len(page)}, f"report      {path}  ({format_bytes(len(page))})"


def _parser(settings: Mapping[str, Any] | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands; `settings` are the defaults of `train` for a resume."""
    parser = argparse.ArgumentParser(
        prog="anybatch", description="Train with any batch size in the memory you have, and the same result."
    )
    parser.add_argument("--version", action="version", version=f"anybatch {version() or 'unknown'}")
    commands = parser.add_subparsers(dest="command", required=True)
    together = "rows that go through the model together; if not given,"
    within = f"{together} what is fastest within --memory, or all of a batch without it"
    purpose = "train a recipe, or a model of your own"
    train = _command(commands, "train", purpose, actions.train, micro_batch=within)
    named = f"one of: {', '.join(RECIPES)}, or {_ROWS}; needed unless --resume finds it"
    train.add_argument("recipe", nargs="?", help=named)
    add = train.add_argument
    add("--batch-size", type=int, default=128, help="rows of one update, at least 1")
    add("--memory", help='budget: "12GB", "2GiB", "80%%" or auto; the fastest plan within it is chosen')
    ranks = "processes that share out each batch on this machine, at least 1"
    add("--ranks", type=int, default=1, help=ranks)
    add("--epochs", type=int, default=10, help="passes over the training rows in all, at least 1")
    named = "if not given, the recipe's own, or adamw"
    add("--optimizer", choices=tuple(actions.OPTIMIZERS), help=named)
    add("--lr", type=float, help="learning rate, above 0; if not given, the recipe's own, or 0.001")
    add("--momentum", type=float, default=0.9, help="momentum of SGD, from 0 to below 1")
    add("--clip-norm", type=float, default=math.inf, help="largest norm of the whole batch's gradient")
    add("--precision", choices=tuple(NAMED), default="float32", metavar="NAME", help=_PRECISION)
    non_finite = "what to do with rows that give NaN or infinity"
    compiled = "compile the model with torch.compile, which takes a C++ compiler"
    add("--compile", action=argparse.BooleanOptionalAction, default=False, help=compiled)
    add("--non-finite", choices=NON_FINITE_POLICIES, default="raise", help=non_finite)
    add("--warm-up", type=int, default=0, help="updates over which the learning rate rises, 0 for none")
    add("--validation", type=float, default=0.0, help="fraction of training rows held out, from 0 to below 1")
    add("--patience", type=int, help="stop after so many epochs without a better validation accuracy")
    add("--ema", type=float, help="average the weights with this decay, from 0 to below 1, such as 0.99")
    add("--keep", type=int, default=0, help="checkpoints to keep, besides the best one")
    add("--save-minutes", type=float, default=0.0, help="also save after so many minutes, 0 for never")
    add("--seed", type=int, default=0, help="determines initial weights and the order of rows")
    add("--out", help="folder for checkpoints and logs, by default runs/RECIPE; no run overwrites another")
    add("--resume", metavar="FOLDER", help="go on with the run in this folder, with the options it had")
    add("--servers", type=int, help="parameter servers, at least 1; if not given, train in this process")
    add("--workers", type=int, help="with --servers: processes that compute gradients; if not given, 2")
    on = "with --servers: HOST:PORT of a Ray cluster; if not given, Ray is started on this machine"
    add("--cluster", metavar="ADDRESS", help=on)
    add("--quiet", action="store_true", help="no progress bar and no line per epoch")
    _add_recipe_options(train)
    train.set_defaults(**(settings or {}))
    purpose = "evaluate a checkpoint on held-out rows"
    evaluate = _command(commands, "eval", purpose, actions.evaluate, micro_batch=f"{together} a batch")
    evaluate.add_argument("checkpoint", help="a checkpoint, or the folder of a run")
    purpose = "write the weights of a checkpoint alone, as a plain state dict"
    exported: argparse.ArgumentParser = commands.add_parser("export", help=purpose)
    exported.set_defaults(run=actions.export)
    add = exported.add_argument
    named = "a checkpoint, or the folder of a run: the best one, or the last where there is none"
    add("checkpoint", help=named)
    add("--out", required=True, help="file to write: .safetensors, or .pt or .pth for torch.load")
    add("--ema", action="store_true", help="the averaged weights of a run with --ema")
    purpose = "prove that split equals whole, or find what prevents it"
    tried = "a size of micro-batches to be tried besides those that are tried anyway"
    checked = _command(commands, "check", purpose, _check, micro_batch=tried)
    add = checked.add_argument
    add("target", help=_TARGET)
    _add_recipe_options(checked)
    add("--rows", type=int, help="rows to check on, at least 2; a few that differ if not given")
    add("--batch-norm", choices=BATCH_NORM_CHOICES, help="what a step does with BatchNorm")
    purpose = "the fastest plan within a budget, before anything runs"
    within = f"{together} what is fastest within --memory, or all of a batch with --memory none"
    there = f"{_DEVICE} for where the target's model is, or a card that need not be here: "
    there += ", ".join(CARDS_BY_NAME)
    planned = _command(commands, "plan", purpose, plan_action.plan, micro_batch=within, device=there)
    add = planned.add_argument
    add("target", help=_TARGET)
    _add_recipe_options(planned)
    add("--batch-size", type=int, help="rows of one update; those of the target's batch if not given")
    add("--memory", default="auto", help='budget: "12GB", "2GiB", "80%%", auto, or none')
    optimizers = tuple(plan_action.OPTIMIZERS)
    add("--optimizer", choices=optimizers, help="where the target has none: the recipe's own, or adamw")
    add("--recompute", help="all, selective, offload, or a pattern of module names; chosen if not given")
    add("--batch-norm", choices=BATCH_NORM_CHOICES, help="what a step does with BatchNorm")
    add("--precision", choices=tuple(NAMED), default="float32", metavar="NAME", help=_PRECISION)
    add("--plot", metavar="FILE", help="draw memory over the step: .png, .svg or .pdf")
    about = "write the page of a run, or of several over one another: one file of HTML with charts"
    reported = commands.add_parser("report", help=about)
    reported.set_defaults(run=_report)
    add = reported.add_argument
    add("folders", metavar="RUN", nargs="+", help="the folder of a run; several are compared, at most 8")
    page = "the page; by default report.html in the folder of the run, or compare.html beside the first"
    add("--out", metavar="FILE", help=page)
    purpose = "compare small models on a device with the CPU's whole batch; a table for an issue"
    tested: argparse.ArgumentParser = commands.add_parser("selftest", help=purpose)
    tested.set_defaults(run=selftest.selftest, version=version() or "unknown")
    tested.add_argument("--device", default="auto", help=_DEVICE)
    told = "print one JSON object and nothing else on standard output"
    for command in (train, evaluate, exported, checked, planned, reported, tested):
        command.add_argument("--json", action="store_true", help=told)
    return parser


def _add_recipe_options(parser: argparse.ArgumentParser) -> None:
    for name, (kind, purpose) in _RECIPE_OPTIONS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, help=f"{purpose}; default: the recipe's")


def _command(
    commands: Any, name: str, purpose: str, run: Callable[..., Any], micro_batch: str, device: str = _DEVICE
) -> argparse.ArgumentParser:
    shows_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(name, help=purpose, formatter_class=shows_defaults)
    parser.set_defaults(run=run)
    kinds = "digits, a folder (MNIST, CIFAR-10, images by class), python, or a text; default: the recipe's"
    parser.add_argument("--data", help=kinds)
    parser.add_argument("--micro-batch", type=int, help=micro_batch)
    parser.add_argument("--device", default="auto", help=device)
    return parser
