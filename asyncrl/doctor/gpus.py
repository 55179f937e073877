"""GPUs: the driver against the wheels, what NVML sees against what torch sees, NCCL, and what compiles kernels.

Only `look` touches the machine. It creates no CUDA context, so it takes no memory of a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.machine import OLDEST_DRIVER, visible_gpus
from asyncrl.doctor.finding import Finding, failed, ok, warning
from asyncrl.observability.text_plots import size

Version = tuple[int, ...]

_BFLOAT16 = (8, 0)
"""The first compute capability with bfloat16 in hardware."""
_IN_USE = 0.05
"""Share of a GPU's memory that may be in use before a job starts. An idle GPU with a display or MPS has a little."""


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """One GPU, as NVML shows it."""

    uuid: str
    name: str
    capability: tuple[int, int]
    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """What driver, torch and the environment say of GPUs."""

    gpus: tuple[SeenGpu, ...] = ()
    driver: str | None = None
    """Version of the driver; None without one."""
    driver_cuda: Version | None = None
    """The newest CUDA that the driver runs."""
    nvml_error: str | None = None
    device_files: bool = False
    """Whether the kernel's driver is loaded (/dev/nvidiactl)."""
    mask: str | None = None
    """CUDA_VISIBLE_DEVICES."""
    torch_cuda: Version | None = None
    """The CUDA that torch was built for; None: torch without CUDA."""
    torch_gpus: int = 0
    nccl_built: Version | None = None
    """The NCCL that torch was built with; None: torch without NCCL."""
    nccl_loaded: Version | None = None
    """The NCCL that this process has loaded."""
    nccl_installed: str | None = None
    """Version of the pip package."""

    @property
    def visible(self) -> tuple[str, ...]:
        """The GPUs that a job would plan with."""
        if self.mask is not None and not self.mask.strip():
            return ()
        return visible_gpus(self.mask, [gpu.uuid for gpu in self.gpus])


@dataclass(frozen=True, slots=True)
class Tools:
    """What compiles on this machine; None where it is missing."""

    cc: str | None
    cxx: str | None
    headers: bool
    """Whether the C headers of this Python are there."""
    nvcc: str | None


def driver(facts: GpuFacts) -> Finding:
    """Whether the driver runs the CUDA of the wheels."""
    if facts.driver is None or facts.driver_cuda is None:
        if not facts.device_files:
            return ok("driver", "no NVIDIA driver: jobs run on the CPU")
        return failed(
            "driver",
            f"the kernel has an NVIDIA driver, but its library does not answer: {facts.nvml_error}",
            "in a container give it the driver's libraries (docker run --gpus all, NVIDIA_DRIVER_CAPABILITIES="
            "compute,utility); after an update of the driver reboot, or load its module again",
        )
    seen = f"{facts.driver}, which runs CUDA {_text(facts.driver_cuda)}"
    if facts.torch_cuda is None:
        return failed("driver", f"{seen}; torch was built without CUDA", "pip install -r requirements.lock")
    needed = facts.torch_cuda[0]
    if facts.driver_cuda[0] < needed:
        return failed(
            "driver",
            f"{seen}; the wheels were built for CUDA {_text(facts.torch_cuda)}",
            f"install driver {OLDEST_DRIVER.get(needed, 'of that CUDA')} or newer, or NVIDIA's cuda-compat package",
        )
    return ok("driver", f"{seen}; the wheels were built for {_text(facts.torch_cuda)}")


def devices(facts: GpuFacts) -> Iterator[Finding]:
    """Whether torch sees the GPUs that a job would plan with, and whether they are free and new enough."""
    if not facts.gpus:
        return
    expected, mask = len(facts.visible), "" if facts.mask is None else f" under CUDA_VISIBLE_DEVICES={facts.mask}"
    seen = f"{len(facts.gpus)} x {facts.gpus[0].name} ({size(facts.gpus[0].total_bytes)})"
    if facts.torch_gpus != expected:
        yield failed(
            "GPUs",
            f"{seen}: the driver shows {expected}{mask}, torch {facts.torch_gpus}",
            "mend the driver first if it failed above; else look for a GPU in another state (nvidia-smi: MIG, "
            "exclusive mode, a fault), or for a mask that names a GPU twice",
        )
        return
    yield ok("GPUs", f"{seen}, {expected} visible{mask}")
    busy = [i for i, gpu in enumerate(facts.gpus) if gpu.used_bytes > _IN_USE * gpu.total_bytes]
    if busy:
        held = ", ".join(f"GPU {i} {size(facts.gpus[i].used_bytes)}" for i in busy)
        yield warning("GPU memory", f"in use by others: {held}", "end them (nvidia-smi shows their processes)")
    old = {gpu.name for gpu in facts.gpus if gpu.capability < _BFLOAT16}
    if old:
        yield warning("GPUs", f"{', '.join(sorted(old))} has no bfloat16", 'set model.dtype = "float32"')


