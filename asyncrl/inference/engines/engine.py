"""One engine as the controller keeps it: its address, its state, and what it holds.

Invariants
- `state` changes only through `move`, which checks the life cycle and writes the event.
- Nothing that was known of one process is believed of the next: `renew` forgets all of it.
- Readiness is a real generation, answered by the engine itself: an engine can answer /health and generate nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Protocol

import aiohttp
import anyio
import structlog

from asyncrl.data.fleet import ACTOR, EngineEndpoint, EngineState, EngineStatus
from asyncrl.errors import EngineError
from asyncrl.inference.engines.lifecycle import ROUTABLE, UPDATABLE, transition
from asyncrl.inference.fleet_events import EngineStateChanged
from asyncrl.inference.sglang.engine_api import Checksums, EngineApi, EngineRequestError
from asyncrl.inference.updates.copies_in_use import Published
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting

_log = structlog.get_logger(__name__)

_NOT_YET = 503
"""HTTP status of an engine that still starts."""
POLL_S = 0.1
PROBE_TIMEOUT_S = 30.0
"""For one try of the first generation, compilation and warm-up included; then it is tried anew."""


class EngineObserver(Protocol):
    """Hears of engines and decides about them: the group that they belong to."""

    def changed(self) -> None:
        """The state of an engine or of the router has changed: tasks that wait for the group look again."""

    async def quarantine(self, engine: ManagedEngine, reason: str) -> None:
        """Takes an engine that cannot be trusted out of service; it is started again."""


class ManagedEngine:
    """An engine of the fleet. Only the parts of the controller hold one."""

    def __init__(
        self,
        endpoint: EngineEndpoint,
        *,
        session: aiohttp.ClientSession,
        events: EventLog,
        model: str = ACTOR,
        frozen: bool = False,
        owner: str | None = None,
        key: str | None = None,
    ) -> None:
        """`model` is the name of the model that it serves; the weights of a `frozen` one never change.

        `owner`: the job's name, for an engine that outlives it. `key`: the job's key, for an engine of its own.
        """
        self.model = model
        self.frozen = frozen
        self.endpoint = endpoint
        self.state = EngineState.STARTING
        self.moves = 0
        """Changes of state so far: two equal values mean that nothing happened in between."""
        self.version: str | None = None
        """Published version that it holds."""
        self.routed = False
        """Whether the router is to know it: the desired state, see `Routing`."""
        self.leaving = False
        """Whether it is about to be stopped: it takes part in nothing new."""
        self.has_process = False
        """Whether a process of the job's own may live under this id, and so hold memory."""
        self.offloaded: frozenset[str] = frozenset()
        """Memory tags that are released; the engine is paused while there is one."""
        self.baseline: Checksums | None = None
        """Checksums of the random numbers that the first publication must replace."""
        self.proved = False
        """Whether this process took a publication before it released its weights, and no update was torn since: the
        tensor names are known to be right."""
        self.reads_copies = True
        """Whether it can load a copy of the published weights from the job's directory for them."""
        self.refused: Published | None = None
        """The copy that it could not load, in this process or an earlier one: it is not asked for that again."""
        self.failure: EngineError | None = None
        """Why it is DEAD or QUARANTINED."""
        self.observer: EngineObserver | None = None
        """The group that it belongs to; None before it joined one."""
        self.client = EngineApi(endpoint.engine_id, endpoint.url, session, owner=owner, key=key)
        self.key = key
        self._events = events

    @property
    def engine_id(self) -> str:
        """The id that all processes of this engine bear."""
        return self.endpoint.engine_id

    @property
    def takes_weights(self) -> bool:
        """Whether a weight update may begin with it."""
        return self.state in UPDATABLE and not self.leaving

    @property
    def serves(self) -> bool:
        """Whether requests that the router takes now will be answered, if only after a pause."""
        return self.routed and self.state in ROUTABLE

    @property
    def status(self) -> EngineStatus:
        """A frozen snapshot for others."""
        return EngineStatus(self.endpoint, self.state, self.version, self.model)

    def lose_weights(self) -> None:
        """Notes that its weights may be torn: the next ones are proved, even if it proved its names before."""
        self.version, self.proved = None, False

    def renew(self) -> None:
        """Prepares for a new process under this id: a new generation, which holds no weights of the run."""
        self.endpoint = replace(self.endpoint, generation=self.endpoint.generation + 1)
        self.version, self.baseline, self.failure = None, None, None
        self.routed = self.leaving = self.proved = False
        self.offloaded = frozenset()
        self.move(EngineState.STARTING)

    def move(self, to: EngineState, reason: str | None = None) -> None:
        """Changes the state; raises IllegalTransition where the life cycle does not allow it."""
        previous, self.state = self.state, transition(self.engine_id, self.state, to, frozen=self.frozen)
        self.moves += 1
        self._events.emit(
            EngineStateChanged(
                engine=self.engine_id,
                model=self.model,
                generation=self.endpoint.generation,
                previous=previous,
                state=to,
                version=self.version,
                reason=reason,
            )
        )
        self.changed()

    def changed(self) -> None:
        """Makes tasks that wait for the engine's group look again."""
        if self.observer is not None:
            self.observer.changed()

    async def quarantine(self, reason: str) -> None:
        """Takes the engine out of service since it cannot be trusted; its group starts it again."""
        assert self.observer is not None, f"{self.engine_id} belongs to no group"
        await self.observer.quarantine(self, reason)

    async def wait_first_generation(self, timeout_s: float) -> None:
        """Returns when the engine has generated a token; raises EngineError after `timeout_s`.

        Tells each new reason for which it refuses to, since the deadline may be many minutes away.
        """
        last = told = "nothing listens on its port"
        try:
            with waiting("first generation", self.engine_id, timeout_s):
                while True:
                    try:
                        generation = await self.client.generate([0], timeout_s=PROBE_TIMEOUT_S)
                    except EngineRequestError as error:
                        last = str(error)
                        if error.status not in (None, _NOT_YET) and last != told:
                            _log.warning(f"{last}; asked again for up to {timeout_s:g} s")
                            told = last
                    else:
                        if generation.output_ids:
                            return
                        last = "it answered without a token"
                    await anyio.sleep(POLL_S)
        except TimeoutError as error:
            raise EngineError(f"{self.engine_id}: {error}; last: {last}") from error


async def on_each(engines: Iterable[ManagedEngine], step: Callable[[ManagedEngine], Awaitable[None]]) -> dict[str, str]:
    """Takes `step` on all engines at once; returns engine id → reason for those that failed."""
    failed: dict[str, str] = {}

    async def one(engine: ManagedEngine) -> None:
        try:
            await step(engine)
        except (EngineError, TimeoutError) as error:
            failed[engine.engine_id] = reason_of(error)

    async with anyio.create_task_group() as task_group:
        for engine in engines:
            task_group.start_soon(one, engine)
    return failed


def reason_of(error: BaseException) -> str:
    """The error's message, or its type where it has none."""
    return str(error) or type(error).__name__
