"""Losses as sums with weights: by torch's own names, or written by the user."""

from anybatch.losses.inputs import (
    TARGET_KEYS as TARGET_KEYS,
    call_model as call_model,
    split_batch as split_batch,
)
from anybatch.losses.linear import linear_cross_entropy as linear_cross_entropy
from anybatch.losses.loss import (
    EvaluateAgain as EvaluateAgain,
    Evaluated as Evaluated,
    Loss as Loss,
    Share as Share,
)
from anybatch.losses.model.model_loss import ModelLoss as ModelLoss, ModelTerms as ModelTerms
from anybatch.losses.padding import find_paddings as find_paddings
from anybatch.losses.resolve import (
    LossLike as LossLike,
    check_loss as check_loss,
    function_of as function_of,
    module_of as module_of,
    resolve as resolve,
)
from anybatch.losses.terms import (
    Additive as Additive,
    PerRow as PerRow,
    Terms as Terms,
    call_loss as call_loss,
)
from anybatch.losses.torch_losses import SummedLoss as SummedLoss, summed_loss as summed_loss
from anybatch.losses.whole_batch import WholeBatch as WholeBatch
