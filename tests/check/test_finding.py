"""Findings: plain words, and ways out for every kind."""

import pytest
from torch import nn

from anybatch.check.finding import KINDS, WAYS_OUT, Finding, module_finding, summaries


@pytest.mark.parametrize("kind", set(KINDS) - {"denominator"})
def test_every_kind_has_ways_out(kind: str) -> None:
    finding = module_finding(kind, "a.b", nn.Linear(1, 1), "It does.")
    assert finding.culprit == "a.b (Linear)"
    assert finding.ways_out == WAYS_OUT[kind]


def test_batch_norm_has_ways_out_of_its_own() -> None:
    for norm in (nn.BatchNorm1d(1), nn.SyncBatchNorm(1)):
        assert "batch_norm" in module_finding("meeting", "", norm, "It does.").ways_out[0]
    assert module_finding("meeting", "", nn.BatchNorm1d(1), "").culprit == "the model (BatchNorm1d)"


def test_words_are_indented() -> None:
    finding = Finding(kind="state", culprit="x", what="It does.", ways_out=("One:\n    line", "Two."))
    assert str(finding).splitlines() == ["state: x", "  It does.", "  - One:", "      line", "  - Two."]


def test_modules_that_say_the_same_are_told_once() -> None:
    norms = [module_finding("meeting", f"{i}", nn.BatchNorm1d(1), f"`{i}` does.") for i in range(20)]
    other = module_finding("meeting", "last", nn.Linear(1, 1), "It does.")
    term = Finding(kind="denominator", culprit="term 'loss' of mine", what="It is.", ways_out=("a",))
    texts = summaries([*norms[:10], other, *norms[10:], term, term])
    assert [text.splitlines()[0] for text in texts[:2]] == [
        "meeting: 0, 1, 2 and 17 more (BatchNorm1d)",
        "meeting: last (Linear)",
    ]
    assert "The others do the same" in texts[0]
    assert texts[1] == str(other)
    assert summaries([term, term]) == [str(term)]
