"""What models run on here: device, memory, versions and caches, and which of it could be faster.

`Environment.detect` looks once; everything else is a function of what it found.
"""

import math
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import torch
from rich.filesize import decimal

from ragkv import paths
from ragkv.packaged import PACKAGED, path
from ragkv.placement import choose_attention, choose_device, choose_dtype, has_native_bfloat16

PACKAGES = (
    *("ragkv", "torch", "transformers", "tokenizers", "sentence-transformers", "faiss-cpu", "flash-attn"),
    *("langchain-core", "llama-index-core", "llguidance"),
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Environment:
    """This machine and this process.

    Attributes:
        device, dtype, attn_implementation: what a model gets that is loaded without options.
        device_name: of the GPU or the CPU.
        native_bfloat16: whether the device computes in bfloat16, rather than emulates it.
        memory_bytes, memory_available_bytes: of the device; None where the system does not say.
        cpus: that this process may use, containers' limits included.
        threads: that torch uses.
        thread_limits: environment variables that lower the threads.
        nvidia_driver: whether there is an NVIDIA GPU, seen by torch or not.
        versions: of packages; None where one is not installed.
        cache_folder, cache_bytes, cache_free_bytes: where models and indexes are kept, by kind, and what is left.
        fetched_models: packaged models that are here.
    """

    python: str
    system: str
    device: str
    device_name: str
    dtype: str
    native_bfloat16: bool
    attn_implementation: str
    memory_bytes: int | None
    memory_available_bytes: int | None
    cpus: int
    threads: int
    thread_limits: Mapping[str, str]
    nvidia_driver: bool
    versions: Mapping[str, str | None]
    cache_folder: str
    cache_bytes: Mapping[str, int]
    cache_free_bytes: int
    fetched_models: tuple[str, ...]

    @classmethod
    def detect(cls) -> Self:
        """What is found now."""
        device = choose_device()
        dtype = choose_dtype(device)
        available, memory = torch.cuda.mem_get_info(device) if device.type == "cuda" else _memory()
        home = paths.home()
        return cls(
            python=platform.python_version(),
            system=f"{platform.system()} {platform.machine()}",
            device=str(device),
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
            dtype=str(dtype).removeprefix("torch."),
            native_bfloat16=has_native_bfloat16(device),
            attn_implementation=choose_attention(device, dtype),
            memory_bytes=memory,
            memory_available_bytes=available,
            cpus=usable_cpus(),
            threads=torch.get_num_threads(),
            thread_limits={name: os.environ[name] for name in THREAD_VARIABLES if os.environ.get(name)},
            nvidia_driver=shutil.which("nvidia-smi") is not None,
            versions={package: _version(package) for package in PACKAGES},
            cache_folder=str(home),
            cache_bytes={folder: _folder_bytes(home / folder) for folder in ("models", "gguf", "indexes")},
            cache_free_bytes=_free_bytes(home),
            fetched_models=tuple(name for name in PACKAGED if path(name) is not None),
        )

    def to_json(self) -> dict[str, Any]:
        """All of it as a JSON object, advice included."""
        return {**asdict(self), "advice": list(self.advice())}

    def rows(self) -> Iterator[tuple[str, str]]:
        """Names and values for people."""
        yield "device", f"{self.device} ({self.device_name})"
        yield "dtype", self.dtype
        yield "attention", self.attn_implementation
        memory, available = (_bytes(size) for size in (self.memory_bytes, self.memory_available_bytes))
        yield "memory", f"{memory}, {available} available"
        yield "threads", f"{self.threads} on {self.cpus} CPUs"
        yield "system", f"{self.system}, Python {self.python}"
        for package, installed in self.versions.items():
            yield package, installed or "not installed"
        sizes = ", ".join(f"{name} {decimal(size)}" for name, size in self.cache_bytes.items())
        yield "cache", f"{self.cache_folder} ({sizes}; {decimal(self.cache_free_bytes)} free)"
        yield "fetched models", ", ".join(self.fetched_models) or "none; see `ragkv models list`"

    def advice(self) -> Iterator[str]:
        """What would be faster, one sentence each; nothing if nothing is known to be."""
        on_gpu = self.device.startswith("cuda")
        if self.nvidia_driver and not on_gpu:
            yield "torch does not see the NVIDIA GPU of this machine: install a CUDA build of torch"
        if on_gpu and self.native_bfloat16 and not self.versions.get("flash-attn"):
            yield "long prompts are read faster with flash-attn: pip install 'ragkv[flash]'"
        if not self.native_bfloat16:
            where = "GPU" if on_gpu else "CPU"
            yield f"this {where} emulates bfloat16, so models run in float32; one that has it is several times faster"
        if on_gpu:
            return
        if self.threads > self.cpus:
            yield f"torch uses {self.threads} threads on {self.cpus} CPUs: set OMP_NUM_THREADS={self.cpus}"
        elif self.thread_limits and self.threads < self.cpus:
            names = " and ".join(self.thread_limits)
            yield f"{names} keeps torch at {self.threads} of {self.cpus} CPUs: unset it, or set it to {self.cpus}"


def usable_cpus() -> int:
    """CPUs that this process may use: those of the machine, its affinity, and its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else min(count, max(1, math.ceil(int(quota) / int(period))))


def _memory() -> tuple[int | None, int | None]:
    """(available, installed) bytes of main memory, None where the system does not say."""
    try:
        page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None, None
    return _available_memory(), page * pages


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((1024 * int(kilobytes) for _, kilobytes, *_ in sizes), None)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _folder_bytes(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


def _free_bytes(folder: Path) -> int:
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def _bytes(size: int | None) -> str:
    return "unknown" if size is None else decimal(size)
