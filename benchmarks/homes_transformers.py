"""Eight tasks of transformers' Trainer: small random models in float64, sequences of uneven length.

Each runs three ways: the host alone on the whole batch, the host alone with gradient accumulation, and with
`WholeBatchTrainer`. Gradients are read before clipping.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import anybatch as ab
from anybatch.homes import WholeBatchTrainer
from benchmarks.homes import Row

ROWS, LENGTH, VOCABULARY, CLASSES = 12, 10, 60, 3
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
Mode = Literal["whole", "alone", "home", "both"]  # both: the home, and the host's gradient accumulation
Rows = list[dict[str, Tensor]]


@dataclass
class Task:
    """A model with its rows and its host."""

    name: str
    model: Callable[[], nn.Module]
    labels: Literal["next", "class", "masked", "none"]
    host: Callable[[], type[transformers.Trainer]] = lambda: transformers.Trainer
    arguments: Mapping[str, Any] = field(default_factory=dict)
    loss: object = None
    needs: str = "transformers"


@dataclass
class Run:
    """A finished training."""

    trainer: Any
    gradients: list[dict[str, Tensor]]  # of each update, before clipping

    def logged(self, name: str) -> list[float]:
        """Return what was logged under a name, once per update."""
        return [line[name] for line in self.trainer.state.log_history if name in line]


def llama() -> nn.Module:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SMALL, num_hidden_layers=2, pad_token_id=0, eos_token_id=2)
    return transformers.LlamaForCausalLM(config).double()


def bert(head: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(1)
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = transformers.BertConfig(**SMALL, **none, num_hidden_layers=2, num_labels=CLASSES)
        return getattr(transformers, head)(config).double()

    return make


def lora() -> nn.Module:
    config = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    return get_peft_model(llama(), config).double()


def clip() -> nn.Module:
    torch.manual_seed(1)
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config=layers
        | {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": 2, "bos_token_id": 3},
        vision_config=layers | {"image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    return transformers.CLIPModel(config).double()


class Weighted(transformers.Trainer):
    """The user's own loss: a mean with class weights."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.tensor([1.0, 5.0, 0.2], dtype=outputs.logits.dtype)
        loss = nn.functional.cross_entropy(outputs.logits, labels, weight=weight)
        return (loss, outputs) if return_outputs else loss


def towers(model: nn.Module, micro: Any) -> tuple[Tensor, ...]:
    """Return the embeddings of texts and images, and the scale of their products."""
    found = model(**micro)
    return found.text_embeds, found.image_embeds, model.logit_scale


def contrast(texts: Tensor, images: Tensor, scale: Tensor) -> Tensor:
    """Return the loss of CLIP over all pairs."""
    scores, rows = texts @ images.T * scale.exp(), torch.arange(len(texts))
    return (nn.functional.cross_entropy(scores, rows) + nn.functional.cross_entropy(scores.T, rows)) / 2


def sft() -> type[transformers.Trainer]:
    from trl import SFTTrainer

    return SFTTrainer


SMOOTH = {"label_smoothing_factor": 0.1}
TASKS = [
    Task("causal LM (Llama)", llama, "next"),
    Task("classification (BERT)", bert("BertForSequenceClassification"), "class"),
    Task("masked LM (BERT)", bert("BertForMaskedLM"), "masked"),
    Task("own weighted loss", bert("BertForSequenceClassification"), "class", lambda: Weighted),
    Task("label smoothing", bert("BertForMaskedLM"), "masked", arguments=SMOOTH),
    Task("TRL SFT (float32 inside)", llama, "next", sft, needs="trl"),
    Task("LoRA (peft)", lora, "next"),
    Task("contrastive (CLIP)", clip, "none", loss=ab.WholeBatch(contrast, outputs=towers)),
]
BY_NAME = {task.name.partition(" (")[0]: task for task in TASKS}


def rows_of(task: Task, count: int) -> Rows:
    """Return rows of one length with a mask; lengths and numbers of labels are uneven."""
    draw = torch.Generator().manual_seed(3)
    rows: Rows = []
    for _ in range(count):
        ids = torch.randint(5, VOCABULARY, (LENGTH,), generator=draw)
        real = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (), generator=draw)
        if task.labels == "none":
            ids[-1] = 2
            image = torch.randn(3, 8, 8, generator=draw, dtype=torch.float64)
            rows.append({"input_ids": ids, "pixel_values": image})
            continue
        chosen = real & (torch.rand(LENGTH, generator=draw) < 0.4)
        labels = {
            "next": torch.where(real, ids, -100),
            "masked": torch.where(chosen, ids, -100),
            "class": torch.randint(CLASSES, (), generator=draw),
        }[task.labels]
        rows.append({"input_ids": ids, "attention_mask": real.long(), "labels": labels})
    return rows


