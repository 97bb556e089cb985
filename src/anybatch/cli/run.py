"""One command: its options, its action, and its result or its error as text or JSON."""

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from anybatch.check import check, refuse_without_data
from anybatch.cli import options as kinds, plan, target, train
from anybatch.core import AnybatchError, DataError, format_bytes
from anybatch.observe import report_page
from anybatch.parallel import is_launched, rank, record
from anybatch.train import files, to_json


def run(name: str, parser: argparse.ArgumentParser, given: Sequence[str]) -> int:
    """Run a command; return its exit code, see `main`."""
    kind, action = _ACTIONS[name]
    is_json = "--json" in given

    def refuse(message: str) -> int:
        print(f"anybatch {name}: {message}", file=sys.stderr)
        if is_json:
            print(to_json({"error": message}))
        return 2 if name == "check" else 1

    try:
        options = kinds.parse(parser, kind, given)
        is_json = options.json
        if isinstance(options, kinds.Run) and train.starts_ranks(options, [name, *given]):
            return 0  # rank 0 has printed the result
        # Output of the user's code must not mix with the result.
        with redirect_stdout(sys.stderr) if is_json else nullcontext():
            result, text = action(options)
    except AnybatchError as error:
        if is_launched():
            record(error)  # printed once, not by each rank
            return 1
        return refuse(str(error))
    except Exception as error:
        if name not in ("check", "plan"):
            raise
        # The target is the user's code, which may raise anything.
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = str(error).strip().partition("\n")[0]
        message = f"{type(error).__name__}: {message} ({place.filename}:{place.lineno})"
        return refuse(f"could not {name}: {message}")
    except KeyboardInterrupt as stop:
        if not is_launched():
            refuse(f"interrupted. {stop}".rstrip(". "))
        return 130
    if not rank() and (is_json or text):
        print(to_json(result) if is_json else text)
    return 0 if rank() or result.get("exact", True) else 1


def _check(options: kinds.CheckOptions) -> tuple[dict[str, Any], str]:
    found = target.find(options.target, options.data, train.recipe_options(options))
    refuse_without_data(found.model, found.loss)  # such a model cannot be moved either
    if options.device != "auto" or ":" not in options.target:  # else keep the device of the user's function
        found = found.to(train.find_device(options.device), rows=True)
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


def _report(options: kinds.ReportOptions) -> tuple[dict[str, Any], str]:
    """Write the page of a run, or of several over one another, from their logs."""
    first, *others = options.folders
    page = report_page(first, *others).encode()
    path = Path(
        options.out or (Path(first).parent / "compare.html" if others else Path(first, "report.html"))
    )
    files.write(path, lambda file: file.write_bytes(page), "Name another with --out.", DataError)
    return {"report": str(path), "bytes": len(page)}, f"report      {path}  ({format_bytes(len(page))})"


_ACTIONS: dict[str, tuple[type[kinds.Command], Callable[[Any], tuple[dict[str, Any], str]]]] = {
    "train": (kinds.Run, train.train),
    "eval": (kinds.EvalOptions, train.evaluate),
    "export": (kinds.ExportOptions, train.export),
    "check": (kinds.CheckOptions, _check),
    "plan": (kinds.PlanOptions, plan.plan),
    "report": (kinds.ReportOptions, _report),
}
