"""The options of each command: dataclasses, whose fields make the parser, the help, configs and settings."""

import argparse
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated as An, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from anybatch import core
from anybatch.batchnorm import BatchNormChoice
from anybatch.memory import CARDS_BY_NAME
from anybatch.parallel import parse_json
from anybatch.precision import NonFinitePolicy, PrecisionName
from anybatch.recipes import RECIPES

C = TypeVar("C", bound="Command")
SETTINGS = "settings.json"  # the first options of a run, in its folder


Range = tuple[str, Callable[[float], bool]]  # in words and as a test

WORD, LATER, APART = "without dashes", "may change in a resume", "not part of a run"  # marks of options
POSITIVE: Range = "at least 1", lambda value: value >= 1
TWO: Range = "at least 2", lambda value: value >= 2
COUNT: Range = "at least 0", lambda value: 0 <= value < math.inf
ABOVE_0: Range = "above 0", lambda value: 0 < value < math.inf
SHARE: Range = "from 0 to below 1", lambda value: 0 <= value < 1
SEED: Range = "from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63
Optimizer = Literal["sgd", "adamw", "adam"]
_TARGET = "package.module:function that returns (model, loss, batch), or a recipe"
_ROWS = "package.module:function that returns (model, loss, training rows, validation rows)"
_TOGETHER = "rows that go through the model together; if not given,"
_DEVICE = "cpu, an accelerator as torch names it, or auto"
_CARDS = f"{_DEVICE}, or a card that need not be here: {', '.join(CARDS_BY_NAME)}"
_BEST = "a checkpoint, or the folder of a run: the best one, or the last where there is none"
_PAGE = "the page; by default report.html in the folder of the run, or compare.html beside the first"
_SIMILAR = {  # parts of other programs' flags, and the option here
    "accum": "micro_batch", "micro": "micro_batch", "clip": "clip_norm", "max_grad": "clip_norm",
    "fp16": "precision", "bf16": "precision", "amp": "precision", "proc": "ranks", "gpus": "ranks",
    "epoch": "epochs", "learning": "lr", "output": "out", "warm": "warm_up",
}  # fmt: skip
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The options of any command."""

    json: An[bool, "print one JSON object and nothing else on standard output", APART] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _DataOptions(Command):
    data: An[str | None, "digits, a folder (MNIST, CIFAR-10, images), python, or a text", LATER] = None
    micro_batch: An[int | None, f"{_TOGETHER} a batch", POSITIVE, LATER] = None
    device: An[str, _DEVICE, LATER] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecipeOptions(_DataOptions):
    norm: An[str | None, "resnet: group (GroupNorm), whole (BatchNorm), frozen, or micro (inexact)"] = None
    width: An[int | None, "resnet: channels of the first stage"] = None
    image_size: An[int | None, "resnet, clip: pixels that images in folders are brought to"] = None
    task: An[str | None, "bert: classify (lines are label<TAB>text) or mask (masked language model)"] = None
    size: An[str | None, "bert, gpt: tiny or base"] = None
    block_size: An[int | None, "bert, gpt: the most tokens or characters of a row"] = None
    label_smoothing: An[float | None, "lenet5, resnet: how far targets are smoothed", SHARE] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(_RecipeOptions):
    """The description of a run: the options of `anybatch train`."""

    recipe: An[str, f"one of {', '.join(RECIPES)}, or {_ROWS}", WORD] = ""
    batch_size: An[int, "rows of one update", POSITIVE] = 128
    micro_batch: An[int | None, f"{_TOGETHER} what fits --memory, or a batch", POSITIVE, LATER] = None
    memory: An[str | None, 'budget: "12GB", "2GiB", "80%" or auto', LATER] = None
    ranks: An[int, "processes that share out each batch on this machine", POSITIVE, LATER] = 1
    epochs: An[int, "passes over the training rows in all", POSITIVE, LATER] = 10
    optimizer: An[Optimizer | None, "if not given, the recipe's own, or adamw"] = None
    lr: An[float | None, "learning rate; if not given, the recipe's own, or 0.001", ABOVE_0] = None
    momentum: An[float, "momentum of SGD", SHARE] = 0.9
    clip_norm: An[float, "largest norm of the whole batch's gradient"] = math.inf
    precision: An[PrecisionName, "dtypes to store and compute in; true ones store 16 bits"] = "float32"
    non_finite: An[NonFinitePolicy, "what to do with rows that give NaN or infinity"] = "raise"
    warm_up: An[int, "updates over which the learning rate rises, 0 for none", COUNT] = 0
    validation: An[float, "fraction of training rows held out", SHARE] = 0.0
    patience: An[int | None, "stop after so many epochs without a better validation", POSITIVE] = None
    ema: An[float | None, "average the weights with this decay, such as 0.99", SHARE] = None
    keep: An[int, "checkpoints to keep, besides the best one", COUNT, LATER] = 0
    save_minutes: An[float, "also save after so many minutes, 0 for never", COUNT, LATER] = 0.0
    seed: An[int, "determines initial weights and the order of rows", SEED] = 0
    servers: An[int | None, "parameter servers; if not given, train in this process", POSITIVE, LATER] = None
    workers: An[int | None, "with --servers: processes that compute gradients, else 2", LATER] = None
    cluster: An[str | None, "with --servers: HOST:PORT of a Ray cluster; else Ray is started", LATER] = None
    out: An[str | None, "folder of checkpoints and logs, runs/RECIPE if not given", APART] = None
    resume: An[str | None, "go on with the run in this folder, with the options it had", APART] = None
    config: An[str | None, "JSON or TOML file of options by name; flags beside it win", APART] = None
    print_config: An[bool, "print the run's options as JSON, for --config, and do nothing", APART] = False
    quiet: An[bool, "no progress bar and no line per epoch", APART] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions(_DataOptions):
    """The options of `anybatch eval`."""

    checkpoint: An[str, _BEST, WORD]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(Command):
    """The options of `anybatch export`."""

    checkpoint: An[str, _BEST, WORD]
    out: An[str, "file to write, which ends in .safetensors"]
    ema: An[bool, "the averaged weights of a run with --ema"] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _TargetOptions(_RecipeOptions):
    target: An[str, _TARGET, WORD]
    batch_norm: An[BatchNormChoice | None, "what a step does with BatchNorm"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions(_TargetOptions):
    """The options of `anybatch check`."""

    micro_batch: An[int | None, "a size of micro-batches to try besides those tried anyway", POSITIVE] = None
    rows: An[int | None, "rows to check on; if not given, a few that differ", TWO] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(_TargetOptions):
    """The options of `anybatch plan`."""

    batch_size: An[int | None, "rows of one update; else those of the target's batch", POSITIVE] = None
    micro_batch: An[int | None, f"{_TOGETHER} what fits, or a batch with --memory none", POSITIVE] = None
    device: An[str, _CARDS] = "auto"
    memory: An[str, 'budget: "12GB", "2GiB", "80%", auto, or none'] = "auto"
    optimizer: An[Optimizer | None, "if the target has none: the recipe's own, or adamw"] = None
    recompute: An[str | None, "all, selective, offload, or a pattern of module names; else chosen"] = None
    precision: An[PrecisionName, "dtypes to store and compute in; true ones store 16 bits"] = "float32"
    plot: An[str | None, "draw memory over the step into a file: .png, .svg or .pdf"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions(Command):
    """The options of `anybatch report`."""

    folders: An[list[str], "the folder of a run; several are compared, at most 8", WORD]
    out: An[str | None, _PAGE] = None


class Flag:
    """One option of a command, read from its field."""

    def __init__(self, name: str, default: Any, hint: Any) -> None:
        kind, self.purpose, *self.marks = get_args(hint)
        self.is_open = type(None) in get_args(kind)
        kind = get_args(kind)[0] if self.is_open else kind
        self.is_many = get_origin(kind) is list
        self.choices: tuple[str, ...] | None = get_args(kind) if get_origin(kind) is Literal else None
        self.type: type = str if get_origin(kind) else kind
        self.range: Range | None = next((mark for mark in self.marks if isinstance(mark, tuple)), None)
        self.name, self.default, self.is_required = name, default, default is MISSING
        self.flag = name if WORD in self.marks else f"--{name.replace('_', '-')}"

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the option to a parser."""
        given: dict[str, Any] = {"default": self.default}
        if self.type is bool:
            given["action"] = argparse.BooleanOptionalAction
        else:
            given |= {"type": self.type, "choices": self.choices}
        if WORD in self.marks:
            given["nargs"] = "+" if self.is_many else None if self.is_required else "?"
        else:
            given["required"] = self.is_required
        parser.add_argument(self.flag, help=self.told().replace("%", "%%"), **given)

    def told(self) -> str:
        """Return purpose, range and default."""
        default = "" if self.default in (MISSING, None, False, "") else f"; default: {self.default}"
        return f"{self.purpose}{f', {self.range[0]}' if self.range else ''}{default}"

    def checked(self, value: Any, path: Path) -> Any:
        """Return a value of a file; raise PlanError if the option cannot have it."""
        if self.type is float and (type(value) is int or value == "inf"):  # JSON has no infinity
            value = float(value)
        fits = type(value) is self.type and value in (self.choices or [value])
        if fits or (value is None and self.is_open):
            return value
        words = f"one of {', '.join(self.choices)}" if self.choices else _WORDS[self.type]
        raise core.PlanError(
            f"{path}: expected {self.name} to be {words}{' or null' * self.is_open}, got {value!r}. "
            "Correct it."
        )


