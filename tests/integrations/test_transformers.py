"""Heads of transformers against their own whole-batch loss, and router losses, in which rows meet."""

import copy
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral import modeling_mixtral

import anybatch as ab
from anybatch.core.errors import LossError
from anybatch.integrations.transformers import homes, recorded
from anybatch.losses.model.model_loss import ModelLoss
from anybatch.testing import GradientRecorder, relative_error
from tests.integrations.heads import HEADS, LENGTH, ROWS, VIT, WORDS, Head
from tests.options import flat
from tests.snapshots import assert_same

LIMIT = 1e-12  # the law, in float64
ROOT = Path(__file__).parents[2]
FLOAT32 = 1e-6  # where a head computes its loss in float32 and the division comes at the end


def named(name: str) -> Head:
    return next(head for head in HEADS if head.name == name)


MIXTRAL = named("MixtralForCausalLM")

# What transformers says about configs as tiny as these is about nothing that matters here.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")


def whole(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    twin = copy.deepcopy(model)
    loss = twin(**batch).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def cut(model: nn.Module, batch: Any, micro_batch: int | None, **options: Any) -> tuple[Any, Any]:
    recorder = GradientRecorder(model)
    step = ab.Step(model, ModelLoss(), recorder, micro_batch=micro_batch, **flat(options))
    return step(batch), recorder.gradients


def assert_exact(
    model: nn.Module, batch: Any, micro_batch: int, limit: float = LIMIT, rows: Any = None, **options: Any
) -> None:
    loss, gradients = whole(model, batch)
    report, found = cut(model, rows or dict(batch), micro_batch, **options)
    assert report.micro_batches == -(-ROWS // micro_batch)
    assert relative_error(found, gradients) <= limit
    assert relative_error(report.loss, loss) <= FLOAT32


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    fill, pad = {"input_ids": 0, "attention_mask": 0, "labels": -100}, nn.utils.rnn.pad_sequence
    return {name: pad([one[name] for one in samples], True, value) for name, value in fill.items()}


@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("head", HEADS, ids=[head.title for head in HEADS])
def test_head_is_exact(head: Head, micro_batch: int | None) -> None:
    """Uncut to the bit."""
    if micro_batch is None:
        assert_same(whole(head.build(), head.batch)[1], cut(head.build(), dict(head.batch), None)[1])
    else:
        assert_exact(head.build(), head.batch, micro_batch)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration", "MixtralForCausalLM"])
def test_first_rows_without_a_target_tell_no_less(name: str) -> None:
    """Heads in float32, where only a weight that is known beforehand gives the same arithmetic."""
    head = named(name)
    labels = torch.where(torch.arange(ROWS)[:, None] < 2, -100, head.batch["labels"])
    labels[4:, 0] = -100  # so that it matters which tokens are the targets
    for micro_batch in (1, 2):
        assert_exact(head.build(), {**head.batch, "labels": labels}, micro_batch)


def test_every_head_stands_in_the_docs() -> None:
    page = (ROOT / "docs/heads-exact.md").read_text(encoding="utf-8")
    assert [head.name for head in HEADS if f"`{head.name}`" not in page] == []


# The loss of the last is in float32, and the division comes late.
@pytest.mark.parametrize(
    ("name", "limit"),
    [("BertForMaskedLM", LIMIT), ("MixtralForCausalLM", LIMIT), ("GPT2LMHeadModel", FLOAT32)],
)
def test_lists_of_samples_padded_micro_batch_by_micro_batch(name: str, limit: float) -> None:
    head = named(name)
    lengths = enumerate(head.batch["attention_mask"].sum(1).tolist())
    samples = [{key: one[at, :length] for key, one in head.batch.items()} for at, length in lengths]
    assert_exact(head.build(), head.batch, 3, limit, rows=samples, collate=collate)


def test_window_and_late_router_loss_are_refused_by_name() -> None:
    model = MIXTRAL.build()
    window = ab.Step(model, ModelLoss(), GradientRecorder(model)).window()
    with pytest.raises(LossError, match="router loss of MixtralForCausalLM"):
        window.add(dict(MIXTRAL.batch))
    window.discard()


def test_contrastive_heads_are_refused_by_name() -> None:
    text = VIT | {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "eos_token_id": 2}
    settings = {"text_config": text, "vision_config": VIT, "projection_dim": 4}
    images = named("ViTForImageClassification").batch["pixel_values"]
    batch = {"input_ids": HEADS[0].batch["input_ids"], "pixel_values": images}
    model = Head(name="CLIPModel", settings=settings, batch=batch).build()
    model.forward = lambda **rows: type(model).forward(model, return_loss=True, **rows)
    with pytest.raises(LossError, match=r"(?i)CLIPModel.*a contrastive loss"):
        cut(model, batch, 4)


def plain_router_loss() -> Tensor:
    gates = torch.arange(8.0).reshape(4, 2)
    return modeling_mixtral.load_balancing_loss_func((gates,), 2, 1)


def test_outside_a_block_the_modeling_file_does_what_it_did_even_after_a_failure() -> None:
    before = plain_router_loss()
    with recorded(homes(MIXTRAL.build())) as first:
        thread = threading.Thread(target=plain_router_loss)  # another thread's is not recorded
        thread.start()
        thread.join()
    function = modeling_mixtral.load_balancing_loss_func
    with pytest.raises(RuntimeError), recorded(homes(MIXTRAL.build())) as second:
        raise RuntimeError
    assert modeling_mixtral.load_balancing_loss_func is function  # replaced once
    assert torch.equal(plain_router_loss(), before)
    assert (first, second) == ([], [])
