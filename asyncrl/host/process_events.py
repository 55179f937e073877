"""Events about the processes of the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.observability.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStarted(Event):
    """The host of a node was started."""

    kind: ClassVar[str] = "host_started"
    pid: int
    job: str
    """Value of ASYNCRL_JOB in the environment of everything below the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEnded(Event):
    """The host of a node ended, and everything that it had started."""

    kind: ClassVar[str] = "host_ended"
    pid: int
    expected: bool
    survivors: int
    """Processes of the job that nothing could end; 0 is normal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpawned(Event):
    """The host started a process."""

    kind: ClassVar[str] = "process_spawned"
    name: str
    pid: int
    log_path: str
    cpus: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExited(Event):
    """A process that the host had started ended, and its whole tree."""

    kind: ClassVar[str] = "process_exited"
    name: str
    pid: int
    returncode: int
    requested: bool
    """Whether the job asked for it. False: it ended by itself."""
    survivors: int
    """Processes of its tree that SIGKILL did not end (uninterruptible sleep); 0 is normal."""
