"""Rank 0's side of the host of its own node: spawn, watch, stop, ports, and the lifeline.

Invariants
- One writer sends requests whole and in order, so that cancelling a caller never tears a message. The answer to an
  abandoned request is dropped. An abandoned `spawn` is followed by a kill, so that no process is left without an owner.
- The exit of every process is remembered until its name is used again: any number of tasks may wait for it, also
  afterwards.
- When the host dies or does not answer in time, a call raises EngineError. Processes that a dead host left are ended
  (`proc.end_marked`), even if their guardians are dead too.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from asyncrl.errors import EngineError, HostLostError
from asyncrl.host.environment import host_environment
from asyncrl.host.ports import PortAllocator
from asyncrl.host.proc import HOSTS, JOB_MARK, end_marked
from asyncrl.host.process import MAX_LINE_BYTES, LineBuffer, ProcessExit, ProcessSpec, encode
from asyncrl.host.process_events import HostEnded, HostStarted, ProcessExited, ProcessSpawned
from asyncrl.host.server import log_tail
from asyncrl.host.unanswered import NO_STOP_SIGNALS, StopSignals
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS, waiting

ANSWER_TIMEOUT_S = 30.0
"""The host answers in milliseconds. It takes much longer only on a machine that swaps or is stopped."""

KILL_TIMEOUT_S = 20.0
"""From SIGKILL to the report that a whole tree has ended. (The guardian gives up after 10 s.)"""

SHUTDOWN_TIMEOUT_S = 8.0
"""For the host to end everything and itself. Then it is killed, and its guardians end the rest."""

PATIENCE_S = 2.0
"""How long guardians may take after the death of the host. Then every process with the job's mark is killed."""

LAST_KILL_TIMEOUT_S = 3.0
"""How long those may take to vanish."""

_BOOT = "import sys; sys.path.insert(0, {root!r}); from asyncrl.host.server import main; main()"
"""Runs the server without site-packages, so that it starts in a tenth of a second whatever is installed."""


class _NoAnswerError(EngineError):
    """The host lives, but does not answer."""


@dataclass(slots=True)
class _Request:
    spawning: _Process | None = None
    """The process that the request starts. The answer reaches it also when the caller has abandoned the request."""
    answered: anyio.Event = field(default_factory=anyio.Event)
    answer: dict[str, Any] | None = None
    """None after `answered`: the host has ended."""


@dataclass(slots=True)
class _Process:
    spec: ProcessSpec
    pid: int = 0
    ended: anyio.Event = field(default_factory=anyio.Event)
    exit: ProcessExit | None = None
    failure: str | None = None
    """Why it never started. Neither exit nor failure after `ended`: the host has ended, and the process with it."""


