"""One command that proves anybatch on a device: `make gpu`, or `python -m benchmarks.gpu`."""
