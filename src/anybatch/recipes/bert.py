"""BERT on lines of text: classification, or masked tokens (Devlin et al. 2019)."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.core import PlanError
from anybatch.data import Lines, import_extra, read_lines
from anybatch.losses import ModelLoss
from anybatch.recipes.recipe import Recipe, Training, one_of
from anybatch.step import Options

SPECIAL = PAD, UNKNOWN, START, END, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
_LIBRARIES = "transformers and tokenizers, which BERT is built from"
HEADS = {"classify": "BertForSequenceClassification", "mask": "BertForMaskedLM"}
# Layers, heads, width, tokens. Tiny: Turc et al. 2019, Well-read students learn better; base: Devlin et al.
SIZES = {"tiny": (2, 2, 128, 2000), "base": (12, 12, 768, 30522)}


def _make(data: str, task: str = "classify", size: str = "tiny", block_size: int = 64) -> Training:
    # No dropout, so that no cut changes random draws.
    head, (layers, heads, width, tokens) = one_of("task", task, HEADS), one_of("size", size, SIZES)
    if not 8 <= block_size <= 512:
        raise PlanError(f"Expected --block-size to be from 8 to 512 for BERT, got {block_size}. Choose 64.")
    transformers, library = (
        import_extra(name, _LIBRARIES, "transformers") for name in ("transformers", "tokenizers")
    )
    lines = read_lines(data, labelled=task == "classify")
    tokenizer = _tokenizer(library, lines.train, tokens, block_size)
    config = transformers.BertConfig(
        vocab_size=max(tokenizer.get_vocab_size(), tokens),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        hidden_size=width,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=512,
        num_labels=len(lines.classes),
    )
    train, test = _rows(tokenizer, lines, masked=task == "mask")
    return Training(
        model=getattr(transformers, head)(config),
        loss=ModelLoss(),
        train=train,
        test=test,
        name=f"{data}, lines of up to {block_size} tokens",
        vocabulary=hashlib.sha256(f"{tokenizer.to_str()}{lines.classes}".encode()).hexdigest()[:16],
        scores=lambda outputs: outputs.logits.movedim(-1, 1),
        options=Options(order="length"),
    )


def _tokenizer(library: Any, texts: Sequence[str], tokens: int, block_size: int) -> Any:
    bytes_ = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = library.Tokenizer(library.models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = bytes_
    trainer = library.trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(bytes_.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in (START, END)]
    tokenizer.post_processor = library.processors.TemplateProcessing(f"{START} $A {END}", special_tokens=ends)
    tokenizer.enable_truncation(block_size)
    return tokenizer


def _rows(tokenizer: Any, lines: Lines, *, masked: bool) -> list[dict[str, Tensor]]:
    made: list[dict[str, Tensor]] = []
    for texts, labels in ((lines.train, lines.train_labels), (lines.test, lines.test_labels)):
        numbers = [torch.tensor(encoded.ids) for encoded in tokenizer.encode_batch(texts)]
        ids = torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True)  # with 0, which is [PAD]
        shown, targets = _masked(ids, tokenizer) if masked else (ids, torch.tensor(labels))
        made.append({"input_ids": shown, "attention_mask": (ids != 0).long(), "labels": targets})
    return made


def _masked(ids: Tensor, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Return masked tokens, and targets: the tokens at chosen positions, -100 elsewhere.

    15 % are chosen; of these 80 % become [MASK], 10 % another token, 10 % stay (Devlin et al. 2019, section
    3.1). They are drawn once and stored in the rows, so no cut and no resume changes them.
    """
    chosen = (torch.rand(ids.shape) < 0.15) & (ids >= len(SPECIAL))
    kind = torch.rand(ids.shape)
    others = torch.randint(len(SPECIAL), tokenizer.get_vocab_size(), ids.shape)
    shown = torch.where(kind < 0.8, tokenizer.token_to_id(MASK), torch.where(kind < 0.9, others, ids))
    return torch.where(chosen, shown, ids), ids.masked_fill(~chosen, -100)


BERT = Recipe(name="bert", make=_make, data="python", optimizer="adamw", lr=1e-3)
