"""Many processes: data parallelism over ranks, parameter servers, compression."""

from anybatch.parallel import checkpoint as checkpoint
from anybatch.parallel.compression import (
    Cast as Cast,
    Codec as Codec,
    DeepGradientCompression as DeepGradientCompression,
)
from anybatch.parallel.group import (
    Group as Group,
    all_gather_rows as all_gather_rows,
    exchange as exchange,
    gather_values as gather_values,
    rank as rank,
    ranks as ranks,
    start_under_torchrun as start_under_torchrun,
)
from anybatch.parallel.launch import is_launched as is_launched, launch as launch, record as record
from anybatch.parallel.parameter_server import ParameterServer as ParameterServer
from anybatch.parallel.replicate import Replicate as Replicate
from anybatch.parallel.shard import Shard as Shard
from anybatch.parallel.stored import (
    Packer as Packer,
    digest_of as digest_of,
    parse_json as parse_json,
    sync_folder as sync_folder,
    write_tensors as write_tensors,
)
from anybatch.parallel.wrappers import (
    StrategyName as StrategyName,
    choose_strategy as choose_strategy,
    group_of as group_of,
    is_sharded as is_sharded,
    refuse_late_group as refuse_late_group,
    refuse_sharded as refuse_sharded,
    refuse_wrapped as refuse_wrapped,
    unwrapped as unwrapped,
)
