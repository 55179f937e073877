"""The host's decisions, without any I/O or clock: requests, guardians' messages and time go in, actions come out.

Life of a process: STARTING → RUNNING → STOPPING → ENDING → ended; it may skip any of these.

Invariants
- A name has at most one live process. The name is free again as soon as the exit is told.
- Every well-formed request is answered exactly once. The exit of a process is told before any answer that waits for it.
- The exit of a process is told (`exited`) exactly once if its spawn was answered without an error, and never otherwise.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from asyncrl.host.process import ProcessSpec

SHUTDOWN_S = 4.0
"""How long guardians may take to kill their trees at the end. Then the host kills all that is left itself."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Fork a guardian. Its messages come back under `serial`."""

    serial: int
    spec: ProcessSpec


@dataclass(frozen=True, slots=True)
class Terminate:
    """Have the guardian send SIGTERM to its process's group."""

    serial: int


@dataclass(frozen=True, slots=True)
class Sever:
    """Close the channel to the guardian, which then kills its tree."""

    serial: int


@dataclass(frozen=True, slots=True)
class KillOrphans:
    """A guardian died: kill the processes that it guarded, whose parent is the host now."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer request `id`."""

    id: Any
    error: str | None = None
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TellExit:
    """Tell that a process ended, with the end of its log from byte `log_start` on."""

    name: str
    pid: int
    returncode: int
    requested: bool
    survivors: int
    log_path: str
    log_start: int


