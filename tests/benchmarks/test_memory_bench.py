"""Tests of a model under any plan: the same batch, its peak to the byte, blocks by policy, turns."""

import pytest

from benchmarks import memory_predicted
from benchmarks.memory_bench import POLICIES, Subject
from benchmarks.zoo import OPTIMIZERS, ZOO


def subject(name: str, optimizer: str = "sgd") -> Subject:
    entry = ZOO[name]
    found = Subject(entry, entry.build("small"), optimizer)
    found.warm_up()
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_predicted_peak_is_the_measured_one(policy: str, optimizer: str) -> None:
    small = subject("unet", optimizer)
    plan = small.plan(4, 2, small.blocks(policy))
    peak = small.measure(plan)
    assert small.predict(plan).peak == peak.bytes == sum(peak.by_owner.values())


def test_policies_name_all_blocks_none_or_every_second() -> None:
    gpt2 = subject("gpt2")
    assert gpt2.blocks("keep") == ()
    names = [name for name, _ in gpt2.blocks("recompute")]
    assert names == [f"transformer.h.{index}" for index in range(3)]
    assert gpt2.blocks("selective") == tuple((name, "selective") for name in names)
    assert gpt2.blocks("half") == ((names[0], "recompute"), (names[2], "recompute"))


@pytest.mark.slow
def test_records_of_predictions_are_judged_sound() -> None:
    records = list(memory_predicted.measure("unet", "small", "cpu"))
    assert len(records) == len(OPTIMIZERS) * len(POLICIES) * 3
    assert {record["micro_batch"] for record in records} == set(ZOO["unet"].rows)
    assert any("composed" in record for record in records)
    assert [verdict.what for verdict in memory_predicted.judge(records) if not verdict.holds] == []
