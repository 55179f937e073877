"""The engine host: a small torch-free process that spawns and owns everything the job starts on a node.

Tree: rank 0 ─ host ─ one guardian per process ─ the process (engine, router, reward worker) ─ its children.

Invariants (each has a test in tests/host that tries to break it)
- Whatever ends rank 0, the host or both, SIGKILL included, ends every descendant of the host within seconds.
- A spawned process that ends, is stopped or is killed takes its whole tree with it, whatever its descendants did
  to hide (new sessions, double forks, ignored signals): its guardian is their subreaper.
- The host and its guardians hold no file descriptor that anything spawned could inherit.

The modules that run inside the host (`process`, `proc`, `guardian`, `state`, `server`) import the standard library
only, so that it starts in 0.1 s; `client` is rank 0's side. Hence the lazy export of `EngineHost`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncrl.host.process import ProcessExit, ProcessSpec

if TYPE_CHECKING:
    from asyncrl.host.client import EngineHost

__all__ = ["EngineHost", "ProcessExit", "ProcessSpec"]


def __getattr__(name: str) -> Any:
    if name == "EngineHost":
        from asyncrl.host.client import EngineHost

        return EngineHost
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
