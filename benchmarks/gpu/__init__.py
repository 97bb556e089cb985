"""One command that measures every promise on a device: `python -m benchmarks.gpu`."""
