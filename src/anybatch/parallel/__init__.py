"""Many processes: data parallelism over ranks, parameter servers, compression."""

from anybatch.parallel.compression import Cast, Codec, DeepGradientCompression
from anybatch.parallel.group import all_gather_rows, exchange, rank, ranks, start_under_torchrun
from anybatch.parallel.launch import is_launched, launch, record
from anybatch.parallel.parameter_server import ParameterServer
from anybatch.parallel.replicate import Replicate
from anybatch.parallel.rules import Rule, RuleName, make_rule
from anybatch.parallel.wrappers import (
    StrategyName,
    choose_strategy,
    group_of,
    refuse_late_group,
    refuse_wrapped,
    unwrapped,
)

__all__ = [
    "Cast",
    "Codec",
    "DeepGradientCompression",
    "ParameterServer",
    "Replicate",
    "Rule",
    "RuleName",
    "StrategyName",
    "all_gather_rows",
    "choose_strategy",
    "exchange",
    "group_of",
    "is_launched",
    "launch",
    "make_rule",
    "rank",
    "ranks",
    "record",
    "refuse_late_group",
    "refuse_wrapped",
    "start_under_torchrun",
    "unwrapped",
]
