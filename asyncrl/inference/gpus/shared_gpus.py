"""Whose turn it is on the GPUs that engines share with the trainer.

Invariants
- It is the trainer's from the first memory that engines are told to give up until they have all of it back.
- In the trainer's turn no process is started on these GPUs and no engine there loads weights by itself: both take
  memory that the trainer counts on. They are made up for as soon as it is the engines' turn again.
- Whoever waits for that is registered and has a bound; nothing that the loop awaits waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import anyio
import structlog

from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.observability.waits import waiting
from asyncrl.tasks import first_of

ENDED = frozenset({EngineState.DEAD, EngineState.QUARANTINED})
COMMANDS = 4
"""Of the trainer in one turn: it trains, is copied for a checkpoint, and moves its memory before and after."""
_log = structlog.get_logger(__name__)


class SharedGpus:
    """The turns of one fleet."""

    def __init__(self, step_timeout_s: float = 0.0) -> None:
        """`step_timeout_s`: longest time that the trainer takes for one command."""
        self._patience_s = COMMANDS * step_timeout_s
        self._away: frozenset[str] = frozenset()
        self._changed = anyio.Event()

    @property
    def trainers_turn(self) -> bool:
        return bool(self._away)

    def give_up(self, tags: Iterable[str]) -> frozenset[str]:
        """Engines are about to release memory of these tags; returns those that they had until now."""
        given = frozenset(tags) - self._away
        self._away |= given
        return given

    def take_back(self, tags: Iterable[str]) -> None:
        """Engines have memory of these tags again, those that live."""
        self._away -= frozenset(tags)
        if not self._away:
            self._changed.set()
            self._changed = anyio.Event()

    def keeps_out(self, engine: ManagedEngine) -> bool:
        """Whether `engine` is to be started again, and cannot be before the trainer's turn has ended."""
        return self.trainers_turn and engine.endpoint.colocated and engine.state in ENDED

    async def wait_turn(self, engine: ManagedEngine, unwanted: anyio.Event) -> None:
        """Returns when `engine` may be started, or is not wanted any more; raises EngineError where neither comes."""
        if not self.keeps_out(engine):
            return
        _log.warning("is started again once the trainer has left its GPUs", engine=engine.engine_id)
        try:
            with waiting(
                "end of the trainer's turn on its GPUs", f"the loop, for {engine.engine_id}", self._patience_s
            ):
                while self.keeps_out(engine) and not unwanted.is_set():
                    await first_of(self._changed.wait, unwanted.wait)
        except TimeoutError as error:
            raise EngineError(
                f"{engine.engine_id} is not started again: {error}; await onload() after training"
            ) from error
