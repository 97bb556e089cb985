"""The command line: train, eval, plan and check."""

from anybatch.cli import main

__all__ = ["main"]
