"""Heads of transformers that compute their own loss: tiny, random, no dropout, rows of unequal lengths."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

ROWS, LENGTH, WORDS, WIDTH = 8, 7, 24, 8
LENGTHS = torch.tensor([7, 3, 5, 2, 6, 4, 7, 1])
MASK = (torch.arange(LENGTH) < LENGTHS[:, None]).long()
Batch = dict[str, Tensor]


def _ints(low: int, high: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def _floats(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


TOKENS = torch.where(MASK == 1, _ints(3, WORDS, ROWS, LENGTH), 0)
TEXT: Batch = {"input_ids": TOKENS, "attention_mask": MASK}
NEXT = {"labels": torch.where(MASK == 1, TOKENS, -100)}
MASKED = {"labels": torch.where((MASK == 1) & (_ints(0, 3, ROWS, LENGTH, seed=2) > 0), TOKENS, -100)}
TAGS = {"labels": torch.where(MASK == 1, _ints(0, 3, ROWS, LENGTH, seed=3), -100)}
CLASS = {"labels": torch.tensor([0, 1, 2, 2, -100, 1, 0, 2])}
SEVERAL = {"labels": _ints(0, 2, ROWS, 3, seed=4).double()}
NUMBER = {"labels": _floats(ROWS, seed=5)}
SPAN = {
    "start_positions": torch.tensor([0, 1, 9, 0, 2, 1, LENGTH, 0]),  # some beyond the end, which do not count
    "end_positions": torch.tensor([6, 2, 9, 1, 5, 3, 6, 0]),
}
OTHER = {"next_sentence_label": torch.tensor([0, 1, 1, 0, -100, 1, 0, 0])}
ORDER = {"sentence_order_label": OTHER["next_sentence_label"]}
CHOICES: Batch = {name: torch.stack([one, one.flip(0)], 1) for name, one in TEXT.items()}
CHOICES |= {"labels": torch.tensor([0, 1, 1, 0, 0, 1, 0, 1])}
IMAGES: Batch = {"pixel_values": _floats(ROWS, 3, 16, 16)}
MAP = {"labels": torch.where(_ints(0, 3, ROWS, 16, 16, seed=6) == 0, 255, _ints(0, 3, ROWS, 16, 16, seed=7))}
FRAMES = 160
SOUND_LENGTHS = torch.tensor([160, 120, 140, 100, 160, 110, 150, 130])
SOUND_MASK = (torch.arange(FRAMES) < SOUND_LENGTHS[:, None]).long()
SPOKEN = torch.arange(3) < torch.tensor([3, 1, 2, 1, 3, 2, 1, 2])[:, None]
SOUND: Batch = {"input_values": _floats(ROWS, FRAMES) * SOUND_MASK, "attention_mask": SOUND_MASK}
SOUND |= {"labels": torch.where(SPOKEN, _ints(1, 6, ROWS, 3), -100)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    name: str
    batch: Batch
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    training: bool = True
    variant: str = ""

    @property
    def title(self) -> str:
        return f"{self.name}-{self.variant}" if self.variant else self.name

    def build(self) -> nn.Module:
        kind = getattr(transformers, self.name)
        config = kind.config_class(**self.settings)
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        torch.manual_seed(0)
        model = kind(config).double()
        return model.train(self.training)


GPT2 = {
    "vocab_size": WORDS, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "max_position_embeddings": LENGTH,
}  # fmt: skip
BERT = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": LENGTH + 4, "pad_token_id": 0,
}  # fmt: skip
ROBERTA = BERT | {"pad_token_id": 1}
ALBERT = ELECTRA = BERT | {"embedding_size": WIDTH}
DISTILBERT = {
    "vocab_size": WORDS, "dim": WIDTH, "hidden_dim": 12, "n_layers": 1, "n_heads": 2,
    "max_position_embeddings": LENGTH,
}  # fmt: skip
T5 = {
    "vocab_size": WORDS, "d_model": WIDTH, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_decoder_layers": 1,
    "num_heads": 2, "pad_token_id": 0, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
BART = {
    "vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
    "max_position_embeddings": LENGTH + 4,
}  # fmt: skip
VIT = {
    "hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8, "num_labels": 3,
}  # fmt: skip
RESNET = {
    "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic", "num_labels": 3,
    "hidden_act": "gelu",
}  # fmt: skip
SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 8],
    "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
    "decoder_hidden_size": 8, "num_labels": 3,
}  # fmt: skip
WAV2VEC2 = {
    "vocab_size": 6, "hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": 1,
    "num_attention_heads": 2, "conv_dim": (8, 8), "conv_kernel": (8, 4), "conv_stride": (4, 2),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "apply_spec_augment": False, "pad_token_id": 0,
}  # fmt: skip
WHISPER = {
    "vocab_size": WORDS, "num_mel_bins": 4, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "max_source_positions": 8, "max_target_positions": LENGTH + 4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": [], "begin_suppress_tokens": [],
    "apply_spec_augment": False,
}  # fmt: skip
EXPERTS = LLAMA | {
    "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
    "router_aux_loss_coef": 0.05, "router_jitter_noise": 0.0, "experts_implementation": "eager",
}  # fmt: skip
QWEN_MOE = LLAMA | {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1, "output_router_logits": True,
    "router_aux_loss_coef": 0.05, "mlp_only_layers": [], "experts_implementation": "eager",
    "eos_token_id": 2,
}  # fmt: skip
LABELS3 = {"num_labels": 3}
MEL = {"input_features": _floats(ROWS, 4, 16), "labels": NEXT["labels"]}

#: Classes and variants, the settings of their tiny configs, and batches.
_TABLE: list[tuple[str, str, Mapping[str, Any], Batch]] = [
    ("GPT2LMHeadModel", "", GPT2, {**TEXT, **NEXT}),
    ("GPT2ForTokenClassification", "", GPT2 | LABELS3 | {"classifier_dropout": 0.0}, {**TEXT, **TAGS}),
    ("GPT2ForSequenceClassification", "", GPT2 | LABELS3, {**TEXT, **CLASS}),
    ("LlamaForCausalLM", "", LLAMA, {**TEXT, **NEXT}),
    ("LlamaForSequenceClassification", "", LLAMA | LABELS3, {**TEXT, **CLASS}),
    ("DebertaForSequenceClassification", "", BERT | LABELS3, {**TEXT, **CLASS}),
    ("LlamaForQuestionAnswering", "", LLAMA, {**TEXT, **SPAN}),
    ("LlamaForTokenClassification", "", LLAMA | LABELS3 | {"classifier_dropout": 0.0}, {**TEXT, **TAGS}),
    ("BertForMaskedLM", "", BERT, {**TEXT, **MASKED}),
    ("BertLMHeadModel", "", BERT | {"is_decoder": True}, {**TEXT, **NEXT}),
    ("BertForNextSentencePrediction", "", BERT, {**TEXT, "labels": OTHER["next_sentence_label"]}),
    ("BertForPreTraining", "", BERT, {**TEXT, **MASKED, **OTHER}),
    ("BertForMultipleChoice", "", BERT, CHOICES),
    ("BertForTokenClassification", "", BERT | LABELS3, {**TEXT, **TAGS}),
    ("BertForSequenceClassification", "", BERT | LABELS3, {**TEXT, **CLASS}),
    ("BertForSequenceClassification", "several labels", BERT | LABELS3, {**TEXT, **SEVERAL}),
    ("BertForSequenceClassification", "regression", BERT | {"num_labels": 1}, {**TEXT, **NUMBER}),
    ("BertForQuestionAnswering", "", BERT, {**TEXT, **SPAN}),
    ("RobertaForMaskedLM", "", ROBERTA, {**TEXT, **MASKED}),
    ("RobertaForSequenceClassification", "", ROBERTA | LABELS3, {**TEXT, **CLASS}),
    ("AlbertForMaskedLM", "", ALBERT, {**TEXT, **MASKED}),
    ("AlbertForPreTraining", "", ALBERT, {**TEXT, **MASKED, **ORDER}),
    ("DistilBertForMaskedLM", "", DISTILBERT, {**TEXT, **MASKED}),
    ("DistilBertForQuestionAnswering", "", DISTILBERT, {**TEXT, **SPAN}),
    ("ElectraForPreTraining", "", ELECTRA, {**TEXT, "labels": _ints(0, 2, ROWS, LENGTH, seed=8)}),
    ("ElectraForTokenClassification", "", ELECTRA | LABELS3, {**TEXT, **TAGS}),
    ("T5ForConditionalGeneration", "", T5, {**TEXT, **NEXT}),
    ("T5ForTokenClassification", "", T5 | LABELS3, {**TEXT, **TAGS}),
    ("BartForConditionalGeneration", "", BART, {**TEXT, **NEXT}),
    ("ViTForImageClassification", "", VIT, {**IMAGES, **CLASS}),
    ("ResNetForImageClassification", "", RESNET, {**IMAGES, **CLASS}),
    ("SegformerForSemanticSegmentation", "", SEGFORMER, {**IMAGES, **MAP}),
    ("Wav2Vec2ForCTC", "sum", WAV2VEC2 | {"ctc_loss_reduction": "sum"}, SOUND),
    ("Wav2Vec2ForCTC", "mean", WAV2VEC2 | {"ctc_loss_reduction": "mean"}, SOUND),
    ("WhisperForConditionalGeneration", "", WHISPER, MEL),
    ("MixtralForCausalLM", "", EXPERTS, {**TEXT, **NEXT}),
    ("Qwen2MoeForCausalLM", "", QWEN_MOE, {**TEXT, **NEXT}),
    ("OlmoeForCausalLM", "", QWEN_MOE, {**TEXT, **NEXT}),
]
_EVALUATING = ("ResNetForImageClassification", "SegformerForSemanticSegmentation")  # for their BatchNorms
HEADS = [
    Head(name=name, variant=variant, settings=settings, batch=batch, training=name not in _EVALUATING)
    for name, variant, settings, batch in _TABLE
]
