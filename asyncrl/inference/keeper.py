"""What a group asks of whoever keeps one of its engines running."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from asyncrl.inference.engine import ManagedEngine

CatchUpEngine = Callable[[ManagedEngine], Coroutine[Any, Any, None]]
"""Brings an engine that generates to the weights of its group, for as long as it lives; cancelled when it ends."""


class Keeper(Protocol):
    """Keeps one engine running: a process of the job's own, or somebody else's."""

    engine: ManagedEngine
    has_generated: bool
    """Whether the engine ever generated since it was last started."""
    health_paused: bool
    restarts: int

    @property
    def wanted(self) -> bool:
        """Whether the engine is to run."""
        ...

    async def run(self) -> None:
        """Returns when the engine is not wanted any more; raises EngineError when it is given up."""
        ...

    async def retire(self) -> None:
        """No new request reaches the engine; one that serves is DRAINING from now on, and its end is no failure."""
        ...

    async def stop(self) -> None:
        """Ends the engine's part in the job; it is STOPPED afterwards. May be called at any time, and again."""
        ...

    async def quarantine(self, reason: str) -> None:
        """Takes an engine that cannot be trusted out of service."""
        ...
