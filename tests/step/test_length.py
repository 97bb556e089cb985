"""Rows in the order of their lengths: exact, as short as can be, in the caller's words, or refused."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import anybatch as ab
from anybatch.core.errors import AnybatchError, BatchError, LossError
from anybatch.step import ByLength
from anybatch.testing import GradientRecorder, reference_step, relative_error
from tests.options import flat
from tests.zoo import WORDS, Made, tagger

transformers: Any = pytest.importorskip("transformers")
ROWS, LONGEST = 12, 11
FLOAT32 = 1e-6  # relative
LENGTHS = torch.tensor([2, 9, 3, 11, 1, 4, 2, 3, 5, 2, 1, 6])
RIGHT = torch.arange(LONGEST) < LENGTHS[:, None]
LEFT = RIGHT.flip(1)
DRAW = torch.Generator().manual_seed(0)
TOKENS = torch.randint(3, WORDS, (ROWS, LONGEST), generator=DRAW)
FEATURES = torch.randn(ROWS, LONGEST, 4, generator=DRAW).double()
TAGS = torch.where(RIGHT, TOKENS % 3, -100)
WORDS_AND_TAGS = (TOKENS * RIGHT, TAGS)
PADDED = (F.pad(WORDS_AND_TAGS[0], (0, 9)), F.pad(TAGS, (0, 9), value=-100))
FLAT = Made(lambda self, x: self.out((x * 0.1).double()), out=nn.Linear(LONGEST, 3))  # of fixed length
MASKED = {"tokens": TOKENS * RIGHT, "mask": RIGHT}
SHORT = {
    "vocab_size": WORDS, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_labels": 3,
    "num_attention_heads": 2, "pad_token_id": 0, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "n_embd": 8, "n_layer": 1, "n_head": 2, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "classifier_dropout": 0.0,
}  # fmt: skip


def text(mask: Tensor = RIGHT, *, width: int = LONGEST, **more: Tensor) -> dict[str, Tensor]:
    """Tokens with a mask, filled up to a width that may be more than the longest row needs."""
    mask = F.pad(mask, (0, width - LONGEST) if mask is RIGHT else (width - LONGEST, 0))
    tokens = F.pad(TOKENS, (0, width - LONGEST)) + 0
    return {"input_ids": tokens * mask, "attention_mask": mask.long(), **more}


def next_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """Labels of tokens; the first one of a row is foretold by what is before it: padding, or nothing."""
    mask = batch["attention_mask"]
    is_first = mask.cumsum(1) == 1
    return torch.where((mask == 1) & ~is_first, batch["input_ids"], -100)


def build(name: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**SHORT | settings)).double().train()


def gradient_error(model: nn.Module, loss: Any, batch: Any, **options: Any) -> tuple[float, ab.StepReport]:
    """How far a step by length is from all rows at once, padded; models of transformers add in float32."""
    recorder = GradientRecorder(model, loss)
    expected = reference_step(model, loss, batch, collate=options.get("collate"))
    report = ab.Step(model, loss, recorder, **flat({"order": "length", **options}))(batch)
    assert report.loss == pytest.approx(expected.loss, rel=FLOAT32)
    return relative_error(recorder.gradients, expected.gradients), report


@pytest.mark.parametrize(("width", "micro_batch"), [(LONGEST, 1), (LONGEST + 4, 3), (LONGEST + 4, None)])
@pytest.mark.parametrize("mask", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaForSequenceClassification", "BertForMaskedLM"])
def test_the_gradient_is_that_of_padded_rows(name: str, mask: Tensor, width: int, micro_batch: Any) -> None:
    model, batch = build(name), text(mask, width=width)
    batch["labels"] = torch.arange(ROWS) % 3 if "Classification" in name else next_tokens(batch)
    # Without, Bert counts padding at the start, and the angles of Llama are rounded otherwise.
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    error, report = gradient_error(model, ab.ModelLoss(), batch, micro_batch=micro_batch)
    assert error < 1e-12
    assert report.rows == ROWS
    assert report.micro_batches < ROWS // (micro_batch or 6)


@pytest.mark.parametrize("options", [{"micro_batch": 3}, {"memory": "1GB"}, {}])
def test_a_padding_token_tells_lengths_and_micro_batches_are_cut_by_tokens(options: Any) -> None:
    seen: list[tuple[int, int]] = []
    model = tagger().double()
    model.register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = ab.Step(model, nn.CrossEntropyLoss(), optimizer, **flat(options, check=False, order="length"))
    assert gradient_error(model, nn.CrossEntropyLoss(), WORDS_AND_TAGS, **options)[0] < 1e-12
    seen.clear()
    report = step(WORDS_AND_TAGS)
    shapes = seen[-report.micro_batches :]
    assert sum(rows for rows, _ in shapes) == ROWS
    lengths = sorted(LENGTHS.tolist(), reverse=True)
    for (rows, longest), start in zip(shapes, [sum(report.cut[:n]) for n in range(99)], strict=False):
        assert longest == lengths[start]
        assert rows == 1 or rows * longest <= options.get("micro_batch", ROWS) * LONGEST
    if "micro_batch" in options:  # three parts of at most 33 places: as even as they can be
        assert [rows * longest for rows, longest in shapes] == [22, 18, 21]


@pytest.mark.parametrize("keys", [None, "x"])
def test_samples_are_ordered_before_they_are_collated(keys: str | None) -> None:
    shapes: list[int] = []

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        rows = [sample[keys] if keys else sample[0] for sample in samples]
        tags = [sample["tags"] if keys else sample[1] for sample in samples]
        shapes.append(max(map(len, rows)))
        return pad_sequence(rows, True), pad_sequence(tags, True, -100.0)

    pairs = [(TOKENS[row, :n], TAGS[row, :n]) for row, n in enumerate(LENGTHS.tolist())]
    samples: list[Any] = [{"x": x, "tags": y, "id": torch.zeros(30)} for x, y in pairs] if keys else pairs
    given: Any = {"micro_batch": 2, "collate": collate}
    error, report = gradient_error(tagger().double(), nn.CrossEntropyLoss(), samples, **given)
    assert error < 1e-12
    assert shapes[-report.micro_batches :] == sorted(shapes[-report.micro_batches :], reverse=True)
    assert len(report.cut) < ROWS // 2


def test_memory_that_runs_out_halves_what_is_left_and_later_steps_know() -> None:
    def loss(model: nn.Module, micro: Any) -> ab.Total:
        if limit and micro[0].numel() > limit:
            raise torch.OutOfMemoryError("out of memory")
        return ab.Total(F.cross_entropy(model(micro[0]), micro[1], reduction="sum"), (micro[1] >= 0).sum())

    limit, model = 0, tagger().double()
    recorder = GradientRecorder(model)
    expected = reference_step(model, loss, WORDS_AND_TAGS).gradients
    step = ab.Step(model, loss, recorder, options=ab.Options(order="length", check=False))
    limit = 20
    first, second = step(WORDS_AND_TAGS), step(WORDS_AND_TAGS)
    assert first.redone > 0 == second.redone
    assert relative_error(recorder.gradients, expected) < 1e-12
    assert second.micro_batches < 2 * len(LENGTHS)


def mean_over_places(model: nn.Module, micro: Any) -> ab.Total:
    losses = F.cross_entropy(model(micro[0]), micro[1].clamp(min=0), reduction="none").mean(1)
    return ab.Total(losses.sum(), len(losses))


@pytest.mark.parametrize(
    ("model", "loss", "batch", "match"),
    [
        (tagger(is_masked=False), nn.CrossEntropyLoss(), PADDED, "Made with less padding"),
        (tagger(), mean_over_places, WORDS_AND_TAGS, "mean_over_places with less padding"),
        (build("GPT2ForSequenceClassification"), ab.ModelLoss(),
         text(LEFT, width=20, labels=torch.arange(ROWS) % 3), "GPT2ForSequenceClassification with less"),
        (FLAT, lambda m, x: ab.Total(m(x["tokens"]).sum(), 1), MASKED, "without their"),
        (tagger(), ab.WholeBatch(lambda scores, tags: scores.mean()), WORDS_AND_TAGS, "order out"),
        (nn.Linear(4, 1), nn.MSELoss(), (FEATURES[:, 0], FEATURES[:, 0, :1]), "lengths can be told"),
        (nn.Sequential(nn.BatchNorm1d(LONGEST)), lambda m, x: ab.Total(m(x["x"]).sum(), 1),
         {"x": FEATURES, "mask": RIGHT}, "BatchNorm"),
    ],
)  # fmt: skip
def test_what_padding_changes_is_refused_by_name(model: nn.Module, loss: Any, batch: Any, match: str) -> None:
    model = model.double()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ab.Step(model, loss, optimizer, options=ab.Options(order="length"))
    with pytest.raises(AnybatchError, match=match):
        step(batch)
    assert all(map(torch.equal, before, model.parameters()))


def with_features() -> nn.Module:
    """Return a tagger that also takes a fixed number of features, read as a whole."""

    def forward(self: Any, tokens: Tensor, features: Tensor) -> Tensor:
        weight = self.features.weight[:, : features.shape[1]] if self.training else self.features.weight
        return self.tags(tokens) + torch.einsum("rik,oik->ro", features, weight)[..., None]

    return Made(forward, tags=tagger(), features=nn.Bilinear(LONGEST, 4, 3))


@pytest.mark.parametrize("cuts_weight", [True, False])
@pytest.mark.parametrize("name", ["features", 1])
def test_a_column_as_wide_as_the_rows_are_long_is_named_and_may_be_kept(name: Any, cuts_weight: bool) -> None:
    # Cut wrongly, it changes the result in one case and does not fit its weight in the other.
    model = with_features().double().train(cuts_weight)
    named: Any = {"tokens": WORDS_AND_TAGS[0], "features": FEATURES, "labels": TAGS}
    batch: Any = tuple(named.values()) if name == 1 else named
    given: Any = (model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(LossError, match=rf"with column {name!r} left whole") as told:
        ab.Step(*given, micro_batch=2, options=ab.Options(order="length"))(batch)
    assert f"batch[{name!r}], batch[" in str(told.value)
    assert f"order=anybatch.step.ByLength(keep=({name!r},))" in str(told.value)
    kept = ByLength(keep=(name,))
    error, report = gradient_error(model, given[1], batch, micro_batch=2, order=kept)
    assert error < 1e-12
    assert report.micro_batches < ROWS // 2
    assert report.checked
    with pytest.raises(BatchError, match="'tokens'" if name != 1 else "0, 1, 2"):
        ab.Step(*given, options=ab.Options(order=ByLength(keep=("feature",))))(batch)