def options_of(command: type[Command]) -> dict[str, Flag]:
    """Return the options of a command by name."""
    hints = get_type_hints(command, include_extras=True)
    return {one.name: Flag(one.name, one.default, hints[one.name]) for one in fields(command)}


def parse(parser: argparse.ArgumentParser, command: type[C], given: Sequence[str]) -> C:
    """Return the options that are given; raise PlanError for an unknown one, or a number out of its range."""
    known = options_of(command)
    for one in known.values():
        one.add_to(parser)
    found, unknown = parser.parse_known_args(given)
    run, config = getattr(found, "resume", None), getattr(found, "config", None)
    had = read(Path(run, SETTINGS), command) if run and Path(run, SETTINGS).exists() else {}
    asked = read(Path(config), command) if config else {}
    # What a config leaves open stays as the resumed run had it.
    parser.set_defaults(**had | {name: one for name, one in asked.items() if one is not None or not had})
    found, unknown = parser.parse_known_args(given)
    for word in sorted(unknown, key=lambda word: not word.startswith("-"))[:1]:
        raise core.PlanError(
            f"Expected options of {parser.prog}, got {word}. "
            + nearest(word.partition("=")[0], {one.flag: one.name for one in known.values()})
        )
    for one in known.values():
        value = getattr(found, one.name)
        if one.range and value is not None and not one.range[1](value):
            raise core.PlanError(
                f"Expected {one.flag} to be {one.range[0]}, got {value}. See {parser.prog} --help."
            )
    return command(**vars(found))


