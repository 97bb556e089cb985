"""The training loop: data, metrics, callbacks, checkpoints, logs and the trainer."""

from anybatch.parallel import checkpoint as checkpoint
from anybatch.step import EMA as EMA
from anybatch.train import files as files
from anybatch.train.callbacks import EarlyStopping as EarlyStopping
from anybatch.train.loggers import to_json as to_json, version as version
from anybatch.train.metrics import Metrics as Metrics, accuracy as accuracy
from anybatch.train.progress import peak_bytes as peak_bytes
from anybatch.train.trainer import Trainer as Trainer
