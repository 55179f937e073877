"""Brings an engine that joins late to the published weights, without disturbing the others.

Invariants
- The engine serves only if, at that moment, it holds the published version and no publication is under way: one that
  began without it would otherwise leave it behind.
- Where newer weights were published meanwhile it starts over; where it was taken into a publication there is nothing
  to do.
- The copy that it loads is in use until it has; one that was removed all the same is not counted on any more. One that
  an engine refuses (it is damaged, or cannot be seen from there) costs no restart: that engine waits for a publication.
- On GPUs that are the trainer's at this time nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import anyio
import structlog

from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError, WeightUpdateError
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.group import serves
from asyncrl.inference.engines.lifecycle import LIVE
from asyncrl.inference.fleet_events import EngineCaughtUp
from asyncrl.inference.gpus.shared_gpus import SharedGpus
from asyncrl.inference.sglang.engine_api import EngineRequestError
from asyncrl.inference.updates.copies_in_use import CopiesInUse, Published, is_there
from asyncrl.inference.updates.verify import abbreviate, unreceived
from asyncrl.inference.updates.weight_updates import Quarantine, WeightUpdates
from asyncrl.observability.events import EventLog

_log = structlog.get_logger(__name__)


class CatchUp:
    """The way of a restarted engine to the published version."""

    def __init__(
        self,
        updates: WeightUpdates,
        *,
        verify: bool,
        quarantine: Quarantine,
        copies: CopiesInUse,
        gpus: SharedGpus,
        events: EventLog,
    ) -> None:
        self._updates = updates
        self._verify = verify
        self._quarantine = quarantine
        self._copies = copies
        self._gpus = gpus
        self._events = events

    async def keep(self, engine: ManagedEngine) -> None:
        """Brings `engine` to the published version whenever it waits for weights outside of a publication."""
        seen = self._updates.ends
        await self._bring(engine)
        while True:
            await self._updates.next_end(seen)
            seen = self._updates.ends
            await self._bring(engine)

    async def _bring(self, engine: ManagedEngine) -> None:
        """Returns when `engine` serves, or when it is left to the next publication."""
        began = anyio.current_time()
        found: Published | None = None
        while True:
            published = self._updates.published
            if published is None or engine.state is not EngineState.PENDING_WEIGHTS:
                return
            if self._updates.beginning or self._updates.open_lease:
                return
            if self._gpus.trainers_turn and engine.endpoint.colocated:
                return
            if not can_catch_up(engine, published):
                reason = "there is no copy" if engine.reads_copies else "it may not see the copy (weights.directory)"
                if engine.refused is published:
                    reason = f"it could not load the copy in {published.directory}"
                _log.warning("waits for the next publication", engine=engine.engine_id, reason=reason)
                return
            assert published.directory is not None
            if found is not published:
                if await is_there(published.directory):
                    found = published
                elif self._updates.published is published:  # somebody removed it
                    self._updates.published = replace(published, directory=None)
                    engine.changed()
                continue  # much may have happened meanwhile
            found = None  # another try looks again
            with self._copies.held(published.directory):
                loaded = await self._load(engine, published)
            if loaded and await self._updates.admit(engine, published.version):
                break
        self._events.emit(
            EngineCaughtUp(
                engine=engine.engine_id,
                generation=engine.endpoint.generation,
                version=published.version,
                seconds=anyio.current_time() - began,
            )
        )

    async def _load(self, engine: ManagedEngine, published: Published) -> bool:
        """False: it could not, and newer weights or its own end are the next thing to look at."""
        engine.move(EngineState.UPDATING, f"catching up with weights {published.version}")
        engine.lose_weights()
        client, load_s = engine.client, self._updates.deadlines.load_s
        try:
            await client.set_version(f"torn:{published.version}")
            baseline = None
            if self._verify:
                await client.check_weights("reset_tensors", timeout_s=load_s)
                baseline = await client.check_weights("checksum", timeout_s=load_s)
            await client.update_from_disk(str(published.directory), timeout_s=load_s)
            if baseline is not None:
                names = unreceived(baseline, await client.check_weights("checksum", timeout_s=load_s))
                if names:
                    raise WeightUpdateError(f"it loaded {published.directory} but not {abbreviate(names)}")
            await client.set_version(published.version)
        except (EngineError, WeightUpdateError) as error:
            if engine.state is not EngineState.UPDATING:
                return False
            if self._updates.published is not published:  # its files may be gone
                engine.move(EngineState.PENDING_WEIGHTS, "newer weights were published")
                return False
            if _refuses(error):
                engine.refused = published
                engine.move(EngineState.PENDING_WEIGHTS, f"it could not load {published.directory}: {error}")
            else:
                await self._quarantine(engine, f"it could not catch up with weights {published.version}: {error}")
            return False
        return engine.state is EngineState.UPDATING


def _refuses(error: EngineError | WeightUpdateError) -> bool:
    """Whether an engine that lives has told, or shown, that it cannot load a copy: another process would not either."""
    if isinstance(error, EngineRequestError):
        return error.endpoint == "/update_weights_from_disk" and error.status is not None
    return isinstance(error, WeightUpdateError)


def can_catch_up(engine: ManagedEngine, published: Published) -> bool:
    """Whether there is a copy of the published weights that the engine can load."""
    return published.directory is not None and engine.reads_copies and engine.refused is not published


def needs_publication(engines: Iterable[ManagedEngine], published: Published | None) -> bool:
    """Whether no engine serves, and those that live come to serve only by a publication of the weights anew.

    So do those whose memory is away and whom the router does not know: a publication to them has failed.
    """
    live = [engine for engine in engines if engine.state in LIVE and not engine.leaving]
    if published is None or any(serves(engine) or can_catch_up(engine, published) for engine in live):
        return False
    without = (EngineState.PENDING_WEIGHTS, EngineState.OFFLOADED)
    return any(engine.state in without and engine.takes_weights for engine in live)
