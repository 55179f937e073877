"""The host of a node, as the rest of the job sees it: it starts, watches and ends processes there, and reserves ports.

A process and its ports belong to one node, so the code that places a process asks `hosts[placement.node]`. The only
host so far is `client.EngineHost`, that of rank 0's own node. It starts processes from a process of its own, but
reserves ports in rank 0's process: the kernel's table of ports is the same, there is no message to wait for, and the
reservation ends with rank 0 as it should. The host of another node will have to be asked over a connection, so every
method here is awaited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.host.process import ProcessExit, ProcessSpec


class Host(Protocol):
    """The processes and the ports of one node.

    Once the host itself has ended, and its processes with it, every method on processes raises HostLostError.
    """

    async def spawn(self, spec: ProcessSpec) -> int:
        """Starts a process and returns its pid; raises EngineError where it cannot be started."""
        ...

    async def wait(self, name: str) -> ProcessExit:
        """Returns when a process and its whole tree have ended; at once where they have ended already."""
        ...

    async def stop(self, name: str, grace_s: float) -> ProcessExit:
        """Ends a process with SIGTERM, and after `grace_s` seconds its whole tree with SIGKILL."""
        ...

    async def kill(self, name: str) -> ProcessExit:
        """Ends a process and its whole tree with SIGKILL; returns when they have ended."""
        ...

    async def tail(self, name: str, lines: int) -> str:
        """The last lines that the newest process called `name` wrote to its log."""
        ...

    async def reserve_ports(self, offsets: Sequence[int] = (0,)) -> int:
        """Reserves free ports at `offsets` from the returned base. Raises EngineError where none are left.

        Only the server that they are meant for gets them, however often it is started, until `release_ports`.
        """
        ...

    async def reserve_given_port(self, port: int, field: str) -> None:
        """Reserves the port that the setting `field` asks for; raises ConfigError where somebody else has it."""
        ...

    async def release_ports(self, ports: Iterable[int]) -> None:
        """Gives reserved ports back."""
        ...


Hosts = Mapping[int, Host]
"""The host of each node on which the job can start processes."""


@dataclass(frozen=True, slots=True)
class HostedProcess:
    """A process on one node: how it is started, and its host. The methods are those of `Host`, for this process."""

    spec: ProcessSpec
    host: Host

    @property
    def name(self) -> str:
        """Its name on its host."""
        return self.spec.name

    async def spawn(self) -> int:
        """Starts it and returns its pid."""
        return await self.host.spawn(self.spec)

    async def wait(self) -> ProcessExit:
        """Returns when it has ended."""
        return await self.host.wait(self.spec.name)

    async def stop(self, grace_s: float) -> ProcessExit:
        """Ends it, by SIGKILL after `grace_s` seconds."""
        return await self.host.stop(self.spec.name, grace_s)

    async def kill(self) -> ProcessExit:
        """Ends it with SIGKILL."""
        return await self.host.kill(self.spec.name)

    async def tail(self, lines: int) -> str:
        """The last lines of its log."""
        return await self.host.tail(self.spec.name, lines)
