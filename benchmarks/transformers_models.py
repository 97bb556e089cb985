"""Models of transformers beside their own whole-batch loss: exact, or refused with a reason.

By hand: python -m benchmarks.transformers_models [--only NAME ...]. Tiny random models, no downloads.
"""

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import anybatch as ab
from anybatch.testing import GradientRecorder, relative_error

ROWS, LENGTH, WORDS, IMAGE = 6, 8, 24, 32
EXACT = 1e-12  # relative, in float64
SINGLE = 1e-5  # where a body computes in float32 whatever its dtype
Batch = Mapping[str, Tensor]

NO_DROPOUT = dict.fromkeys(
    (
        "activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop",
        "attn_dropout", "classifier_dropout", "classifier_dropout_prob", "dropout", "drop_path_rate",
        "embd_pdrop", "embd_dropout", "embedding_dropout", "feat_proj_dropout", "final_dropout",
        "ff_dropout", "hidden_dropout", "hidden_dropout_prob", "layerdrop", "resid_pdrop",
        "resid_dropout", "summary_last_dropout", "summary_first_dropout", "pooler_dropout", "emb_pdrop",
        "mlp_dropout", "mask_time_prob", "mask_feature_prob", "path_dropout", "residual_dropout",
        "positional_dropout", "head_dropout",
    ),
    0.0,
)  # fmt: skip
TEXT = NO_DROPOUT | {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 16, "max_position_embeddings": 32, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 3, "embedding_size": 16,
}  # fmt: skip
PAIR = TEXT | {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "decoder_start_token_id": 2,
    "forced_eos_token_id": 2, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 16,
}  # fmt: skip
PICTURE = NO_DROPOUT | {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "image_size": IMAGE, "patch_size": 8, "num_labels": 3, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1,
    1, 1], "embed_dim": 8, "num_heads": [1, 1, 1, 1], "window_size": 2, "mlp_ratio": 2,
}  # fmt: skip


def _draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _text() -> dict[str, Tensor]:
    lengths = torch.tensor([8, 3, 5, 2, 6, 4])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    tokens = torch.randint(3, WORDS, (ROWS, LENGTH), generator=_draw(1))
    return {"input_ids": torch.where(mask == 1, tokens, 0), "attention_mask": mask}


def causal() -> Batch:
    text = _text()
    return {**text, "labels": torch.where(text["attention_mask"] == 1, text["input_ids"], -100)}


def masked() -> Batch:
    batch = dict(causal())
    kept = torch.rand(ROWS, LENGTH, generator=_draw(2)) < 0.6
    return {**batch, "labels": batch["labels"].where(kept, -100)}


def unpadded() -> Batch:
    """For models without a mask, and those whose own gradient is NaN where a window holds padding only."""
    tokens = torch.randint(3, WORDS, (ROWS, LENGTH), generator=_draw(1))
    return {
        "input_ids": tokens,
        "labels": tokens.where(torch.arange(LENGTH) < _text()["attention_mask"].sum(1, True), -100),
    }


def tags() -> Batch:
    text = _text()
    labels = torch.randint(3, (ROWS, LENGTH), generator=_draw(3))
    return {**text, "labels": torch.where(text["attention_mask"] == 1, labels, -100)}


def classes() -> Batch:
    return {**_text(), "labels": torch.tensor([0, 1, 2, 2, 0, 1])}


def spans() -> Batch:
    starts, ends = torch.tensor([0, 1, 9, 0, 2, 1]), torch.tensor([6, 2, 9, 1, 5, 3])
    return {**_text(), "start_positions": starts, "end_positions": ends}


def pictures() -> Batch:
    images = torch.randn(ROWS, 3, IMAGE, IMAGE, generator=_draw(4)).double()
    return {"pixel_values": images, "labels": torch.tensor([0, 1, 2, 2, 0, 1])}


