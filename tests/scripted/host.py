"""A scripted engine host: `spawn` starts the scripted engine or router of that name, on the host and port in argv.

Invariants, as for the real host
- A name can be spawned again once its process has ended, with fresh memory, a new pid and the port in the new argv.
- `wait` returns the exit of a process, also after it ended, until the name is used again.
- When the host dies, its processes die with it, and every call raises EngineError.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import anyio
import anyio.abc

from asyncrl.errors import EngineError, HostLostError
from asyncrl.host import ProcessExit, ProcessSpec
from asyncrl.host.ports import PortAllocator
from asyncrl.inference.sglang.cpu_platform import PRIVATE
from asyncrl.run_directory.engine_key import read_key
from tests.scripted.engine import ScriptedEngine
from tests.scripted.router import ScriptedRouter
from tests.scripted.server import ScriptedServer


@dataclass(slots=True)
class _Process:
    server: ScriptedServer
    pid: int = 0
    requested: bool = False
    ended: anyio.Event = field(default_factory=anyio.Event)
    exit: ProcessExit | None = None


class ScriptedHost:
    """Enter it before the first spawn. Leaving it ends every process."""

    def __init__(self, engines: Mapping[str, ScriptedEngine], router: ScriptedRouter) -> None:
        self.servers: dict[str, ScriptedServer] = {**engines, "router": router}
        """Process name → the server to start under it. A test may change it between spawns."""
        self.specs: dict[str, ProcessSpec] = {}
        """Process name → spec of the newest process."""
        self.spawned: list[str] = []
        """Names in the order of their spawns."""
        self.dead = False
        """True once the host has died."""
        self._ports = PortAllocator()
        self._processes: dict[str, _Process] = {}
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> ScriptedHost:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> bool | None:
        self.die()
        self._ports.close()
        return await self._tasks.__aexit__(kind, error, tb)

    async def spawn(self, spec: ProcessSpec) -> int:
        """Starts the process; returns its pid. Raises EngineError if a process of this name is alive."""
        self._check_alive()
        known = self._processes.get(spec.name)
        if known is not None and not known.ended.is_set():
            raise EngineError(f"{spec.name}: a process of this name is alive (pid {known.pid}); stop it first")
        self.specs[spec.name] = spec
        self.spawned.append(spec.name)
        process = self._processes[spec.name] = _Process(self.servers[spec.name])
        host, port = (spec.argv[spec.argv.index(flag) + 1] for flag in ("--host", "--port"))
        process.server.key = read_key(Path(spec.env[PRIVATE])) if PRIVATE in spec.env else None
        await self._tasks.start(self._run, spec.name, host, int(port), process)
        process.pid = process.server.pid
        if self.dead:  # the host died meanwhile
            process.server.kill()
        self._check_alive()
        return process.pid

    async def wait(self, name: str) -> ProcessExit:
        """Returns the exit of the newest process of this name, once it has ended."""
        process = self._process(name)
        await process.ended.wait()
        return self._exit_of(process)

    async def stop(self, name: str, grace_s: float) -> ProcessExit:
        """Ends the process as SIGTERM does; it never needs the grace."""
        return await self._end(name, -signal.SIGTERM)

    async def kill(self, name: str) -> ProcessExit:
        """Ends the process as SIGKILL does."""
        return await self._end(name, -signal.SIGKILL)

    async def signal(self, name: str, signum: int) -> None:
        """Suspends the process at SIGSTOP, resumes it at SIGCONT, and ends it at any other signal."""
        server = self._process(name).server
        self._check_alive()
        match signum:
            case signal.SIGSTOP:
                server.suspend()
            case signal.SIGCONT:
                server.go_on()
            case _:
                server.kill(-signum)

    async def tail(self, name: str, lines: int) -> str:
        """Returns the end of the process's log."""
        self._check_alive()
        return self._process(name).server.last_words

    async def reserve_ports(self, offsets: Sequence[int] = (0,)) -> int:
        return self._ports.reserve(offsets)

    async def reserve_given_port(self, port: int, field: str) -> None:
        self._ports.reserve_given(port, field)

    async def release_ports(self, ports: Iterable[int]) -> None:
        self._ports.release(ports)

    def die(self) -> None:
        """Ends the host itself, and every process with it."""
        self.dead = True
        for process in self._processes.values():
            process.server.kill()

    async def _run(
        self, name: str, host: str, port: int, process: _Process, *, task_status: anyio.abc.TaskStatus[None]
    ) -> None:
        server = process.server
        returncode = -signal.SIGKILL  # if the spawn is cancelled
        try:
            returncode = await server.run(port, host, task_status=task_status)
        finally:
            process.exit = ProcessExit(name, server.pid, int(returncode), server.last_words, process.requested)
            process.ended.set()

    async def _end(self, name: str, returncode: int) -> ProcessExit:
        process = self._process(name)
        self._check_alive()
        process.requested = process.requested or not process.ended.is_set()
        process.server.kill(returncode)
        await process.ended.wait()
        return self._exit_of(process)

    def _exit_of(self, process: _Process) -> ProcessExit:
        if self.dead or process.exit is None:
            raise HostLostError("engine host: it died")
        return process.exit

    def _process(self, name: str) -> _Process:
        if name not in self._processes:
            raise EngineError(f"{name}: no process of this name was ever spawned")
        return self._processes[name]

    def _check_alive(self) -> None:
        if self.dead:
            raise HostLostError("engine host: it died")
