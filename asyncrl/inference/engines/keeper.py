"""Whoever keeps one engine in service: what a group asks of it, and what the two kinds have in common.

Invariants
- An engine that is asked to retire or to stop takes part in nothing new from that moment on (`engine.leaving`), and
  whatever becomes of it then is no failure: `run` raises nothing.
- `ended` says that a keeper does nothing with its engine any more. Only then may another one take over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import structlog

from asyncrl.config.sections.inference import HealthConfig
from asyncrl.data.fleet import EngineState
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.restarts import RestartPolicy
from asyncrl.inference.gpus.shared_gpus import SharedGpus
from asyncrl.inference.routing.routing import Routing
from asyncrl.inference.updates.deadlines import Deadlines
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting

CatchUpEngine = Callable[[ManagedEngine], Coroutine[Any, Any, None]]
"""Brings an engine that generates to the weights of its group, for as long as it lives; cancelled when it ends."""

RETURN_TIMEOUT_S = 5.0
"""For `run` to return once there is nothing left to keep: milliseconds, unless the loop is starved."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """What all keepers of a group share."""

    routing: Routing
    policy: RestartPolicy
    health: HealthConfig
    start_timeout_s: float
    deadlines: Deadlines
    events: EventLog
    on_ready: Callable[[], None]
    """Hears each time that an engine generated after its start."""
    catch_up: CatchUpEngine
    """Brings it to serve from there."""
    gpus: SharedGpus
    """Where engines of it share some with the trainer: in its turn none is started."""


class Keeper(ABC):
    """Keeps one engine running: a process of the job's own, or somebody else's."""

    def __init__(self, engine: ManagedEngine, settings: KeeperSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.has_generated = False
        """Whether the engine ever generated since this keeper has it."""
        self.health_paused = False
        self.restarts = 0
        """How often it was started, or joined, anew."""
        self._unwanted = anyio.Event()
        self._busy = 0
        self._started = False
        self._returned = anyio.Event()

    @property
    def wanted(self) -> bool:
        """Whether the engine is to run."""
        return not self._unwanted.is_set()

    @property
    def ended(self) -> bool:
        """Whether it does nothing with the engine any more."""
        return self._busy == 0 and (self._started or not self.wanted)

    async def run(self) -> None:
        """Returns when the engine is not wanted any more; raises EngineError when it is given up."""
        self._started = True
        with self._at_work():
            try:
                if self.wanted:
                    await self._keep()
            finally:
                self._returned.set()

    async def retire(self) -> None:
        """No new request reaches the engine; one that serves is DRAINING from now on, and its end is no failure."""
        self._leave()
        if self.engine.state is EngineState.SERVING:
            self.engine.move(EngineState.DRAINING)
        await self.settings.routing.remove(self.engine)

    async def stop(self) -> None:
        """Ends the engine's part in the job; it is STOPPED afterwards. May be called at any time, and again."""
        self._leave()
        with self._at_work():
            await self._end()
            # Whoever was about to add it did not know yet that it leaves.
            await self.settings.routing.remove(self.engine)
            if self.engine.state is not EngineState.STOPPED:
                self.engine.move(EngineState.STOPPED)

    @abstractmethod
    async def quarantine(self, reason: str) -> None:
        """Takes an engine that cannot be trusted out of service."""

    @abstractmethod
    async def _keep(self) -> None:
        """See `run`."""

    @abstractmethod
    async def _end(self) -> None:
        """Ends whatever `_keep` does with the engine, in bounded time."""

    async def _wait_returned(self) -> None:
        if not self._started:
            return
        try:
            with waiting("end of its keeper", self.engine.engine_id, RETURN_TIMEOUT_S):
                await self._returned.wait()
        except TimeoutError as error:
            _log.warning("an engine's keeper did not end in time", engine=self.engine.engine_id, reason=str(error))

    def _subject(self) -> Hashable:
        """What health probes are made of; None while there is nothing to probe."""
        serves = self.engine.state in (EngineState.SERVING, EngineState.DRAINING)
        return (self.engine.endpoint.generation, self.engine.moves) if serves and not self.health_paused else None

    def _leave(self) -> None:
        self._unwanted.set()
        self.engine.leaving = True

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
