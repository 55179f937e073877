"""Hosts: on each node a small torch-free process that starts and owns everything that the job runs there.

Tree: rank 0 ─ host ─ one guardian per process ─ the process (engine, router, reward worker) ─ its children.

Invariants (each has a test in tests/host that tries to break it)
- When rank 0, the host or both end in any way, SIGKILL included, every descendant of the host ends within seconds.
- A spawned process that ends, is stopped or is killed takes its whole tree with it. New sessions, double forks and
  ignored signals do not help a descendant: the process's guardian is the subreaper of them all.
- The host and its guardians hold no file descriptor that a spawned process could inherit.

`host` is what the rest of the job sees; `client` implements it for the node of rank 0. The modules that run inside the
host process (`process`, `proc`, `guardian`, `state`, `server`) import the standard library only, so that it starts in
0.1 s. Therefore `EngineHost` is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncrl.host.host import Host, HostedProcess, Hosts
from asyncrl.host.process import ProcessExit, ProcessSpec

if TYPE_CHECKING:
    from asyncrl.host.client import EngineHost

__all__ = ["EngineHost", "Host", "HostedProcess", "Hosts", "ProcessExit", "ProcessSpec"]


def __getattr__(name: str) -> Any:
    if name == "EngineHost":
        from asyncrl.host.client import EngineHost

        return EngineHost
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
