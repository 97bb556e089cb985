"""Figures of a device: memory, speed and bandwidth; and budgets in bytes."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path, PurePosixPath

import torch

from anybatch.core import PlanError, accelerator, parse_bytes
from anybatch.memory.reading import held_by_malloc


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The figures of a device that planning needs; the device need not be in this machine."""

    name: str  # the name passed to `find_device`
    kind: str  # of its torch.device, such as "cpu"
    flops: float  # floating-point operations per second that matrix products reach, in float32
    half_flops: float  # the same in bfloat16 and float16
    bandwidth: float  # bytes per second to and from its own memory
    num_bytes: int = 0  # the memory of a card that is not here; what is here is asked only if need be
    link: float = 0.0  # bytes per second to and from the host; 0 if it is the host
    capability: float = 0.0  # compute capability, which decides on the kernels of attention
    is_here: bool = False  # this machine has it, so that it can be measured

    def seconds(self, operations: float, flops: float, moved: float, *, half: bool = False) -> float:
        """Return the seconds of some work: the roofline of Williams et al. 2009, as a sum, not a maximum."""
        rate = self.half_flops if half else self.flops
        return operations * _LAUNCH_S + flops / rate + moved / self.bandwidth

    @property
    def workspace(self) -> int:
        """Bytes that cuBLAS keeps: a workspace for each of the threads of forward and backward."""
        # `getChosenWorkspaceSize` of torch 2.13 without CUBLAS_WORKSPACE_CONFIG: 32 MiB from Hopper on, else
        # :4096:2:16:8, which is 8,320 KiB. An H100 held twice the former and 1 MiB, which is cuBLASLt's.
        kept = 65 * 2**20 if self.capability >= 9 else (2 * 8320 + 1024) * 2**10
        return kept if self.kind == _CARDS_ARE else 0

    def attention(self, dtype: torch.dtype, head: int, is_masked: bool, is_grouped: bool, drops: bool) -> str:
        """Return the kernel by which a card computes `scaled_dot_product_attention` of heads of one size."""
        most, step = 256, 16 // dtype.itemsize
        if self.capability % 1 >= 0.6:  # 8.6 and 8.9 have less shared memory, which backward needs
            most = 192 if drops or head <= 224 else 256
        if self.capability >= _FLASH.get(dtype, inf) and head <= most and not is_masked:
            return f"fused (flash) on {self.name}"
        told = f"{dtype}".removeprefix("torch.")
        if self.capability >= _MEMORY_EFFICIENT.get(dtype, inf):
            is_aligned = head % step == 0 or (dtype is torch.float32 and self.capability < 8)
            if is_aligned and not is_grouped:
                return f"fused (memory-efficient) on {self.name}"
            told += f" of {head} numbers a head" if not is_aligned else " whose heads share keys and values"
        return f"unfused, because {self.name} has no fused kernel for {told}"


# Published figures: memory in bytes, float32 and bfloat16 FLOP/s, memory bandwidth; compute capability; see
# docs/planning.md.
_GPUS: dict[str, tuple[str, float, float, float, float]] = {
    "t4": ("16GB", 8.1e12, 65e12, 0.32e12, 7.5),
    "v100": ("32GB", 15.7e12, 125e12, 0.90e12, 7.0),
    "a100": ("80GB", 19.5e12, 312e12, 2.04e12, 8.0),
    "h100": ("80GB", 67e12, 989e12, 3.35e12, 9.0),
    "h200": ("141GB", 67e12, 989e12, 4.80e12, 9.0),
    "rtx3060": ("12GB", 12.7e12, 51e12, 0.36e12, 8.6),
    "rtx3090": ("24GB", 35.6e12, 71e12, 0.94e12, 8.6),
    "rtx4090": ("24GB", 82.6e12, 165e12, 1.01e12, 8.9),
    "l4": ("24GB", 30.3e12, 121e12, 0.30e12, 8.9),
    "a10": ("24GB", 31.2e12, 125e12, 0.60e12, 8.6),
}
# The compute capability from which torch's fused kernels of attention take a dtype (sdp_utils.cpp, 2.13).
_FLASH = {torch.float16: 8.0, torch.bfloat16: 8.0}
_MEMORY_EFFICIENT = {torch.float32: 5.0, torch.float16: 5.0, torch.bfloat16: 8.0}
_CARDS_ARE = "cuda"  # the kind of all of them
#: Cards that can be planned for without having one.
CARDS_BY_NAME = tuple(f"{_CARDS_ARE}:{card}" for card in _GPUS)
_TYPICAL = "rtx3060"  # the card assumed where none is named, and for other accelerators
_REACHED = 0.5  # share of the published figures that ordinary models reach
_LINK = 20e9  # bytes per second over PCIe 4 with 16 lanes, as measured by many
_LAUNCH_S = 5e-6  # seconds that one operation costs, however small
_CPU_FLOPS_PER_THREAD = 40e9
_CPU_BANDWIDTH = 10e9
_AUTO = 0.9  # share of the free memory that is used if no budget is named