def sounds() -> Batch:
    mask = (torch.arange(160) < torch.tensor([160, 120, 140, 100, 160, 110])[:, None]).long()
    waves = torch.randn(ROWS, 160, generator=_draw(5)).double() * mask
    labels = torch.tensor(
        [[1, 2, 3], [4, -100, -100], [2, 5, -100], [1, -100, -100], [3, 1, 2], [5, 4, -100]]
    )
    return {"input_values": waves, "attention_mask": mask, "labels": labels}


def series() -> Batch:
    past = torch.randn(ROWS, 16, 2, generator=_draw(6)).double()
    return {"past_values": past, "future_values": torch.randn(ROWS, 4, 2, generator=_draw(7)).double()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A class of transformers, the settings of its config, and what makes a batch for it."""

    name: str
    batch: Any
    settings: Mapping[str, Any]

    def build(self) -> nn.Module:
        """A random model in float64, in training mode."""
        kind = getattr(transformers, self.name)
        torch.manual_seed(0)
        return kind(kind.config_class(**self.settings)).double().train()


def _without(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


BLOOM = TEXT | {"n_layer": 2, "n_head": 2}
MPT = TEXT | {"d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32, "expansion_ratio": 1}
GPTJ = TEXT | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "rotary_dim": 4}
OPT = TEXT | {"ffn_dim": 16, "word_embed_proj_dim": 16}
MAMBA = TEXT | {"state_size": 4, "expand": 2, "conv_kernel": 4, "use_mambapy": False}
XLNET = _without(TEXT, "max_position_embeddings") | {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 16}
LED = PAIR | {
    "attention_window": 4,
    "max_encoder_position_embeddings": 32,
    "max_decoder_position_embeddings": 32,
}
FUNNEL = _without(TEXT, "num_hidden_layers") | {
    "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "num_decoder_layers": 1,
}  # fmt: skip
SOUND = TEXT | {
    "vocab_size": 6, "conv_dim": (8, 8), "conv_kernel": (8, 4), "conv_stride": (4, 2),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False, "ctc_loss_reduction": "mean", "feat_quantizer_dropout": 0.0,
}  # fmt: skip
SWIN = _without(PICTURE, "num_attention_heads", "num_hidden_layers") | {"patch_size": 2}
PATCHES = NO_DROPOUT | {
    "num_input_channels": 2, "context_length": 16, "prediction_length": 4, "patch_length": 4,
    "patch_stride": 4, "num_hidden_layers": 1, "d_model": 16, "num_attention_heads": 2, "ffn_dim": 16,
    "loss": "mse", "scaling": "std", "norm_type": "layernorm",
}  # fmt: skip
MODERN = TEXT | {"global_attn_every_n_layers": 2, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}

MODELS = [
    Model(name="BloomForCausalLM", batch=causal, settings=BLOOM),
    Model(name="OPTForCausalLM", batch=causal, settings=OPT),
    Model(name="CodeGenForCausalLM", batch=causal, settings=GPTJ | {"num_attention_heads": 4, "n_head": 4}),
    Model(name="MptForCausalLM", batch=causal, settings=MPT),
    Model(name="GPTJForCausalLM", batch=causal, settings=GPTJ),
    Model(name="FalconForCausalLM", batch=causal, settings=_without(TEXT, "head_dim")),
    Model(name="PhiForCausalLM", batch=causal, settings=TEXT),
    Model(name="Gemma2ForCausalLM", batch=causal, settings=TEXT | {"query_pre_attn_scalar": 8}),
    Model(name="Qwen3ForSequenceClassification", batch=classes, settings=TEXT),
    Model(name="StableLmForTokenClassification", batch=tags, settings=TEXT),
    Model(name="CohereForCausalLM", batch=causal, settings=TEXT),
    Model(name="MambaForCausalLM", batch=causal, settings=MAMBA),
    Model(name="ModernBertForMaskedLM", batch=masked, settings=MODERN),
    Model(name="DebertaV2ForTokenClassification", batch=tags, settings=TEXT),
    Model(name="RoFormerForQuestionAnswering", batch=spans, settings=TEXT),
    Model(name="LongformerForMaskedLM", batch=unpadded, settings=TEXT | {"attention_window": 4}),
    Model(name="XLNetForTokenClassification", batch=tags, settings=XLNET),
    Model(name="FunnelForSequenceClassification", batch=classes, settings=FUNNEL),
    Model(name="FNetForMaskedLM", batch=unpadded, settings=TEXT),
    Model(name="LayoutLMForTokenClassification", batch=tags, settings=TEXT),
    Model(name="PegasusForConditionalGeneration", batch=causal, settings=PAIR),
    Model(name="LEDForConditionalGeneration", batch=unpadded, settings=LED),
    Model(name="MarianMTModel", batch=causal, settings=PAIR),
    Model(name="BeitForImageClassification", batch=pictures, settings=PICTURE),
    Model(name="SwinForImageClassification", batch=pictures, settings=SWIN),
    Model(name="ConvNextForImageClassification", batch=pictures, settings=PICTURE | {"patch_size": 4}),
    Model(name="Dinov2ForImageClassification", batch=pictures, settings=PICTURE),
    Model(name="MobileViTForImageClassification", batch=pictures, settings=NO_DROPOUT | {"num_labels": 3}),
    Model(name="HubertForCTC", batch=sounds, settings=SOUND),
    Model(name="PatchTSTForPrediction", batch=series, settings=PATCHES),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one model in one cut: the relative error, or why it was refused."""

    name: str
    micro_batch: int
    error: float = 0.0
    told: str = ""
    is_refused: bool = False

    @property
    def is_good(self) -> bool:
        return self.is_refused or (not self.told and self.error <= SINGLE)

    def __str__(self) -> str:
        verdict = "exact" if self.error <= EXACT else "float32" if self.error <= SINGLE else "WRONG"
        verdict = "refused" if self.is_refused else "RAW" if self.told else verdict
        return (
            f"{self.name:36} {self.micro_batch:2}  {verdict:8} {self.told[:120] or format(self.error, '.1e')}"
        )


def carried_out(one: Model, micro_batch: int) -> Result:
    """One step in a cut beside the model's own loss of the whole batch."""
    model, batch = one.build(), one.batch()
    loss = model(**batch).loss
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    recorder = GradientRecorder(model)
    try:
        report = ab.Step(model, ab.ModelLoss(), recorder, micro_batch=micro_batch)(batch)
    except ab.AnybatchError as error:
        return Result(name=one.name, micro_batch=micro_batch, told=str(error), is_refused=True)
    except Exception as error:  # a raw traceback is what this looks for
        return Result(name=one.name, micro_batch=micro_batch, told=f"{type(error).__name__}: {error}")
    error, off = relative_error(recorder.gradients, expected), relative_error(report.loss, loss.item())
    if off > (EXACT if loss.dtype == torch.float64 else SINGLE):  # many heads give their loss in float32
        error = max(error, off)
    return Result(name=one.name, micro_batch=micro_batch, error=error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each model and cut; 1 if one is silently wrong or ends in a raw error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    only = parser.parse_args(arguments).only
    warnings.simplefilter("ignore")
    results: list[Result] = []
    for one in MODELS:
        for micro_batch in (1, 2) if not only or one.name in only else ():
            results.append(carried_out(one, micro_batch))
            print(results[-1], flush=True)
    exact = [one for one in results if one.is_good and not one.is_refused and one.error <= EXACT]
    refused, good = [one for one in results if one.is_refused], [one for one in results if one.is_good]
    rounded, wrong = len(good) - len(exact) - len(refused), len(results) - len(good)
    print(
        f"{len(exact)} exact, {rounded} to float32's rounding, {len(refused)} refused, {wrong} wrong;",
        end=" ",
    )
    print(f"{len(results)} cuts of {len({one.name for one in results})} models")
    return int(len(good) < len(results))


if __name__ == "__main__":
    sys.exit(main())
