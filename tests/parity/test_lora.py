"""Adapters beside frozen weights, as peft makes them: short weights, float32 behind the adapters alone."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from anybatch import ModelLoss, Step
from anybatch.testing import relative_error, tolerance

PRECISIONS = ["float32", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true"]
ROWS = 6


def adapted() -> nn.Module:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    config = transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = transformers.LlamaForCausalLM(config)
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        return peft.get_peft_model(base, lora)


def trained(precision: str, micro_batch: int) -> tuple[nn.Module, Step, list[float]]:
    model = adapted()
    ours = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(ours, lr=1e-2)
    step = Step(model, ModelLoss(), optimizer, micro_batch=micro_batch, precision=precision)
    ids = torch.randint(1, 32, (ROWS, 8), generator=torch.Generator().manual_seed(1))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    return model, step, [step(batch).loss for _ in range(3)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_adapters_train_and_frozen_weights_stay_in_every_cut(precision: str) -> None:
    model, step, losses = trained(precision, 2)
    dtype = {"bf16-true": torch.bfloat16, "fp16-true": torch.float16}.get(precision, torch.float32)
    fresh, ours = dict(adapted().named_parameters()), 0
    for name, parameter in model.named_parameters():
        ours += parameter.requires_grad
        assert parameter.dtype == dtype
        assert parameter.requires_grad or torch.equal(parameter, fresh[name].to(dtype))
    assert len(step.masters.tensors) == (0 if dtype is torch.float32 else ours)
    assert {state["exp_avg"].dtype for state in step.optimizers[0].state.values()} == {torch.float32}
    assert losses[2] < losses[0]
    short = torch.bfloat16 if precision.startswith("bf16") else torch.float16
    limit = tolerance(torch.float32 if precision == "float32" else short, terms=ROWS * 8)
    assert relative_error(torch.tensor(losses), torch.tensor(trained(precision, 5)[2])) <= limit
