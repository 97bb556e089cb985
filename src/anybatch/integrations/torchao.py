"""What is special about torchao: linear layers whose matrix products are in 8-bit floats."""

import importlib
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from anybatch.core import PlanError

_LEAST = 8, 9  # compute capability of the first cards that multiply 8-bit floats
_MULTIPLE = 16  # what their kernels want sizes to be multiples of


def refuse_without_float8(model: nn.Module) -> None:
    """Refuse 8-bit floats where the package or the device does not have them.

    Raises:
        PlanError: torchao is not installed, or the model is on another device than such a GPU.
    """
    devices = {parameter.device for parameter in model.parameters()}
    able = [one for one in devices if one.type == "cuda" and torch.cuda.get_device_capability(one) >= _LEAST]
    if not devices or len(able) < len(devices):
        raise PlanError(
            "Expected a model on a GPU with 8-bit floats (compute capability 8.9 or higher) for "
            f'compute="float8", got one on {sorted(map(str, devices))}. Move it there before the step is '
            'made, or take compute="bfloat16".'
        )
    _torchao()


def with_float8_linear(model: nn.Module, kept: Collection[nn.Module], *, emulate: bool = False) -> None:
    """Let linear layers multiply in 8-bit floats, in place; their weights are the same parameters.

    Args:
        model: whose linear layers are replaced by torchao's, if their sizes are multiples of 16.
        kept: modules that stay as they are.
        emulate: with arithmetic that every device has: for tests.

    Raises:
        PlanError: torchao is not installed.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 3.
    """
    torchao = _torchao()

    def is_meant(module: nn.Module, name: str) -> bool:
        sizes = getattr(module, "in_features", 1), getattr(module, "out_features", 1)
        return module not in kept and all(size % _MULTIPLE == 0 for size in sizes)

    settings = torchao.Float8LinearConfig(emulate=emulate)
    torchao.convert_to_float8_training(model, module_filter_fn=is_meant, config=settings)


def _torchao() -> Any:
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise PlanError(
            f'Expected torchao for compute="float8", got {error}. Install it with: pip install torchao'
        ) from None
