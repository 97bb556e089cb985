"""The training loop: data, metrics, learning rate, callbacks, checkpoints, logs and the trainer."""

from anybatch.train import checkpoint, learning_rate
from anybatch.train.callbacks import EMA, Callback, EarlyStopping, LossMonitor
from anybatch.train.checkpoint import write_whole
from anybatch.train.folder import BEST, LAST, load_newest
from anybatch.train.loggers import to_json
from anybatch.train.metrics import accuracy
from anybatch.train.progress import peak_bytes
from anybatch.train.trainer import Trainer

__all__ = [
    "BEST",
    "EMA",
    "LAST",
    "Callback",
    "EarlyStopping",
    "LossMonitor",
    "Trainer",
    "accuracy",
    "checkpoint",
    "learning_rate",
    "load_newest",
    "peak_bytes",
    "to_json",
    "write_whole",
]
