"""Sharded models within a memory budget: each rank keeps to its own, and the update is the whole batch's."""

import gc
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.core import local
from anybatch.core.errors import BudgetError
from anybatch.memory.reading import held_by_malloc
from tests import zoo
from tests.parallel import faults
from tests.parallel.pairs import Pair, shard
from tests.parallel.spawned import Ranks

ROWS, LAYERS, WIDTH, LENGTH, WORDS = 6, 12, 32, 48, 40


class Heap(TorchDispatchMode):
    """The most bytes that malloc has given out, looked at after each operation."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, held_by_malloc())
        return result


def within(rank: int, size: int, memory: int | None) -> dict[str, Any]:
    """Three updates of a GPT: heap, cuts, whether gradients were held; or the smallest budget."""
    torch.manual_seed(0)
    given: Any = {"activation": F.gelu, "batch_first": True, "norm_first": True, "dropout": 0.0}
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **given) for _ in range(LAYERS)]
    model = zoo.words(nn.Sequential(*layers), width=WIDTH, count=WORDS).double()
    pair = Pair(model, "torch", parts=shard(model), memory=memory)
    told: dict[str, Any] = {"heap": [], "cut": [], "held": []}
    for number in range(3):
        drawn = torch.Generator().manual_seed(number)
        batch = torch.randint(WORDS, (2, ROWS * size, LENGTH), generator=drawn)
        mine = tuple(one[ROWS * rank : ROWS * (rank + 1)].clone() for one in batch)
        gc.collect()
        states = [one for slots in pair.step.optimizers[0].state.values() for one in slots.values()]
        held = [*map(local, [*pair.parts.parameters(), *states]), *mine]
        own = sum({one.data_ptr(): one.untyped_storage().nbytes() for one in held}.values())
        del held, states
        others = held_by_malloc() - own
        try:
            with Heap() as heap:
                report = pair.step(mine)
        except BudgetError as error:
            return {"smallest": error.smallest, "said": str(error)}
        for name, one in (("heap", heap.peak - others), ("cut", report.cut), ("held", report.held)):
            told[name].append(one)
        pair.twin(tuple(batch))
    assert pair.error < 1e-12
    return told


def test_a_gpt_keeps_to_its_budget_and_holds_gradients_where_they_fit(two: Ranks) -> None:
    """Held or reduced as the budget demands; 3 % are what a later step may exceed it by."""
    plain = max(two.run(within, None, seconds=300.0)[0]["heap"][1:])
    refused = two.run(within, int(0.15 * plain), seconds=300.0)
    assert all(str(one["smallest"]) in one["said"] for one in refused)
    smallest = [one["smallest"] for one in refused]
    for memory, is_held in [(0.9 * plain, True), (0.6 * plain, None), (1.01 * max(smallest), False)]:
        for one in two.run(within, int(memory), seconds=300.0):
            assert is_held is None or one["held"][-1] is is_held, one
            assert 1 < max(map(len, one["cut"])) <= ROWS
            assert max(one["heap"][1:]) < 1.03 * memory, (one, memory)


def test_ranks_with_other_budgets_rows_and_faults_make_one_update_or_none(two: Ranks, four: Ranks) -> None:
    for ranks, seed, count in ((two, 100, 10), (four, 300, 4)):
        faults.assert_all_agreed(ranks, "sharded", seed, count, "tokens", False, faults.BUDGETS)