class EngineHost:
    """The running host of this node. Create it with `async with EngineHost.start(log_dir) as host`."""

    def __init__(self, popen: subprocess.Popen[bytes], lifeline: socket.socket, job: str, log: Path, events: EventLog):
        self.pid = popen.pid
        self.job = job
        self._popen = popen
        self._lifeline = lifeline
        self._log = log
        self._events = events
        self._ports = PortAllocator()
        self._lines = LineBuffer()
        self._outbox = bytearray()
        self._to_send = anyio.Event()
        self._requests: dict[int, _Request] = {}
        self._last_id = 0
        self._processes: dict[str, _Process] = {}
        self._gone = False
        self._closing = False
        self._closed = anyio.Event()

    @classmethod
    @asynccontextmanager
    async def start(
        cls, log_dir: Path | str, events: EventLog | None = None, stop_signals: StopSignals = NO_STOP_SIGNALS
    ) -> AsyncIterator[EngineHost]:
        """Starts the host and returns at once: it takes requests while it boots. Its log is `host.log` in `log_dir`.

        It ends this process when one of the `stop_signals` stands for too long.
        Leaving the block ends everything that the host started. Raises EngineError when the host cannot be started.
        """
        host = await anyio.to_thread.run_sync(cls._launch, Path(log_dir), events or EventLog(None), stop_signals)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(host._receive)
                tasks.start_soon(host._send)
                try:
                    yield host
                finally:
                    await host.aclose()
                    tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            # The two tasks raise nothing: this is the body's own error, wrapped by the task group.
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from group.exceptions[0].__cause__
            raise
        finally:
            host._lifeline.close()
            host._ports.close()

    @classmethod
    def _launch(cls, log_dir: Path, events: EventLog, stop_signals: StopSignals) -> EngineHost:
        log = log_dir / "host.log"
        ours, theirs = socket.socketpair()
        job = secrets.token_hex(8)
        boot = _BOOT.format(root=str(Path(__file__).resolve().parents[2]))
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            with theirs, log.open("ab") as output:
                popen = subprocess.Popen(
                    [
                        sys.executable,
                        "-I",
                        "-S",
                        "-c",
                        boot,
                        str(theirs.fileno()),
                        str(os.getpid()),
                        *stop_signals.arguments(),
                    ],
                    env=host_environment() | {JOB_MARK: job, "SPT_NOENV": "1"},  # see `proc.marked`
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(), *stop_signals.sockets),
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise EngineError(f"engine host: cannot start it (log {log}): {error}") from error
        HOSTS.add(popen.pid)
        ours.setblocking(False)
        events.emit(HostStarted(pid=popen.pid, job=job))
        return cls(popen, ours, job, log, events)

    async def spawn(self, spec: ProcessSpec) -> int:
        """Starts a process and returns its pid. An EngineError names the process when it cannot be started."""
        known = self._processes.get(spec.name)
        if known is not None and not known.ended.is_set():
            raise EngineError(f"{spec.name}: a process of this name is alive (pid {known.pid}); stop it first")
        self._check_alive()
        message = {"op": "spawn", **asdict(spec)}
        if (size := len(encode(message))) > MAX_LINE_BYTES // 2:
            raise EngineError(
                f"{spec.name}: command line and environment take {size >> 10} KiB; Linux allows 2048 in all"
            )
        process = self._processes[spec.name] = _Process(spec)
        try:
            await self._ask(message, "spawn", spec.name, ANSWER_TIMEOUT_S, process)
        except BaseException as error:
            if isinstance(error, _NoAnswerError) or not isinstance(error, EngineError):
                # cancelled or given up: a process that starts later would have no owner
                self._post({"op": "kill", "name": spec.name})
            raise
        self._events.emit(ProcessSpawned(name=spec.name, pid=process.pid, log_path=spec.log_path, cpus=spec.cpus))
        return process.pid

    async def wait(self, name: str, timeout_s: float = math.inf) -> ProcessExit:
        """Waits for the end of a process and its tree. Raises HostLostError when the host dies."""
        process = self._process(name)
        with waiting("exit", name, timeout_s):
            await process.ended.wait()
        return self._exit_of(process)

    async def stop(self, name: str, grace_s: float) -> ProcessExit:
        """SIGTERM to the process's group, and after `grace_s` SIGKILL to its whole tree; returns its exit."""
        return await self._end({"op": "stop", "name": name, "grace_s": grace_s}, grace_s + KILL_TIMEOUT_S)

    async def kill(self, name: str) -> ProcessExit:
        """SIGKILL to the whole tree at once; returns when it has ended."""
        return await self._end({"op": "kill", "name": name}, KILL_TIMEOUT_S)

    async def tail(self, name: str, lines: int) -> str:
        """The last lines that the newest process called `name` wrote to its log, at most 64 KiB."""
        self._process(name)
        answer = await self._ask({"op": "tail", "name": name, "lines": lines}, "log tail", name, ANSWER_TIMEOUT_S)
        return str(answer["tail"])

    async def reserve_ports(self, offsets: Sequence[int] = (0,)) -> int:
        """Reserves free ports at `offsets` from the returned base. Raises EngineError where none are left."""
        return self._ports.reserve(offsets)

    async def reserve_given_port(self, port: int, field: str) -> None:
        """Reserves the port that the setting `field` asks for; raises ConfigError where somebody else has it."""
        self._ports.reserve_given(port, field)

    async def release_ports(self, ports: Iterable[int]) -> None:
        """Gives reserved ports back."""
        self._ports.release(ports)

    async def aclose(self) -> None:
        """Ends every process of the host, then the host, in bounded time. May be called again, also when cancelled."""
        with anyio.CancelScope(shield=True):
            if self._closing:
                await self._closed.wait()
                return
            self._closing = True
            self._post({"op": "shutdown"})
            bound_s = SHUTDOWN_TIMEOUT_S + PATIENCE_S + LAST_KILL_TIMEOUT_S
            with WAITS.register("end", "engine host", bound_s):
                survivors = await anyio.to_thread.run_sync(self._end_host)
            self._drain()  # the reader may have been cancelled
            self._on_host_gone()
            self._events.emit(HostEnded(pid=self.pid, expected=self._popen.returncode == 0, survivors=survivors))
            self._closed.set()

    def _end_host(self) -> int:
        """Blocks until the host and its processes have ended; returns how many survived (0 is normal)."""
        try:
            self._popen.wait(SHUTDOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()  # its guardians see that, and end what they guard
            self._popen.wait()
        HOSTS.discard(self.pid)
        return end_marked(self.job, PATIENCE_S, LAST_KILL_TIMEOUT_S)

    async def _end(self, message: dict[str, Any], timeout_s: float) -> ProcessExit:
        process = self._process(message["name"])
        if not process.ended.is_set():
            await self._ask(message, message["op"], message["name"], timeout_s)
        return self._exit_of(process)

    def _process(self, name: str) -> _Process:
        if name not in self._processes:
            raise EngineError(f"{name}: no process of this name was ever spawned")
        return self._processes[name]

    def _exit_of(self, process: _Process) -> ProcessExit:
        if process.exit is None:
            raise self._death() if process.failure is None else EngineError(process.failure)
        return process.exit

    def _check_alive(self) -> None:
        if self._gone or self._closing:
            raise self._death()

    def _death(self) -> HostLostError:
        if self._closing:
            return HostLostError("engine host: it is closed, and everything it had spawned has ended")
        last_words = log_tail(str(self._log), 0, 10)
        return HostLostError(
            f"engine host (pid {self.pid}): it died, and every process that it had spawned was killed with it; "
            f"see {self._log}" + (f", which ends with\n{last_words}" if last_words else "")
        )

    # the wire

    async def _ask(
        self, message: dict[str, Any], what: str, subject: str, timeout_s: float, spawning: _Process | None = None
    ) -> dict[str, Any]:
        self._check_alive()
        request = _Request(spawning)
        request_id = self._post(message)
        self._requests[request_id] = request
        try:
            with waiting(what, subject, timeout_s):
                await request.answered.wait()
        except TimeoutError as error:
            self._drain()  # the answer may have come while this loop was blocked
            if not request.answered.is_set():
                raise _NoAnswerError(
                    f"engine host: {error}; it is stopped, or the machine is out of memory or CPU (log {self._log})"
                ) from error
        if request.answer is None:
            raise self._death()
        if request.answer["error"] is not None:
            raise EngineError(request.answer["error"])
        return request.answer

    def _post(self, message: dict[str, Any]) -> int:
        self._last_id += 1
        self._outbox += encode({"id": self._last_id, **message})
        self._flush()
        return self._last_id

    def _flush(self) -> None:
        try:
            sent = self._lifeline.send(self._outbox) if self._outbox else 0
        except BlockingIOError:
            sent = 0
        except OSError:  # the host has ended; the reader tells all waiting tasks
            sent = len(self._outbox)
        del self._outbox[:sent]
        if self._outbox:
            self._to_send.set()

    async def _send(self) -> None:
        """Sends the rest of what the socket did not take at once, since the host was slow to read."""
        while True:
            await self._to_send.wait()
            self._to_send = anyio.Event()
            await anyio.wait_writable(self._lifeline)
            self._flush()

    async def _receive(self) -> None:
        while not self._gone:
            await anyio.wait_readable(self._lifeline)
            self._drain()
        if not self._closing:
            await anyio.to_thread.run_sync(self._end_host)

    def _drain(self) -> None:
        """Takes in everything that has arrived."""
        while not self._gone:
            try:
                data = self._lifeline.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._on_host_gone()
                return
            for message in self._lines.feed(data):
                if message is not None:
                    self._on_message(message)

    def _on_message(self, message: dict[str, Any]) -> None:
        if "exited" in message:
            self._on_exit(message)
            return
        request = self._requests.pop(message["id"], None)
        if request is None:
            return
        if request.spawning is not None:
            if message["error"] is None:
                request.spawning.pid = message["pid"]
            else:
                request.spawning.failure = message["error"]
                request.spawning.ended.set()
        request.answer = message
        request.answered.set()

    def _on_exit(self, message: dict[str, Any]) -> None:
        process = self._processes[message["exited"]]
        process.exit = ProcessExit(
            name=message["exited"],
            pid=message["pid"],
            returncode=message["returncode"],
            log_tail=message["log_tail"],
            requested=message["requested"],
        )
        process.ended.set()
        self._events.emit(
            ProcessExited(
                name=message["exited"],
                pid=message["pid"],
                returncode=message["returncode"],
                requested=message["requested"],
                survivors=message["survivors"],
            )
        )

    def _on_host_gone(self) -> None:
        self._gone = True
        for request in self._requests.values():
            request.answered.set()
        self._requests.clear()
        for process in self._processes.values():
            process.ended.set()
