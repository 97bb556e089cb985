"""The command line: train, eval, export, check, plan and report."""

from anybatch.cli import main as main
