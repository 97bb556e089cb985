"""Parts of the programs in `mistakes`: two small models of transformers, and the command line."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch

from anybatch import AnybatchError
from anybatch.cli.main import main

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def bert() -> tuple[Any, dict[str, Any]]:
    """A classifier and a batch for it."""
    transformers = pytest.importorskip("transformers")
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=20, **SIZES))
    return model, {"input_ids": torch.randint(20, (8, 5)), "labels": torch.randint(2, (8,))}


def clip() -> tuple[Any, dict[str, Any]]:
    """Two towers, and a batch that asks them for their loss."""
    transformers = pytest.importorskip("transformers")
    text = SIZES | {"vocab_size": 20, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 1}
    vision = SIZES | {"image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=4)
    batch = {"input_ids": torch.randint(20, (8, 5)), "pixel_values": torch.randn(8, 3, 8, 8)}
    return transformers.CLIPModel(config), batch | {"return_loss": True}


def cli(line: str) -> None:
    """Run a command; what it says on its way out is raised."""
    command = line.split()[0]
    with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()) as told:
        code = main(line.split())
    assert (code, printed.getvalue()) == (2 if command == "check" else 1, "")
    *_, message = told.getvalue().splitlines()
    assert message.startswith(f"anybatch {command}: ")
    raise AnybatchError(message.removeprefix(f"anybatch {command}: "))
