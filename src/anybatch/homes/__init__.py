"""Other people's training loops, on top of BatchLoss: a file for each, which imports its library"""

from anybatch.homes.lightning import WholeBatchCallback as WholeBatchCallback
