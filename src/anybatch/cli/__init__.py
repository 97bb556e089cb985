"""The command line: train, eval, plan, check and report."""

from anybatch.cli import main

__all__ = ["main"]
