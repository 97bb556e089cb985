"""The device of the tests: `--device NAME`, or `ACCELERATOR=NAME`. Tensors that tests make are made there.

Only those: a tensor that anybatch makes is where anybatch puts it. Numbers are drawn on the CPU, so that they
are the same on each device.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS, TORCH = f"{Path(__file__).parent}/", f"{Path(torch.__file__).parent}/"
FACTORIES = "arange empty eye full linspace ones rand randint randn randperm scalar_tensor tensor zeros"
KIND = "cpu"


def use(name: str) -> None:
    """Make tensors of tests on this device, from now on."""
    global KIND
    if name == "sim":
        from tests.accelerator.simulated import BuildError, load

        try:
            load()
        except BuildError as error:
            pytest.exit(f"nothing runs: the simulated accelerator cannot be built: {error}", returncode=0)
    device = torch.device(name)
    KIND = device.type
    for one in FACTORIES.split():
        setattr(torch, one, _placed(getattr(torch, one), device))


def _placed(make: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def made(*args: Any, **keywords: Any) -> Any:
        found = make(*args, **keywords)
        is_placed = any(keywords.get(name) for name in ("device", "out", "pin_memory"))
        if is_placed or not _is_asked_by_a_test():
            return found
        return found.detach().to(device).requires_grad_(found.requires_grad)

    return made


def _is_asked_by_a_test() -> bool:
    """Whether the first caller outside of torch, such as that of `nn.Linear`, is a file of the tests."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(TORCH) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(TESTS)


# A text, because it is read when tests run: this file is imported before the device is known.
needs_cpu = pytest.mark.skipif("config.getoption('--device') != 'cpu'", reason="is about the CPU")
needs_kernels = pytest.mark.skipif(
    "config.getoption('--device') == 'sim'", reason="the simulated device has no kernels for it"
)
