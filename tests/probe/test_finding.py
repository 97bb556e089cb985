"""Findings: plain words, JSON, and ways out for every kind."""

import json

import pytest
from torch import nn

from anybatch.probe.finding import KINDS, WAYS_OUT, Finding, module_finding


@pytest.mark.parametrize("kind", set(KINDS) - {"denominator"})
def test_every_kind_has_ways_out(kind: str) -> None:
    finding = module_finding(kind, "a.b", nn.Linear(1, 1), "It does.")
    assert finding.culprit == "a.b (Linear)"
    assert finding.ways_out == WAYS_OUT[kind]


def test_batch_norm_has_ways_out_of_its_own() -> None:
    for norm in (nn.BatchNorm1d(1), nn.SyncBatchNorm(1)):
        assert "batch_norm" in module_finding("meeting", "", norm, "It does.").ways_out[0]
    assert module_finding("meeting", "", nn.BatchNorm1d(1), "").culprit == "the model (BatchNorm1d)"


def test_words_are_indented_and_json_is_whole() -> None:
    finding = Finding(kind="state", culprit="x", what="It does.", ways_out=("One:\n    line", "Two."))
    assert str(finding).splitlines() == ["state: x", "  It does.", "  - One:", "      line", "  - Two."]
    assert json.loads(json.dumps(finding.to_dict()))["ways_out"] == ["One:\n    line", "Two."]