@dataclass(frozen=True, slots=True)
class AnswerTail:
    """Answer request `id` with the last lines of a log from byte `log_start` on."""

    id: Any
    log_path: str
    log_start: int
    lines: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Exit: everything has ended, or its time is up."""


Action = Launch | Terminate | Sever | KillOrphans | Answer | TellExit | AnswerTail | Leave


class Phase(Enum):
    """Where a live process is in its life."""

    STARTING = "starting"
    """It has a guardian, and no pid yet."""
    RUNNING = "running"
    STOPPING = "stopping"
    """It was sent SIGTERM, and has a deadline."""
    ENDING = "ending"
    """Its guardian was told to kill it at once."""


@dataclass(slots=True)
class _Process:
    serial: int
    spec: ProcessSpec
    spawn_id: Any
    phase: Phase = Phase.STARTING
    pid: int = 0
    log_start: int = 0
    deadline: float = 0.0
    waiting_ids: list[Any] = field(default_factory=list)


class BadRequest(Exception):
    """A request that is malformed or cannot be carried out. Its text is the answer."""


class HostState:
    """All live processes and the logs of those that ended."""

    def __init__(self) -> None:
        self._live: dict[str, _Process] = {}
        self._names: dict[int, str] = {}
        self._logs: dict[str, tuple[str, int]] = {}
        self._serial = 0
        self._leaving_by: float | None = None
        self._operations: dict[str, Callable[[Any, dict[str, Any], float], list[Action]]] = {
            "spawn": self._spawn,
            "stop": self._stop,
            "kill": self._kill,
            "tail": self._tail,
            "shutdown": self._shutdown,
        }

    # events from rank 0

    def on_request(self, message: dict[str, Any] | None, now: float) -> list[Action]:
        """A request of rank 0; None: a line that was no JSON object."""
        if message is None:
            return [Answer(None, "not a JSON object on one line")]
        request_id = message.get("id")
        operation = message.get("op")
        handler = self._operations.get(operation) if isinstance(operation, str) else None
        if handler is None:
            return [Answer(request_id, f"unknown operation {operation!r} (known: {', '.join(self._operations)})")]
        try:
            return handler(request_id, message, now)
        except BadRequest as error:
            return [Answer(request_id, str(error))]

    def on_lifeline_closed(self, now: float) -> list[Action]:
        """Rank 0 has ended, or wants the host to end. May come again."""
        if self._leaving_by is not None:
            return []
        self._leaving_by = now + SHUTDOWN_S
        ending = [self._end(process) for process in self._live.values() if process.phase is not Phase.ENDING]
        return [*ending, *self._maybe_leave()]

    def _spawn(self, request_id: Any, message: dict[str, Any], now: float) -> list[Action]:
        spec = _spec(message)
        if self._leaving_by is not None:
            raise BadRequest(f"{spec.name}: the host is shutting down")
        if spec.name in self._live:
            raise BadRequest(f"{spec.name}: a process of this name is alive (pid {self._live[spec.name].pid})")
        self._serial += 1
        self._live[spec.name] = _Process(self._serial, spec, request_id)
        self._names[self._serial] = spec.name
        return [Launch(self._serial, spec)]

    def _stop(self, request_id: Any, message: dict[str, Any], now: float) -> list[Action]:
        grace_s = _field(message, "grace_s", (int, float))
        process = self._live.get(_field(message, "name", str))
        if process is None:
            return [Answer(request_id)]
        process.waiting_ids.append(request_id)
        deadline = now + grace_s
        if process.phase is Phase.ENDING:
            return []
        if process.phase is Phase.STOPPING:
            process.deadline = min(process.deadline, deadline)
            return []
        if process.phase is Phase.STARTING:  # its program does not run yet, so there is nothing to be graceful to
            return [self._end(process)]
        process.phase, process.deadline = Phase.STOPPING, deadline
        return [Terminate(process.serial)]

    def _kill(self, request_id: Any, message: dict[str, Any], now: float) -> list[Action]:
        process = self._live.get(_field(message, "name", str))
        if process is None:
            return [Answer(request_id)]
        process.waiting_ids.append(request_id)
        return [] if process.phase is Phase.ENDING else [self._end(process)]

    def _tail(self, request_id: Any, message: dict[str, Any], now: float) -> list[Action]:
        name = _field(message, "name", str)
        lines = _field(message, "lines", int)
        if name not in self._logs:
            raise BadRequest(f"{name}: never spawned")
        return [AnswerTail(request_id, *self._logs[name], lines)]

    def _shutdown(self, request_id: Any, message: dict[str, Any], now: float) -> list[Action]:
        return [Answer(request_id), *self.on_lifeline_closed(now)]

    # events from guardians

    def on_guardian(self, serial: int, message: dict[str, Any]) -> list[Action]:
        """A guardian told that its process started, could not be started, or has ended."""
        process = self._live.get(self._names.get(serial, ""))
        if process is None:
            return []
        if "started" in message:
            process.pid, process.log_start = message["started"], message["log_start"]
            self._logs[process.spec.name] = (process.spec.log_path, process.log_start)
            if process.phase is Phase.STARTING:
                process.phase = Phase.RUNNING
            return [Answer(process.spawn_id, result={"pid": process.pid})]
        if "failed" in message:
            return self._forget(process, [Answer(process.spawn_id, message["failed"])])
        return self._ended(process, message["exited"], message["survivors"])

    def on_guardian_gone(self, serial: int) -> list[Action]:
        """A guardian's channel ended. A guardian that did not tell the end of its process before was killed."""
        process = self._live.get(self._names.get(serial, ""))
        if process is None:
            return []
        if process.pid == 0:
            answer = Answer(process.spawn_id, f"{process.spec.name}: its guardian was killed before it started")
            return [KillOrphans(), *self._forget(process, [answer])]
        return [KillOrphans(), *self._ended(process, -signal.SIGKILL, 0)]

    def _ended(self, process: _Process, returncode: int, survivors: int) -> list[Action]:
        requested = process.phase in (Phase.STOPPING, Phase.ENDING)
        told = TellExit(
            process.spec.name, process.pid, returncode, requested, survivors, process.spec.log_path, process.log_start
        )
        return self._forget(process, [told])

    def _forget(self, process: _Process, first: list[Action]) -> list[Action]:
        del self._live[process.spec.name]
        del self._names[process.serial]
        return [*first, *(Answer(request_id) for request_id in process.waiting_ids), *self._maybe_leave()]

    # time

    def next_deadline(self) -> float | None:
        """When `on_time` is to be called at the latest; None: never."""
        deadlines = [process.deadline for process in self._live.values() if process.phase is Phase.STOPPING]
        if self._leaving_by is not None:
            deadlines.append(self._leaving_by)
        return min(deadlines, default=None)

    def on_time(self, now: float) -> list[Action]:
        """Ends processes, and the host itself, whose time is up."""
        if self._leaving_by is not None and now >= self._leaving_by:
            return [Leave()]
        late = [p for p in self._live.values() if p.phase is Phase.STOPPING and now >= p.deadline]
        return [self._end(process) for process in late]

    def _end(self, process: _Process) -> Action:
        process.phase = Phase.ENDING
        return Sever(process.serial)

    def _maybe_leave(self) -> list[Action]:
        return [Leave()] if self._leaving_by is not None and not self._live else []


def _field(message: dict[str, Any], key: str, kinds: type | tuple[type, ...]) -> Any:
    value = message.get(key)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise BadRequest(f"{message.get('op')}: field {key!r} is {value!r}")
    return value


def _spec(message: dict[str, Any]) -> ProcessSpec:
    argv, env, cpus = (message.get(key) for key in ("argv", "env", "cpus"))
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise BadRequest(f"spawn: argv is {argv!r}")
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise BadRequest("spawn: env must map names to strings")  # its values may be secrets: not shown
    if cpus is not None and not (isinstance(cpus, list) and all(isinstance(cpu, int) for cpu in cpus)):
        raise BadRequest(f"spawn: cpus is {cpus!r}")
    scratch = message.get("scratch")
    if scratch is not None and not isinstance(scratch, str):
        raise BadRequest(f"spawn: scratch is {scratch!r}")
    return ProcessSpec(
        name=_field(message, "name", str),
        argv=tuple(argv),
        env=env,
        log_path=_field(message, "log_path", str),
        log_bytes=_field(message, "log_bytes", int),
        cpus=None if cpus is None else tuple(cpus),
        scratch=scratch,
    )
