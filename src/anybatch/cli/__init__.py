"""The command line: train, eval, plan, check, report and selftest."""

from anybatch.cli import main as main