def find_device(name: str | torch.device) -> Device:
    """Return a device of this machine, or a card by name, such as cuda:a100; raise PlanError for others."""
    text = str(name).lower()
    kind, _, model = text.partition(":")
    if kind == "cpu":
        flops = torch.get_num_threads() * _CPU_FLOPS_PER_THREAD
        return Device(
            name=text, kind=kind, flops=flops, half_flops=flops, bandwidth=_CPU_BANDWIDTH, is_here=True
        )
    is_index = model.isdecimal() or not model
    if is_index and kind == accelerator.find() and int(model or 0) < torch.accelerator.device_count():
        return _here(text)
    if kind == _CARDS_ARE and (model in _GPUS or is_index):
        return _gpu(text, model if model in _GPUS else _TYPICAL)
    raise PlanError(
        f"Expected a device to plan for, got {str(name)!r}. Use cpu, the accelerator of this machine, or a "
        f"card by name: {', '.join(CARDS_BY_NAME)}."
    )


def parse_memory(memory: str | int, device: Device) -> int:
    """Return a budget in bytes; raise PlanError for anything else than these.

    `memory` is bytes ("12GB", "2GiB", an int), a share of the device's memory ("80%"), or "auto": 90 % of the
    memory that is free or held by tensors (of all its memory, if the device is not in this machine). On the
    CPU shares respect control groups and process limits, and leave out memory that is not used by tensors.
    Bytes are returned without asking the device.
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*%\s*", memory) if isinstance(memory, str) else None
    if found is None and memory != "auto":
        return parse_bytes(memory)
    share = float(found[1]) / 100 if found else _AUTO
    if not 0 < share <= 1:
        raise PlanError(f"Expected a share of more than 0 and at most 100 %, got {memory!r}. Write 80%.")
    known = _free_and_total(torch.device(device.name)) if device.is_here else [device.num_bytes] * 2
    if known is None:
        raise PlanError(
            f"Expected a budget in bytes for {device.name}, which does not tell how much memory it has, got "
            f'{memory!r}. Write "8GB".'
        )
    return int(share * known[memory != "auto"])


def room_of(device: torch.device) -> int | None:
    """Return the bytes of a device of this machine that are free or held by tensors, 10 % left out.

    None means that the device does not tell: there is no limit that could be known.
    """
    known = _free_and_total(device)
    return None if known is None else int(_AUTO * known[0])


def _gpu(name: str, model: str) -> Device:
    memory, flops, half_flops, bandwidth, capability = _GPUS[model]
    return Device(
        name=name if name.endswith(f":{model}") else f"{name} (taken to be a {model})",
        kind=_CARDS_ARE,
        num_bytes=parse_bytes(memory),
        flops=_REACHED * flops,
        half_flops=_REACHED * half_flops,
        bandwidth=_REACHED * bandwidth,
        link=_LINK,
        capability=capability,
    )


def _here(name: str) -> Device:
    device = torch.device(name)
    squeezed = re.sub(r"[^a-z0-9]", "", accelerator.name_of(device).lower())
    model = next((one for one in sorted(_GPUS, key=len, reverse=True) if one in squeezed), _TYPICAL)
    return replace(_gpu(name, model), name=name, kind=device.type, num_bytes=0, is_here=True)


def _free_and_total(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes that tensors may use, free or held by them and in all; None if it is not told.

    On the host these are the least that machine, control groups and limits leave. From each limit subtract
    memory in use for other things than our tensors: by all processes or, for the second number, by this
    process, such as its code and Python objects.
    """
    if device.type != "cpu":
        return accelerator.free_and_total(device)
    own = _kilobytes("proc/self/status")
    ours = own.get("RssAnon", 0)
    held = min(held_by_malloc(), ours)
    shared, mine = [*_machine(), *_groups()], [*_process_limits(own)]
    free = [max(1, limit - max(0, used - held)) for limit, used in shared + mine]
    total = [max(1, limit - ours + held) for limit, _ in shared] + free[len(shared) :]
    return (min(free), min(total)) if free else None


def _machine() -> Iterator[tuple[int, int]]:
    """Yield size and use of this machine's memory; nothing if the system does not tell, as Windows."""
    known = _kilobytes("proc/meminfo")
    if {"MemTotal", "MemAvailable"} <= known.keys():
        yield known["MemTotal"], known["MemTotal"] - known["MemAvailable"]
    elif {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= getattr(os, "sysconf_names", {}).keys():  # not Linux
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0


def _groups() -> Iterator[tuple[int, int]]:
    """Yield limit and use of this process's control group (v2) and of the groups around it.

    The page cache does not count as used: it can be dropped. In a container the path may not be visible; the
    container's own group is then the root.
    """
    path = next((line[3:] for line in _read("proc/self/cgroup").splitlines() if line.startswith("0::")), "")
    root = PurePosixPath("sys/fs/cgroup")
    for group in (one := root / path.lstrip("/"), *one.parents):
        if not group.is_relative_to(root):
            return
        texts = [_read(group / name).strip() for name in ("memory.max", "memory.high")]
        limits = [int(text) for text in texts if text.isdecimal()]
        used = _read(group / "memory.current").strip()
        if limits and used.isdecimal():
            cached = re.search(r"^inactive_file (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
            yield min(limits), int(used) - (int(cached[1]) if cached else 0)


def _process_limits(own: dict[str, int]) -> Iterator[tuple[int, int]]:
    try:
        import resource
    except ImportError:  # Windows
        return
    for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            yield limit, own.get(used, 0)


def _kilobytes(path: str) -> dict[str, int]:
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", _read(path), re.M)}


_ROOT = Path("/")


def _read(path: str | PurePosixPath) -> str:
    try:
        return (_ROOT / path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
