"""TRL's trainers with the mixin: the run of the trainer alone, uncut to the bit, and cut."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.homes import WholeBatchTrainer

trl = pytest.importorskip("trl")

import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402

from benchmarks.homes_transformers import SMALL, quiet  # noqa: E402

LOGGED = 1e-4
LIMIT = 1e-6  # the trainers compute log-probabilities in float32
ROWS, UPDATES = 8, 4
PAIRED = "prompt chosen rejected"
COLUMNS = {"SFT": "text", "DPO": PAIRED, "Reward": PAIRED, "KTO": "prompt completion", "GRPO": "prompt"}
GRPO = {"num_generations": 4, "max_completion_length": 8, "temperature": 1.0}
PACKED = {"packing": True, "max_length": 24}
WHOLE = {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1}
HALVES = {"per_device_train_batch_size": ROWS // 2, "gradient_accumulation_steps": 2}

#: Trainer, its settings, and whether rows meet.
RUNS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "SFT": ("SFT", {}, False),
    "SFT, packing": ("SFT", PACKED, False),
    "SFT, packing, accumulation": ("SFT", {**PACKED, **HALVES}, False),
    "SFT, padding-free": ("SFT", {"padding_free": True, "max_length": None}, False),
    "DPO": ("DPO", {}, False),
    "DPO, two losses, accumulation": ("DPO", {"loss_type": ["sigmoid", "sft"], **HALVES}, False),
    "reward": ("Reward", {}, False),
    "KTO": ("KTO", {}, True),
    "GRPO": ("GRPO", GRPO, False),
    "GRPO, accumulation": ("GRPO", {**GRPO, **HALVES}, False),
    "GRPO, mean of sequences": ("GRPO", {**GRPO, "loss_type": "grpo"}, False),
    "GRPO, mean of tokens": ("GRPO", {**GRPO, "loss_type": "bnpo"}, True),
}
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
pytestmark += [pytest.mark.usefixtures("host_leaves_nothing_behind")]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<s>", "</s>", *[f"t{number}" for number in range(3, SMALL["vocab_size"])]]
    table = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="t3"))
    table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "t3"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=table, **special)


def data_of(kind: str) -> Any:
    draw = random.Random(3)

    def text() -> str:
        return " ".join(f"t{draw.randint(4, 59)}" for _ in range(draw.randint(2, 9)))

    names = COLUMNS[kind].split()
    rows = [{name: f"{text()} " for name in names} for _ in range(ROWS)]
    labels = [{"label": at % 3 > 0} if kind == "KTO" else {} for at in range(ROWS)]
    return Dataset.from_list([row | label for row, label in zip(rows, labels, strict=True)])


def score(completions: list[str], **_: Any) -> list[float]:
    return [len(set(one.split())) + 0.1 * at for at, one in enumerate(completions)]


def train(name: str, folder: Path, *, is_whole: bool = False, **ours: Any) -> tuple[Any, Any]:
    """Return the weights after some updates, and what was logged of each."""
    kind, settings, _ = RUNS[name]
    torch.manual_seed(1)
    head = "LlamaForSequenceClassification" if kind == "Reward" else "LlamaForCausalLM"
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(**SMALL, **special, num_hidden_layers=2, num_labels=1)
    made = getattr(transformers, head)
    made(config).double().save_pretrained(folder / "model")  # a reference model is loaded from there
    model = made.from_pretrained(folder / "model", dtype=torch.float64)
    host = getattr(trl, f"{kind}Trainer")
    common = {"max_steps": UPDATES, "learning_rate": 0.5, "optim": "sgd", "lr_scheduler_type": "constant"}
    quietly = {"logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True}
    quietly["disable_tqdm"] = True
    plain = {"bf16": False, "gradient_checkpointing": False, "max_grad_norm": 1e9, "seed": 5}
    settings = {**WHOLE, **common, **quietly, **plain, **settings, **(WHOLE if is_whole else {})}
    arguments = getattr(trl, f"{kind}Config")(output_dir=str(folder / "out"), **settings)
    more = {"reward_funcs": score} if kind == "GRPO" else {}
    bases = (WholeBatchTrainer, host) if ours else (host,)
    with quiet():
        given = {"train_dataset": data_of(kind), "processing_class": tokenizer(), **more, **ours}
        trainer = type("Trained", bases, {})(model=model, args=arguments, **given)
        trainer.train()
    logs = [line for line in trainer.state.log_history if "grad_norm" in line]
    return {name: one.detach() for name, one in trainer.model.named_parameters()}, logs


def distance(right: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    gaps = torch.stack([(one - found[name]).norm() for name, one in right.items()])
    return float(gaps.norm() / torch.stack([one.norm() for one in right.values()]).norm())


@pytest.mark.parametrize("name", RUNS)
def test_updates_are_those_of_the_trainer_alone(name: str, tmp_path: Path) -> None:
    rows_meet = RUNS[name][2]
    right, logs = train(name, tmp_path, is_whole=True)  # its own accumulation averages means of tokens
    uncut, _ = train(name, tmp_path, micro_batch=None, rows_meet=rows_meet)
    is_whole = "accumulation" not in name
    assert distance(right, uncut) <= (0.0 if is_whole and not rows_meet else LIMIT)
    found, told = train(name, tmp_path, micro_batch=2, rows_meet=rows_meet)
    assert distance(right, found) <= LIMIT
    assert len(logs) == len(told) == UPDATES
    assert any(line["grad_norm"] > 0.01 for line in logs)
    for one, other in zip(logs, told, strict=True):
        for value in ("loss", "grad_norm", "num_tokens"):
            assert other.get(value) == pytest.approx(one.get(value), rel=LOGGED, abs=LIMIT), value
