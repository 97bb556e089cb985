"""The training loop: rows, metrics, learning rate, checkpoints, logs and the trainer."""

from anybatch.train import checkpoint, learning_rate
from anybatch.train.checkpoint import write_whole
from anybatch.train.loggers import to_json
from anybatch.train.metrics import accuracy
from anybatch.train.progress import peak_bytes
from anybatch.train.trainer import BEST, LAST, Trainer

__all__ = [
    "BEST",
    "LAST",
    "Trainer",
    "accuracy",
    "checkpoint",
    "learning_rate",
    "peak_bytes",
    "to_json",
    "write_whole",
]
