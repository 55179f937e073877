"""The machine beside its GPUs: shared memory, file limits, ports, disk and memory. Functions of figures."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from asyncrl.doctor.finding import Finding, failed, ok, warning
from asyncrl.errors import EngineError
from asyncrl.host.ports import PortAllocator
from asyncrl.observability.text_plots import size

SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED, _ENOUGH_SHARED = 64 << 20, 1 << 30
"""NCCL and the ranks of an engine put tens of megabytes per rank there; docker gives 64 MiB unless it is told."""
_ENOUGH_FILES = 1024
_CACHE_BYTES = 5_000_000_000
"""What engines on GPUs compile and keep in ~/.triton and ~/.cache."""
_LOOPBACK_S = 5.0


def shared_memory(total_bytes: int, free_bytes: int) -> Finding:
    """Room for what ranks and engines share; both are 0 where there is no such directory."""
    seen = f"{size(free_bytes)} of {size(total_bytes)} are free in {SHARED_MEMORY}"
    mend = f"give a container --shm-size=8g (or --ipc=host); else empty {SHARED_MEMORY}, or mount it larger"
    if free_bytes < _LEAST_SHARED:
        return failed("shared memory", seen, mend)
    return warning("shared memory", seen, mend) if free_bytes < _ENOUGH_SHARED else ok("shared memory", seen)


def open_files(hard: int | None) -> Finding:
    """The hard limit, which a job raises its soft one to; None: there is none."""
    if hard is None or hard >= _ENOUGH_FILES:
        return ok("open files", "no limit" if hard is None else f"at most {hard} a process")
    return failed("open files", f"at most {hard} a process", "raise the hard limit (ulimit -Hn, LimitNOFILE=)")


def ports(allocator: PortAllocator) -> Finding:
    """Whether ports are free, and whether a server on loopback can be reached."""
    try:
        port = allocator.reserve()
    except EngineError as error:
        return failed("ports", str(error), "end other jobs on this machine, or widen the range of free ports")
    try:
        with socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(_LOOPBACK_S)
            with socket.create_connection(("127.0.0.1", port), _LOOPBACK_S), server.accept()[0]:
                pass
    except OSError as error:
        return failed(
            "ports",
            f"port {port} of 127.0.0.1 was free, and could not be reached: {error}",
            "let the firewall pass what goes over lo, and bring lo up (ip link set lo up)",
        )
    return ok("ports", "a free one on 127.0.0.1 could be reached")


def disk(what: str, place: Path, free_bytes: int, needed_bytes: int, writable: bool, mend: str) -> Finding:
    """Room below `place`, and the right to write there."""
    if not writable:
        return failed(what, f"{place} cannot be written", mend)
    seen = f"{size(free_bytes)} are free at {place}"
    if free_bytes < needed_bytes:
        return warning(what, f"{seen}; {size(needed_bytes)} may be needed", mend)
    return ok(what, seen)


def memory(available_bytes: int, needed_bytes: int) -> Finding:
    """Host memory."""
    seen = f"{size(available_bytes)} are available"
    if available_bytes < needed_bytes:
        mend = "end other processes, raise the container's limit, or take a smaller model or fewer engines"
        return warning("memory", f"{seen}; about {size(needed_bytes)} are needed", mend)
    return ok("memory", seen)


def look(run_dir: Path, *, run_bytes: int, memory_bytes: int, on_gpus: bool) -> Iterator[Finding]:
    """Every check here, on this machine. `run_bytes` may come into `run_dir`; `memory_bytes` are needed."""
    shared = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    yield shared_memory(0, 0) if shared is None else shared_memory(shared.total, shared.free)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    yield open_files(None if hard == resource.RLIM_INFINITY else hard)
    allocator = PortAllocator()
    try:
        yield ports(allocator)
    finally:
        allocator.close()
    yield _disk("run directory", run_dir, run_bytes, "choose another run.dir, or make room")
    if on_gpus:
        mend = (
            "make room in your home, or point XDG_CACHE_HOME, TRITON_CACHE_DIR and FLASHINFER_WORKSPACE_BASE elsewhere"
        )
        yield _disk("cache", Path.home(), _CACHE_BYTES, mend)
    yield memory(available_memory(), memory_bytes)


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that processes may still take: what the machine has, within the limit of this container."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))


def _disk(what: str, place: Path, needed_bytes: int, mend: str) -> Finding:
    existing = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return disk(what, place, free, needed_bytes, os.access(existing, os.W_OK | os.X_OK), mend)
