"""The command line: train, eval, plan and check."""

from anybatch.cli.main import main

__all__ = ["main"]
