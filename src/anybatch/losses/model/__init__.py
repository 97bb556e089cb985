"""A model that computes its own loss: its means become sums with weights."""

from anybatch.losses.model.model_loss import ModelLoss as ModelLoss, ModelTerms as ModelTerms
