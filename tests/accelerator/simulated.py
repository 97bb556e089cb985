"""A simulated accelerator, "sim": compiled once, and loaded in a process of its own, which it changes."""

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from anybatch.core import accelerator

SOURCE = Path(__file__).with_name("simulated.cpp")
FOLDER = Path(__file__).parents[2] / "build" / "accelerator"  # git ignores it
NAME = "anybatch_simulated"
UNLIMITED = 2**63 - 1


class BuildError(Exception):
    """The device cannot be compiled here."""


def build() -> Path:
    """Return the compiled library; compile it unless this source was compiled for this torch before."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise BuildError("this machine has no C++ compiler")
    python = sysconfig.get_paths()["include"]
    folders = [f"-I{folder}" for folder in (*cpp_extension.include_paths(), python)]
    links = [f"{flag}{folder}" for folder in cpp_extension.library_paths() for flag in ("-L", "-Wl,-rpath,")]
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    libraries = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    source = SOURCE.read_bytes()
    key = hashlib.sha256(repr((source, torch.__version__, python, folders, flags)).encode()).hexdigest()[:16]
    built = FOLDER / f"{key}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, the others wait
        if not built.exists():
            made = built.with_suffix(".part")
            command = [compiler, str(SOURCE), *flags, *folders, *links, *libraries, "-o", str(made)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                told = run.stderr.strip().splitlines()
                raise BuildError(" ".join([line for line in told if "error" in line][-3:] or told[-3:]))
            made.rename(built)
    return built


def load() -> ModuleType:
    """Register the device in this process, before its first backward; return its module, `torch.sim`."""
    if hasattr(torch, "sim"):
        return torch.sim
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    native: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    torch.utils.rename_privateuse1_backend("sim")
    sim: Any = ModuleType("sim")
    sim.native = native
    sim.is_available = sim.is_initialized = lambda: True
    sim.device_count = lambda: 1
    sim.current_device = lambda: 0
    sim._is_in_bad_fork = lambda: False
    sim.default_generators = (native.default_generator(),)
    sim.manual_seed_all = sim.default_generators[0].manual_seed
    sim.get_rng_state = lambda device=0: sim.default_generators[0].get_state()
    sim.set_rng_state = lambda state, device=0: sim.default_generators[0].set_state(state)
    sim.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    sim.memory_allocated = lambda device=None: native.in_use()
    sim.memory_reserved = lambda device=None: native.reserved()
    sim.max_memory_allocated = lambda device=None: native.peak()
    sim.max_memory_reserved = lambda device=None: native.reserved_peak()
    sim.reset_peak_memory_stats = lambda device=None: native.reset_peak()
    whole: list[int] = []  # the limit without a fraction, while there is one

    def needs_index(device: object) -> None:
        if isinstance(device, torch.device) and device.index is None:
            raise ValueError(f"Expected a torch.device with a specified index, got {device}")

    def set_fraction(fraction: float, device: object = None) -> None:
        needs_index(device)
        limit = whole.pop() if whole else native.limit()
        if fraction < 1:
            whole.append(limit)
        native.set_limit(int(fraction * limit) if fraction < 1 else limit)

    def total() -> int:
        return whole[0] if whole else native.limit()

    sim.mem_get_info = lambda device=None: (total() - native.reserved(), total())
    sim.set_per_process_memory_fraction = set_fraction
    sim.get_per_process_memory_fraction = lambda device=None: needs_index(device) or native.limit() / total()
    sim.get_device_name = lambda device=None: "simulated"
    sim.empty_cache = native.empty_cache
    sim.device = lambda device: nullcontext()
    sim.Stream, sim.Event = torch.Stream, torch.Event
    torch._register_device_module("sim", sim)
    torch.utils.generate_methods_for_privateuse1_backend()
    return sim


def _begin() -> None:
    """Make the process like those of the tests."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    load()


@contextmanager
def process() -> Generator[Callable[..., Any]]:
    """Give a function that calls a function, with arguments, in a process that has the device."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin) as pool:
        pool.submit(len, ()).result(timeout=300)  # its thread and process belong to no single test
        yield lambda function, *args: pool.submit(function, *args).result(timeout=120)


@contextmanager
def counted() -> Generator[dict[str, int]]:
    """Give a dict that holds, afterwards, what was done to the device; "stops" are all waits of the host."""
    native, found = load().native, dict[str, int]()
    before = native.counts()
    yield found
    found |= {name: value - before[name] for name, value in native.counts().items()}
    found["stops"] = found["items"] + found["waits"] + found["copies_out"]


@contextmanager
def uncounted() -> Generator[None]:
    """Hide the statistics of the device's memory, as on MPS."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in vars(load()) if "mem" in name]:
            patch.delattr(torch.sim, name)
        yield


@contextmanager
def without_float64() -> Generator[None]:
    """Give the device no float64, as on MPS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "widest", lambda device: torch.float32)
        load().native.set_float64(False)
        try:
            yield
        finally:
            torch.sim.native.set_float64(True)


@contextmanager
def limited(bytes_: int) -> Generator[None]:
    """Limit the memory that is reserved on the device: the bytes in use, unless it is `caching`."""
    load().native.set_limit(bytes_)
    try:
        yield
    finally:
        load().native.set_limit(UNLIMITED)


@contextmanager
def caching() -> Generator[None]:
    """Give the device's allocator the cache, the segments and the rounding of CUDA's."""
    native = load().native
    native.set_caching(True)
    try:
        yield
    finally:
        native.set_caching(False)
        native.empty_cache()