def nccl(facts: GpuFacts) -> Iterator[Finding]:
    """Whether the NCCL that is loaded is that of the wheels: trainer and engines must speak the same one."""
    if not facts.gpus:
        return
    if facts.nccl_built is None or facts.nccl_loaded is None:
        yield failed("NCCL", "torch cannot load NCCL", "pip install -r requirements.lock")
        return
    installed = f"package {facts.nccl_installed or 'none'}"
    if facts.nccl_loaded < facts.nccl_built or not _same(facts.nccl_loaded, facts.nccl_installed):
        level = failed if facts.nccl_loaded < facts.nccl_built else warning
        yield level(
            "NCCL",
            f"{_text(facts.nccl_loaded)} is loaded, torch was built with {_text(facts.nccl_built)} ({installed})",
            "take other copies of libnccl.so.2 out of LD_LIBRARY_PATH and LD_PRELOAD; trainer and engines must load "
            "the same one",
        )
        return
    yield ok("NCCL", f"{_text(facts.nccl_loaded)} ({installed})")


def compilers(facts: GpuFacts, tools: Tools) -> Iterator[Finding]:
    """Whether engines can compile: Triton builds a launcher in C at each first start, FlashInfer and SGLang's own
    kernels need nvcc with g++."""
    if not facts.gpus:
        return
    if tools.cc is None:
        yield failed("compiler", "neither gcc nor clang, and CC is not set", "apt install gcc, or set CC")
    elif not tools.headers:
        yield failed("compiler", f"{tools.cc}, but no Python.h", "apt install python3-dev, of this Python's version")
    else:
        yield ok("compiler", tools.cc)
    if tools.nvcc is not None and tools.cxx is not None:
        yield ok("CUDA toolkit", tools.nvcc)
    else:
        seen = "no g++" if tools.nvcc is not None else "no nvcc in CUDA_HOME, on the PATH or in /usr/local/cuda"
        wanted = "the CUDA toolkit" if facts.torch_cuda is None else f"the CUDA {facts.torch_cuda[0]} toolkit"
        yield warning(
            "CUDA toolkit",
            f"{seen}: an engine that needs a kernel which no package has ends at its start",
            f'install {wanted} and g++, or try engine.server_args.attention_backend = "triton"',
        )


def look() -> GpuFacts:
    """The facts of this machine."""
    import torch

    gpus, driver_version, driver_cuda, error = _ask_nvml()
    cuda = torch.version.cuda
    return GpuFacts(
        gpus=gpus,
        driver=driver_version,
        driver_cuda=driver_cuda,
        nvml_error=error,
        device_files=Path("/dev/nvidiactl").exists(),
        mask=os.environ.get("CUDA_VISIBLE_DEVICES"),
        torch_cuda=None if cuda is None else tuple(map(int, cuda.split("."))),
        torch_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        nccl_built=_built_nccl(),
        nccl_loaded=_loaded_nccl(),
        nccl_installed=_installed(f"nvidia-nccl-cu{cuda.split('.')[0]}") if cuda else None,
    )


def find_tools() -> Tools:
    """What of this machine Triton, FlashInfer and SGLang would compile with, by their own rules."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = f"{home or '/usr/local/cuda'}/bin/nvcc"
    return Tools(
        cc=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        cxx=os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++"),
        headers=Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
        nvcc=(None if home else shutil.which("nvcc")) or (nvcc if Path(nvcc).is_file() else None),
    )


def _ask_nvml() -> tuple[tuple[SeenGpu, ...], str | None, Version | None, str | None]:
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), None, None, str(error)
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            gpus.append(
                SeenGpu(
                    uuid=pynvml.nvmlDeviceGetUUID(handle),
                    name=pynvml.nvmlDeviceGetName(handle),
                    capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                    total_bytes=memory.total,
                    used_bytes=memory.used,
                )
            )
        return tuple(gpus), pynvml.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10), None
    except pynvml.NVMLError as error:
        return (), None, None, str(error)
    finally:
        pynvml.nvmlShutdown()


def _built_nccl() -> Version | None:
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    return tuple(torch.cuda.nccl.version()[:3])  # type: ignore[no-untyped-call]


def _loaded_nccl() -> Version | None:
    """The NCCL of this process; after torch was imported, it is the one that torch uses."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _same(loaded: Version, installed: str | None) -> bool:
    return installed is None or installed.split(".")[: len(loaded)] == [str(part) for part in loaded]


def _text(version: Version) -> str:
    return ".".join(map(str, version))