def collated(rows: Rows) -> dict[str, Any]:
    """Return a batch whose model is told to return its loss."""
    return {**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}, "return_loss": True}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    words = {f"t{number}": number for number in range(VOCABULARY)}
    table = Tokenizer(models.WordLevel(words, unk_token="t1"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=table, pad_token="t0", eos_token="t2")


def data_of(task: Task, count: int) -> dict[str, Any]:
    """Return the arguments of a Trainer that are about data."""
    rows = rows_of(task, count)
    if task.needs == "trl":
        from datasets import Dataset

        ids = [row["input_ids"][row["attention_mask"].bool()].tolist() for row in rows]
        return {"train_dataset": Dataset.from_dict({"input_ids": ids}), "processing_class": tokenizer()}
    return {"train_dataset": rows} | ({"data_collator": collated} if task.labels == "none" else {})


def trainer_of(
    task: Task,
    mode: Mode,
    *,
    updates: int = 2,
    parts: int = 4,
    folder: str = "",
    ranks: int = 1,
    callbacks: Any = (),
    own: Any = None,
    **more: Any,
) -> Run:
    """Make a Trainer that records its gradients.

    Args:
        task: the model and its rows.
        mode: with whom.
        updates: updates in all.
        parts: gradient accumulation steps of the host, and micro-batches of the home.
        folder: the output folder; empty for one that is thrown away.
        ranks: processes; each gets its share of the batch.
        callbacks: classes of callbacks.
        own: further arguments of the Trainer.
        more: arguments of the home, or of `TrainingArguments`.
    """
    steps = 1 if mode in ("whole", "home") else parts
    home = {"micro_batch", "memory", "loss", "whole_batch"} & more.keys()
    settings = {name: value for name, value in more.items() if name not in home}
    own = {name: more[name] for name in home} | {"callbacks": [one() for one in callbacks]} | (own or {})
    base, gradients = task.host(), list[dict[str, Tensor]]()
    if mode in ("home", "both"):
        base = type("Home", (WholeBatchTrainer, base), {})
        own = (
            ({} if "memory" in own else {"micro_batch": -(-ROWS // parts // steps)})
            | {"loss": task.loss}
            | own
        )

    class Recorded(base):  # pyright: ignore
        def _clip_grad_norm(self, model: nn.Module) -> Any:
            named = self.model.named_parameters()
            gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
            return super()._clip_grad_norm(model)

    kind = transformers.TrainingArguments
    if task.needs == "trl":
        from trl import SFTConfig

        kind = SFTConfig
        settings = {"bf16": False, "gradient_checkpointing": False, "max_length": 64} | settings
    arguments = kind(
        output_dir=folder or tempfile.mkdtemp(),
        **{
            "per_device_train_batch_size": ROWS // steps // ranks,
            "gradient_accumulation_steps": steps,
            "max_steps": updates,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "logging_steps": 1,
            "save_strategy": "no",
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "train_sampling_strategy": "sequential",
            **task.arguments,
            **settings,
        },
    )
    with quiet():
        trainer = Recorded(model=task.model(), args=arguments, **data_of(task, 5 * ROWS), **own)
    return Run(trainer, gradients)


def train(task: Task, mode: Mode, **more: Any) -> Run:
    """Make a Trainer, as `trainer_of`, and train."""
    run = trainer_of(task, mode, **more)
    with quiet():
        run.trainer.train()
    return run


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the host's progress to itself."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def error(right: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """Return the distance of all tensors together, relative to the right ones."""
    gaps = [(found[name].double() - right[name].double()).norm() for name in right]
    return float(
        torch.stack(gaps).norm() / torch.stack([one.double().norm() for one in right.values()]).norm()
    )


def weights(run: Run) -> dict[str, Tensor]:
    """Return the parameters after training."""
    return {name: p.detach() for name, p in run.trainer.model.named_parameters()}


def measured() -> Iterator[Row]:
    """Yield a row of the table for each task whose libraries are installed."""
    for task in TASKS:
        if find_spec(task.needs) is None:
            continue
        whole, alone, home = [train(task, mode) for mode in ("whole", "alone", "home")]
        yield Row(
            host="transformers" if task.needs == "transformers" else task.needs,
            task=task.name,
            alone=error(whole.gradients[0], alone.gradients[0]),
            home=error(whole.gradients[0], home.gradients[0]),
            losses=(whole.logged("loss")[0], alone.logged("loss")[0], home.logged("loss")[0]),
        )
