"""Rows of uneven length in accelerate, transformers' Trainer and Lightning, as their documentation shows.

Each pads every micro-batch to its own longest row (dynamic padding); the Trainer also groups rows of like
length over the whole data set, which changes what is in a batch. Lightning is left out where it is missing.
"""

import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

Sample = dict[str, Tensor]
Run = Callable[[nn.Module, Sequence[Sample], int, int], list[float]]
IGNORE = -100


def samples_of(batches: Iterable[dict[str, Tensor]]) -> list[Sample]:
    """The rows of padded batches without their padding."""
    return [
        {key: value[row, : int(batch["attention_mask"][row].sum())] for key, value in batch.items()}
        for batch in batches
        for row in range(len(batch["labels"]))
    ]


def collate(samples: Sequence[Sample]) -> Sample:
    """Padded to the longest of these rows."""
    fill = {"labels": IGNORE}
    return {
        key: pad_sequence(
            [torch.as_tensor(one[key]) for one in samples], batch_first=True, padding_value=fill.get(key, 0)
        )
        for key in ("input_ids", "attention_mask", "labels")
    }


def accelerate(model: nn.Module, samples: Sequence[Sample], rows: int, size: int) -> list[float]:
    """`accumulate` around each micro-batch; returns the CPU seconds of each update."""
    from accelerate import Accelerator

    loader: Any = DataLoader(list(samples), batch_size=size, shuffle=True, collate_fn=collate)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=rows // size)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    ends = [time.process_time()]
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ends.append(time.process_time())
    return _differences(ends)


class _Clock(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.process_time())


def trainer(model: nn.Module, samples: Sequence[Sample], rows: int, size: int) -> list[float]:
    """transformers' Trainer, rows grouped by length; its first update has no start and is left out."""
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder, per_device_train_batch_size=size, gradient_accumulation_steps=rows // size,
            train_sampling_strategy="group_by_length", num_train_epochs=1, use_cpu=True, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, max_grad_norm=0.0,
        )  # fmt: skip
        clock = _Clock()
        transformers.Trainer(
            model, options, data_collator=collate, train_dataset=list(samples), callbacks=[clock]
        ).train()
    return _differences(clock.ends)


def lightning(model: nn.Module, samples: Sequence[Sample], rows: int, size: int) -> list[float]:
    """Lightning with `accumulate_grad_batches`; its first update has no start and is left out."""
    import lightning as L

    ends: list[float] = []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Sample) -> Tensor:
            return self.model(**batch).loss

        def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
            if (batch_idx + 1) % (rows // size) == 0:
                ends.append(time.process_time())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader: Any = DataLoader(list(samples), batch_size=size, shuffle=True, collate_fn=collate)
        L.Trainer(
            accelerator="cpu", max_epochs=1, accumulate_grad_batches=rows // size, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(Module(), loader)  # fmt: skip
    return _differences(ends)


PEERS: dict[str, Run] = {"accelerate": accelerate, "Trainer": trainer, "Lightning": lightning}


def _differences(ends: Sequence[float]) -> list[float]:
    return [end - begin for begin, end in pairwise(ends)]
