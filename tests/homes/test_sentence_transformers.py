"""sentence-transformers: losses over the whole batch, by themselves and in its trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.homes.sentence_transformers import CutLoss
from anybatch.testing import relative_error, tolerance

pytestmark = pytest.mark.filterwarnings("ignore")
st = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")

from sentence_transformers.sentence_transformer import losses as found  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast  # noqa: E402

EXACT, WRONG, WORDS, ROWS = 1e-12, 1e-3, [f"w{i}" for i in range(40)], 24


def encoder(folder: Path) -> Any:
    """A tiny BERT, saved and loaded as a SentenceTransformer."""
    torch.manual_seed(0)
    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    word = Transformer(str(folder), max_seq_length=8)
    return st.SentenceTransformer(modules=[word, Pooling(16)], device="cpu")


def texts(columns: int) -> list[list[str]]:
    torch.manual_seed(1)
    lengths = torch.randint(1, 7, (columns, ROWS))
    return [[" ".join(WORDS[int(i)] for i in torch.randint(40, (int(n),))) for n in row] for row in lengths]


# Columns of texts, whether there are labels, and what else a loss takes.
LOSSES: dict[str, tuple[int, bool, tuple[int, ...]]] = {
    "MultipleNegativesRankingLoss": (3, False, ()),
    "CoSENTLoss": (2, True, ()),
    "BatchAllTripletLoss": (1, True, ()),
    "SoftmaxLoss": (2, True, (16, 3)),
}


@pytest.mark.parametrize("name", [*LOSSES, "MatryoshkaLoss"])
def test_losses_are_those_of_the_whole_batch(name: str, tmp_path: Path) -> None:
    model = encoder(tmp_path).double()
    inner = "MultipleNegativesRankingLoss" if name == "MatryoshkaLoss" else name
    columns, has_labels, more = LOSSES[inner]
    torch.manual_seed(2)
    loss = getattr(found, inner)(model, *more).double()
    loss = found.MatryoshkaLoss(model, loss, [16, 8]) if name == "MatryoshkaLoss" else loss
    labels = torch.randint(3, (ROWS,)) if has_labels else None
    labels = labels.double() / 2 if has_labels and name == "CoSENTLoss" else labels

    def features(rows: slice = slice(None)) -> list[dict[str, Any]]:
        return [model.tokenize(column[rows]) for column in texts(columns)]

    value = loss(features(), labels)
    value.backward()
    expected = {name: p.grad.clone() for name, p in loss.named_parameters() if p.grad is not None}
    loss.zero_grad()
    cut, seen = CutLoss(loss, micro_batch=7), list[int]()
    model[0].register_forward_pre_hook(lambda _, args: seen.append(len(args[0]["input_ids"])))
    ours = cut(features(), labels)
    ours.backward()
    assert cut.batch_loss.report.micro_batches == 4
    assert max(seen) == 7
    assert relative_error(ours.item(), value.item()) <= EXACT
    gradients = {name: p.grad.clone() for name, p in loss.named_parameters() if p.grad is not None}
    assert relative_error(gradients, expected) <= EXACT
    with torch.no_grad():
        assert relative_error(cut(features(), labels).item(), value.item()) <= EXACT
    loss.zero_grad()
    if inner == "MultipleNegativesRankingLoss":  # in parts it compares with fewer negatives
        for start in range(0, ROWS, 6):
            (loss(features(slice(start, start + 6)), None) / 4).backward()
        parts = {name: p.grad for name, p in loss.named_parameters() if p.grad is not None}
        assert relative_error(parts, expected) >= WRONG


def test_its_trainer_makes_the_updates_of_the_whole_batch(tmp_path: Path) -> None:
    runs, logs = [], []
    for is_cut in (False, True):
        model = encoder(tmp_path)
        loss: Any = found.MultipleNegativesRankingLoss(model)
        loss = CutLoss(loss, micro_batch=5) if is_cut else loss
        arguments = st.SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=12, per_device_eval_batch_size=12,
            num_train_epochs=2, max_grad_norm=0.1, logging_steps=1, eval_strategy="epoch",
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        rows = datasets.Dataset.from_dict(dict(zip(["anchor", "positive"], texts(2), strict=True)))
        given = {"train_dataset": rows, "eval_dataset": rows, "loss": loss}
        trainer = st.SentenceTransformerTrainer(model=model, args=arguments, **given)
        trainer.train()
        runs.append([*model.parameters()])
        logs.append(trainer.state)
    assert loss.batch_loss.report.micro_batches == 3
    assert logs[0].global_step == logs[1].global_step == 4
    close = tolerance(torch.float32, 12)
    assert relative_error(runs[1], runs[0]) <= close
    for name in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        said = [torch.tensor([row[name] for row in one.log_history if name in row]) for one in logs]
        assert len(said[0]) > 0
        assert relative_error(said[1], said[0]) <= 10 * close
