"""Many processes: until they are supported, found and refused."""

from anybatch.parallel.ranks import StrategyName, check_strategy, refuse_ranks

__all__ = ["StrategyName", "check_strategy", "refuse_ranks"]
