"""A keeper keeps one engine in service: the interface for its group, and what both kinds of keepers have in common.

Invariants
- An engine that is asked to retire or to stop takes part in nothing new from that moment on (`engine.leaving`), and
  its end is no failure: `run` raises nothing.
- `ended` says that a keeper does nothing with its engine any more. Only then may a successor take over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import structlog

from asyncrl.config import Config
from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.engines.engine import EngineObserver, ManagedEngine
from asyncrl.inference.engines.health import HealthMonitoring
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperContext:
    """What the keepers of a group, its router's included, share."""

    config: Config
    events: EventLog
    monitoring: HealthMonitoring
    routing: Routing
    engines: Sequence[ManagedEngine]
    """All engines of the group; grows as engines are added."""
    observer: EngineObserver
    """The group: hears when an engine has generated or the router has answered."""
    catch_up: CatchUpEngine
    """Brings an engine from its first generation to service."""
    gpus: SharedGpus
    """GPUs that engines of the group share with the trainer: in the trainer's turn no engine is started on them."""
    deadlines: Deadlines

    @property
    def restart_policy(self) -> RestartPolicy:
        """When a process that ended is started again."""
        return RestartPolicy(self.config.engine.max_restarts, self.config.engine.restart_window_s)


class Keeper(ABC):
    """Keeps one engine running: a process of the job's own, or an external engine."""

    def __init__(self, engine: ManagedEngine, context: KeeperContext) -> None:
        self.engine = engine
        self.context = context
        self.has_generated = False
        """Whether the engine ever generated since this keeper has it."""
        self.absent = False
        """Whether nobody waits for it: it does not answer, and is asked again beside the job."""
        self.restarts = 0
        """How often it was started, or joined, anew."""
        self._unwanted = anyio.Event()
        self._given_up = False
        self._busy = 0
        self._started = False
        self._returned = anyio.Event()

    @property
    def wanted(self) -> bool:
        """Whether the engine is to run: nobody asked for its end, and it was not given up."""
        return not self._unwanted.is_set() and not self._given_up

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
            except EngineError:
                self._given_up = True
                raise
            finally:
                self._returned.set()

    async def retire(self) -> None:
        """Takes the engine out of the router; one that serves is DRAINING from now on, and its end is no failure."""
        self._leave()
        if self.engine.state is EngineState.SERVING:
            self.engine.move(EngineState.DRAINING)
        await self.context.routing.remove(self.engine)

    async def stop(self) -> None:
        """Ends the engine's part in the job; it is STOPPED afterwards. May be called at any time, and again."""
        self._leave()
        with self._at_work():
            await self._end()
            # A task that was about to add it did not know yet that it leaves.
            await self.context.routing.remove(self.engine)
            if self.engine.state is not EngineState.STOPPED:
                self.engine.move(EngineState.STOPPED)

    @abstractmethod
    def successor(self) -> Keeper:
        """A new keeper for the same engine, once this one has ended."""

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
        """Identifies what a health probe would probe; None while there is nothing to probe."""
        serves = self.engine.state in (EngineState.SERVING, EngineState.DRAINING)
        probed = serves and not self.context.monitoring.paused
        return (self.engine.endpoint.generation, self.engine.moves) if probed else None

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
