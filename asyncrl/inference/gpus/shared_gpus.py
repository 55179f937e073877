"""Whose turn it is on the GPUs that engines share with the trainer.

Invariants
- The trainer's turn lasts from the first memory that engines are told to give up until they have all of it back.
- In the trainer's turn no process is started on these GPUs and no engine there loads weights by itself: both take
  memory that the trainer counts on. Both are done as soon as the engines' turn begins.
- A task that waits for the engines' turn is registered and has a bound; nothing that the loop awaits waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import anyio
import structlog

from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.observability.waits import waiting
from asyncrl.tasks import Changes, first_of

ENDED = frozenset({EngineState.DEAD, EngineState.QUARANTINED})
COMMANDS = 4
"""Commands to the trainer in one turn: it trains, is copied for a checkpoint, and moves its memory before and after."""
_log = structlog.get_logger(__name__)


class SharedGpus:
    """The turns of one fleet."""

    def __init__(self, step_timeout_s: float = 0.0) -> None:
        """`step_timeout_s`: longest time that the trainer takes for one command."""
        self._patience_s = COMMANDS * step_timeout_s
        self._away: frozenset[str] = frozenset()
        self._changes = Changes()

    @property
    def trainers_turn(self) -> bool:
        """Whether some memory of engines is away."""
        return bool(self._away)

    def give_up(self, tags: Iterable[str]) -> frozenset[str]:
        """Begins the trainer's turn: engines are about to release memory of `tags`. Returns those not yet released."""
        given = frozenset(tags) - self._away
        self._away |= given
        return given

    def take_back(self, tags: Iterable[str]) -> None:
        """Notes that engines that live have memory of `tags` again; with the last tag the trainer's turn ends."""
        self._away -= frozenset(tags)
        if not self._away:
            self._changes.notify()

    def keeps_out(self, engine: ManagedEngine) -> bool:
        """Whether `engine` is to be started again, and cannot be before the trainer's turn has ended."""
        return self.trainers_turn and engine.endpoint.colocated and engine.state in ENDED

    async def wait_turn(self, engine: ManagedEngine, unwanted: anyio.Event) -> None:
        """Returns when `engine` may be started, or `unwanted` is set; raises EngineError if neither happens in time."""
        if not self.keeps_out(engine):
            return
        _log.warning("is started again once the trainer has left its GPUs", engine=engine.engine_id)
        try:
            with waiting(
                "end of the trainer's turn on its GPUs", f"the loop, for {engine.engine_id}", self._patience_s
            ):
                await first_of(partial(self._wait_while_kept_out, engine), unwanted.wait)
        except TimeoutError as error:
            raise EngineError(
                f"{engine.engine_id} is not started again: {error}; await onload() after training"
            ) from error

    async def _wait_while_kept_out(self, engine: ManagedEngine) -> None:
        while self.keeps_out(engine):
            await self._changes.wait()
