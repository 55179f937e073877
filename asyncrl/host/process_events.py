"""Events about the processes of the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.observability.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStarted(Event):
    kind: ClassVar[str] = "host_started"
    pid: int
    job: str
    """Value of ASYNCRL_JOB in the environment of everything below the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEnded(Event):
    kind: ClassVar[str] = "host_ended"
    pid: int
    expected: bool
    survivors: int
    """Processes of the job that were still there after everything had been tried; 0 is normal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpawned(Event):
    kind: ClassVar[str] = "process_spawned"
    name: str
    pid: int
    log_path: str
    cpus: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExited(Event):
    kind: ClassVar[str] = "process_exited"
    name: str
    pid: int
    returncode: int
    requested: bool
    """The job asked for it; False: it ended by itself."""
    survivors: int
    """Processes of its tree that outlasted SIGKILL (uninterruptible sleep); 0 is normal."""
