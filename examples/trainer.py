"""transformers' Trainer on whole batches, beside its own gradient accumulation.

Run it with `python examples/trainer.py`.
"""

import tempfile

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from anybatch.homes.transformers import (
    Trainer,
)  # transformers' Trainer, with anybatch.homes.WholeBatchTrainer

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
ROWS, LENGTH, CLASSES = 128, 16, 4


def rows() -> list[dict[str, torch.Tensor]]:
    """Random texts of `LENGTH` tokens; the class of a text is its first token modulo `CLASSES`."""
    ids = torch.randint(100, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": one, "labels": one[0] % CLASSES} for one in ids]


def train(name: str, kind: type, batch: int, steps: int, **more: int) -> None:
    """Make four updates of 32 rows each, and print what the Trainer logs."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=100, num_labels=CLASSES, hidden_dropout_prob=0.0, **SMALL)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            max_steps=4,
            logging_steps=1,
            save_strategy="no",
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        model = BertForSequenceClassification(config).eval()
        trainer = kind(model, arguments, train_dataset=rows(), **more)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    logged = [f"{line['loss']:.3f} ({line['grad_norm']:.2f})" for line in trainer.state.log_history[:-1]]
    print(f"{name:36} loss (grad_norm) of each update: {', '.join(logged)}")


def main() -> None:
    """Train three times from the same weights."""
    train("32 rows at once", transformers.Trainer, batch=32, steps=1)
    train("4 x 8 rows, gradient accumulation", transformers.Trainer, batch=8, steps=4)
    train("32 rows, with anybatch in 4 parts", Trainer, batch=32, steps=1, micro_batch=8)


if __name__ == "__main__":
    main()
