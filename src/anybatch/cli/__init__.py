"""The command line: train, eval, plan, check and report."""

from anybatch.cli import main as main
