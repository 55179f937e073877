"""What the job finds on this machine: its ranks, its GPUs and its cores, without importing torch.

Invariants
- Only `Machine.detect` and `installed_gpus` look at the machine. Everything that decides is a pure function.
- A GPU is named by its position among those that this process may use, as torch numbers them. `gpus[i]` is what
  CUDA_VISIBLE_DEVICES of a child process must say to get GPU i. So masks and UUIDs set for the whole job hold for it.
- Nodes are taken to be alike: a process sees the GPUs of its own node only, and assumes the same ones on the others.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.layout import Device, Gpu


@dataclass(frozen=True, slots=True)
class Machine:
    """The part of a machine, and of the gang of machines, that placement and validation look at."""

    world_size: int = 1
    """Trainer ranks of the job, as torchrun started them."""
    local_world_size: int = 1
    """Trainer ranks on each node."""
    rank: int = 0
    """This process's own rank."""
    gpus: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES of a child calls each visible GPU of a node: its index, or the name of a MIG slice."""
    gpu_bytes: int | None = None
    """Memory of each of them, or of the smallest; None where it is not known."""
    host_bytes: int | None = None
    """Memory of a node; None where it is not known."""
    cpus: tuple[int, ...] = (0,)
    """Cores that this process may run on."""
    omp_threads: int | None = None
    """OMP_NUM_THREADS as the user set it; None where it is unset, or was set by torchrun alone."""
    open_files: int | None = None
    """Most files that one process may open, the hard limit; None: without limit."""

    @property
    def nodes(self) -> int:
        """How many nodes the ranks run on."""
        return -(-self.world_size // self.local_world_size)

    @property
    def device(self) -> Device:
        """What the whole job runs on."""
        return "cuda" if self.gpus else "cpu"

    @property
    def all_gpus(self) -> tuple[Gpu, ...]:
        """The visible GPUs of all nodes, node by node."""
        return tuple(Gpu(node, index) for node in range(self.nodes) for index in range(len(self.gpus)))

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> Machine:
        """This machine, from torchrun's environment, the NVIDIA driver and the scheduler."""
        mask = environ.get("CUDA_VISIBLE_DEVICES")
        world_size = int(environ.get("WORLD_SIZE", "1"))
        # An empty mask is how a job says "no GPU": the driver need not be asked.
        installed = () if mask is not None and not mask.strip() else installed_gpus()
        gpus = visible_gpus(mask, [gpu.uuid for gpu in installed])
        return cls(
            world_size=world_size,
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", str(world_size))),
            rank=rank_of(environ),
            gpus=gpus,
            gpu_bytes=memory_of(gpus, installed),
            host_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            cpus=tuple(sorted(os.sched_getaffinity(0))),
            omp_threads=omp_threads_of_user(environ, environment_of_agent),
            open_files=_hard_limit(),
        )


def _hard_limit() -> int | None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def rank_of(environ: Mapping[str, str] = os.environ) -> int:
    """This process's rank, as torchrun set it; 0 without torchrun."""
    return int(environ.get("RANK", "0"))


def omp_threads_of_user(environ: Mapping[str, str], of_agent: Callable[[], Mapping[str, str]]) -> int | None:
    """OMP_NUM_THREADS where the user chose it.

    For several ranks on a node torchrun sets it to 1 unless it is set. So a 1 is the user's only if torchrun's own
    process (`of_agent`: its environment when it was started) had it too.
    """
    first = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not first.isdigit() or int(first) == 0:
        return None
    several = int(environ.get("LOCAL_WORLD_SIZE", "1")) > 1
    if first == "1" and several and "TORCHELASTIC_RUN_ID" in environ and "OMP_NUM_THREADS" not in of_agent():
        return None
    return int(first)


def environment_of_agent() -> dict[str, str]:
    """The environment with which the parent of this process was started; empty where it cannot be read."""
    try:
        pairs = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return {name.decode(): value.decode(errors="replace") for name, _, value in (p.partition(b"=") for p in pairs)}


@dataclass(frozen=True, slots=True)
class InstalledGpu:
    """One GPU that the driver shows."""

    uuid: str
    memory_bytes: int
    """0 where the driver does not tell it."""


def installed_gpus() -> tuple[InstalledGpu, ...]:
    """The GPUs that the NVIDIA driver shows here, in its order; empty without a driver."""
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            InstalledGpu(str(pynvml.nvmlDeviceGetUUID(handle)), _memory_bytes(pynvml, handle)) for handle in handles
        )
    finally:
        pynvml.nvmlShutdown()


OLDEST_DRIVER: Mapping[int, str] = {12: "525", 13: "580"}
"""CUDA's major version → the oldest driver on Linux that runs what was built for it, by NVIDIA's table
(https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def visible_gpus(mask: str | None, installed: Sequence[str]) -> tuple[str, ...]:
    """Names of the GPUs that CUDA would show under `mask`, given the UUIDs of those installed.

    Follows CUDA's own rules: no mask shows all; the first entry that names no GPU ends the list; a UUID may be
    abbreviated while it stays unique; an entry given twice hides everything; of MIG slices only the first counts.

    A UUID becomes the driver's index, because an engine of several GPUs reads its own mask as numbers. Such an engine
    must number GPUs as the driver does (`engine_environment`).
    """
    if mask is None:
        return tuple(str(i) for i in range(len(installed)))
    names: list[str] = []
    for entry in (e.strip() for e in mask.split(",")):
        if entry.startswith("MIG-"):
            return (*names, entry) if installed and not names else tuple(names)
        if entry.isdigit():
            matches = [int(entry)] if int(entry) < len(installed) else []
        else:
            matches = [i for i, uuid in enumerate(installed) if entry.startswith("GPU-") and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        name = str(matches[0])
        if name in names:
            return ()
        names.append(name)
    return tuple(names)


def _memory_bytes(pynvml: Any, handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:  # a GPU that shares the memory of its host has none of its own
        return 0


def memory_of(names: Sequence[str], installed: Sequence[InstalledGpu]) -> int | None:
    """Memory of the smallest of the GPUs that `visible_gpus` named; None without any, and for a slice of one (MIG)."""
    sizes = [installed[int(name)].memory_bytes if name.isdigit() else 0 for name in names]
    return min(sizes, default=0) or None
