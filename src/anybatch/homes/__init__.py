"""Training loops of other libraries, on top of BatchLoss: one file for each, which does not import it."""

from anybatch.homes.transformers import WholeBatchTrainer as WholeBatchTrainer
