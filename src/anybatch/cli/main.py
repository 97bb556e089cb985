"""The command line: `anybatch train`, `eval`, `export`, `check`, `plan` and `report`."""

import argparse
import sys
from collections.abc import Sequence

import anybatch

COMMANDS = {
    "train": "train a recipe, or a model of your own",
    "eval": "evaluate a checkpoint on held-out rows",
    "export": "write the weights of a checkpoint alone, as a plain state dict",
    "check": "prove that split equals whole, or find what prevents it",
    "plan": "the plan within a budget, before anything runs",
    "report": "write the page of a run, or of several over one another: one file of HTML with charts",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 1 refused or not exact, 2 not checked, 130 stopped."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    parser = argparse.ArgumentParser(
        prog="anybatch", description="Train with any batch size in the memory you have, and the same result."
    )
    parser.add_argument("--version", action="version", version=f"anybatch {anybatch.__version__}")
    commands = parser.add_subparsers(required=True)
    parsers = {name: commands.add_parser(name, help=purpose) for name, purpose in COMMANDS.items()}
    if not given or given[0] not in COMMANDS:
        parser.parse_args(given)  # help, version, or an error: they end the process
    from anybatch.cli.run import run  # after the help, because importing torch takes seconds

    return run(given[0], parsers[given[0]], given[1:])
