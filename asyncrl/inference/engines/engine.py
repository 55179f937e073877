"""One engine as the controller keeps it: its address, its life, its state.

Invariants
- `state` changes only through `move`, which checks the life cycle and writes the event.
- Nothing that was known of one process is believed of the next: `renew` forgets all of it.
- Readiness is a real generation, answered by the engine itself: an engine can answer /health and generate nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import aiohttp
import anyio

from asyncrl.data.fleet import ACTOR, EngineEndpoint, EngineState, EngineStatus
from asyncrl.errors import EngineError
from asyncrl.inference.engines.lifecycle import UPDATABLE, transition
from asyncrl.inference.fleet_events import EngineStateChanged
from asyncrl.inference.sglang.engine_api import EngineApi, EngineRequestError
from asyncrl.inference.updates.copies_in_use import Published
from asyncrl.inference.updates.verify import Checksums
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting

POLL_S = 0.1
PROBE_TIMEOUT_S = 30.0
"""For one try of the first generation, compilation and warm-up included; then it is tried anew."""


class ManagedEngine:
    """An engine of the fleet. Only the controller and its weight updates hold one."""

    def __init__(
        self,
        endpoint: EngineEndpoint,
        *,
        session: aiohttp.ClientSession,
        events: EventLog,
        model: str = ACTOR,
        frozen: bool = False,
    ) -> None:
        """`model` is the name of what it serves; `frozen`: its weights never change."""
        self.model = model
        self.frozen = frozen
        self.endpoint = endpoint
        self.state = EngineState.STARTING
        self.moves = 0
        """Changes of state so far: two equal values mean that nothing happened in between."""
        self.version: str | None = None
        """Published version that it holds."""
        self.routed = False
        """Whether the router knows it, or is to."""
        self.leaving = False
        """Whether it is about to be stopped: it takes part in nothing new."""
        self.has_process = False
        """Whether a process of the job's own may live under this id, and so hold memory."""
        self.offloaded: frozenset[str] = frozenset()
        """Memory tags that are released; the engine is paused while there is one."""
        self.baseline: Checksums | None = None
        """Checksums of the random numbers that stand where the first publication must arrive."""
        self.proved = False
        """Whether this process took a publication before it released its weights, and nothing was torn since: it knows
        their names."""
        self.reads_copies = True
        """Whether it can load a copy of the published weights from where the job keeps it."""
        self.refused: Published | None = None
        """What it could not load, in whatever life: it is not asked for that again."""
        self.failure: EngineError | None = None
        """Why it is DEAD or QUARANTINED."""
        self.on_change: Callable[[], None] | None = None
        """Hears of every change of state, and when the router has come to know the engine."""
        self.client = EngineApi(endpoint.engine_id, endpoint.url, session)
        self._events = events

    @property
    def engine_id(self) -> str:
        return self.endpoint.engine_id

    @property
    def takes_weights(self) -> bool:
        """Whether a weight update may begin with it."""
        return self.state in UPDATABLE and not self.leaving

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(self.endpoint, self.state, self.version, self.model)

    def lose_weights(self) -> None:
        """Its weights may be torn: the next that it takes are proved, whatever it took before."""
        self.version, self.proved = None, False

    def renew(self) -> None:
        """A new process is about to bear this id: a new generation, which holds no weights of the run."""
        self.endpoint = replace(self.endpoint, generation=self.endpoint.generation + 1)
        self.version, self.baseline, self.failure = None, None, None
        self.routed = self.leaving = self.proved = False
        self.offloaded = frozenset()
        self.move(EngineState.STARTING)

    def move(self, to: EngineState, reason: str | None = None) -> None:
        """Changes the state; raises IllegalTransition where life does not lead there."""
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
        """Tells whoever waits for the engine to look again."""
        if self.on_change is not None:
            self.on_change()

    async def wait_first_generation(self, timeout_s: float) -> None:
        """Returns when the engine has generated a token; raises EngineError after `timeout_s`."""
        last = "nothing listens on its port"
        try:
            with waiting("first generation", self.engine_id, timeout_s):
                while True:
                    try:
                        generation = await self.client.generate([0], timeout_s=PROBE_TIMEOUT_S)
                    except EngineRequestError as error:
                        last = str(error)
                    else:
                        if generation.output_ids:
                            return
                        last = "it answered without a token"
                    await anyio.sleep(POLL_S)
        except TimeoutError as error:
            raise EngineError(f"{self.engine_id}: {error}; last: {last}") from error