def nearest(name: str, known: Mapping[str, str]) -> str:
    """Return advice for an unknown name; `known` are names as they are written, and their fields."""
    plain = name.strip("-").replace("-", "_")
    close = get_close_matches(plain, known.values(), n=1)
    close += [own for part, own in _SIMILAR.items() if part in plain and own in known.values()]
    meant = next((shown for shown, own in known.items() if own in close[:1]), None)
    return f"Did you mean {meant}?" if meant else f"Known are {', '.join(known)}."


def read(path: Path, command: type[Command] = Run) -> dict[str, Any]:
    """Return the options of a run from a file of JSON or TOML; raise PlanError for what they cannot be."""
    known = {name: one for name, one in options_of(command).items() if APART not in one.marks}
    try:
        text = path.read_bytes()
        found = tomllib.loads(text.decode()) if path.suffix == ".toml" else parse_json(text)
        items = dict[str, Any](found).items()
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise core.PlanError(
            f"{path}: expected the options of a run as JSON or TOML, got an error: {error}. Correct the "
            "file, or name the recipe and all options of the run instead."
        ) from None
    for name, value in items:
        if name not in known and value is not None:
            advice = nearest(name, {one: one for one in known})
            raise core.PlanError(f"{path}: expected options of a run, got {name!r}. {advice}")
    return {name: known[name].checked(value, path) for name, value in items if name in known}


def to_keep(options: Command) -> dict[str, Any]:
    """Return the options that describe a run, as JSON values."""
    known = options_of(type(options))
    kept = {name: value for name, value in asdict(options).items() if APART not in known[name].marks}
    return {name: "inf" if value == math.inf else value for name, value in kept.items()}


def check_same(options: Run) -> None:
    """Raise CheckpointError for options that would change a resumed run."""
    folder = Path(options.resume or "")
    had = read(folder / SETTINGS) if (folder / SETTINGS).exists() else asdict(options)
    changed = [
        f"{one.flag} {now} where it had {was}"
        for name, one in options_of(Run).items()
        if not {LATER, APART} & {*one.marks}
        and (now := getattr(options, name)) != (was := had.get(name, one.default))
    ]
    if options.out and Path(options.out).resolve() != folder.resolve():
        changed.append(f"--out {options.out}")
    if changed:
        raise core.CheckpointError(
            f"{folder}: expected the options of the run, got {', '.join(changed)}. Leave them out, or "
            "start a new run without --resume."
        )
