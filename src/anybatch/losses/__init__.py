"""Losses as sums with weights: by torch's own names, or written by the user."""

from anybatch.losses.inputs import TARGET_KEYS, call_model, split_batch
from anybatch.losses.linear import linear_cross_entropy
from anybatch.losses.loss import EvaluateAgain, Evaluated, Loss, Share
from anybatch.losses.model.model_loss import ModelLoss, ModelTerms
from anybatch.losses.model.read import read_afresh
from anybatch.losses.padding import find_paddings
from anybatch.losses.resolve import check_loss, module_of, resolve
from anybatch.losses.terms import Terms, call_loss
from anybatch.losses.torch_losses import SummedLoss, summed_loss
from anybatch.losses.whole_batch import WholeBatch

__all__ = [
    "TARGET_KEYS",
    "EvaluateAgain",
    "Evaluated",
    "Loss",
    "ModelLoss",
    "ModelTerms",
    "Share",
    "SummedLoss",
    "Terms",
    "WholeBatch",
    "call_loss",
    "call_model",
    "check_loss",
    "find_paddings",
    "linear_cross_entropy",
    "module_of",
    "read_afresh",
    "resolve",
    "split_batch",
    "summed_loss",
]
