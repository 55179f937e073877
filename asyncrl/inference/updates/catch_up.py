"""Brings an engine that joins late to the published weights, without disturbing the others.

Invariants
- The engine serves only if, at that moment, it holds the published version and no publication is under way. A
  publication that began without it would otherwise leave it behind.
- If newer weights were published meanwhile it starts over. If a publication took it in, there is nothing to do.
- A copy that is still being written is waited for: its end has the engine look again.
- The copy is in use while the engine loads it. A copy that was removed all the same is not tried again. A copy that an
  engine refuses (it is damaged, or the engine cannot read that directory) costs no restart: that engine waits for a
  publication.
- In the trainer's turn nothing is loaded on the GPUs that it shares.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import anyio
import structlog

from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError, WeightUpdateError
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.lifecycle import LIVE
from asyncrl.inference.fleet_events import EngineCaughtUp
from asyncrl.inference.gpus.shared_gpus import SharedGpus
from asyncrl.inference.routing.routing import Routing
from asyncrl.inference.sglang.engine_api import EngineRequestError
from asyncrl.inference.updates.copies_in_use import CopiesInUse, Published, is_there
from asyncrl.inference.updates.deadlines import Deadlines
from asyncrl.inference.updates.participants import register
from asyncrl.inference.updates.state import UpdateState
from asyncrl.inference.updates.verify import abbreviate, unreceived
from asyncrl.observability.events import EventLog

_log = structlog.get_logger(__name__)


class CatchUp:
    """Brings the late engines of one fleet to the published version."""

    def __init__(
        self,
        state: UpdateState,
        routing: Routing,
        gpus: SharedGpus,
        *,
        copies: CopiesInUse,
        deadlines: Deadlines,
        verify: bool,
        events: EventLog,
    ) -> None:
        """With `verify`, checksums prove that an engine has loaded every tensor of the copy."""
        self._state = state
        self._routing = routing
        self._gpus = gpus
        self._copies = copies
        self._deadlines = deadlines
        self._verify = verify
        self._events = events

    async def keep(self, engine: ManagedEngine) -> None:
        """Brings `engine` to the published version whenever it waits for weights and no publication is under way.

        Runs until it is cancelled.
        """
        seen = self._state.ends
        await self._bring(engine)
        while True:
            await self._state.next_end(seen)
            seen = self._state.ends
            await self._bring(engine)

    async def _bring(self, engine: ManagedEngine) -> None:
        """Returns when `engine` serves, or has to wait for a copy or for the next publication."""
        began = anyio.current_time()
        found: Published | None = None
        while True:
            published = self._state.published
            if published is None or engine.state is not EngineState.PENDING_WEIGHTS:
                return
            if self._state.under_way:
                return
            if self._gpus.trainers_turn and engine.endpoint.colocated:
                return
            if not can_catch_up(engine, published):
                reason = "there is no copy" if engine.reads_copies else "it may not see the copy (weights.directory)"
                if engine.refused is published:
                    reason = f"it could not load the copy in {published.directory}"
                _log.warning("waits for the next publication", engine=engine.engine_id, reason=reason)
                return
            if published.copy_due is not None:
                _log.info("waits for the copy of the published weights", engine=engine.engine_id)
                return
            assert published.directory is not None
            if found is not published:
                if await is_there(published.directory):
                    found = published
                elif self._state.published is published:  # somebody removed it
                    self._state.published = replace(published, directory=None)
                    engine.changed()
                continue  # much may have happened meanwhile
            found = None  # another try looks again
            with self._copies.held(published.directory):
                loaded = await self._load(engine, published)
            if loaded and await self._admit(engine, published.version):
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
        """Returns whether the engine has loaded the copy; if not, the caller looks at state and version again."""
        engine.move(EngineState.UPDATING, f"catching up with weights {published.version}")
        engine.lose_weights()
        client, load_s = engine.client, self._deadlines.load_s
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
            if self._state.published is not published:  # its files may be gone
                engine.move(EngineState.PENDING_WEIGHTS, "newer weights were published")
                return False
            if _refuses(error):
                engine.refused = published
                engine.move(EngineState.PENDING_WEIGHTS, f"it could not load {published.directory}: {error}")
            else:
                await engine.quarantine(f"it could not catch up with weights {published.version}: {error}")
            return False
        return engine.state is EngineState.UPDATING

    async def _admit(self, engine: ManagedEngine, version: str) -> bool:
        """Lets an engine that loaded `version` by itself serve, if that is published and no update is open.

        Otherwise it waits for weights again, and False is returned.
        """
        async with self._state.lock:
            current = self._state.version == version and self._state.open_lease is None
            if engine.state is not EngineState.UPDATING or engine.leaving:
                return False
            if not current:
                engine.move(EngineState.PENDING_WEIGHTS, "newer weights are being published")
                return False
            engine.version = version
            engine.move(EngineState.SERVING, f"caught up with weights {version}")
        await register([engine], self._routing)
        return True


def _refuses(error: EngineError | WeightUpdateError) -> bool:
    """Whether an engine that lives said, or its checksums showed, that it cannot load a copy. A new process could not
    load it either."""
    if isinstance(error, EngineRequestError):
        return error.endpoint == "/update_weights_from_disk" and error.status is not None
    return isinstance(error, WeightUpdateError)


def can_catch_up(engine: ManagedEngine, published: Published) -> bool:
    """Whether there is a copy of the published weights that the engine can load, now or once it is written."""
    return published.directory is not None and engine.reads_copies and engine.refused is not published


def needs_publication(engines: Iterable[ManagedEngine], published: Published | None) -> bool:
    """Whether no engine serves, and only another publication of the weights can make one serve.

    This includes engines whose memory is away and that the router does not know: a publication to them has failed.
    """
    live = [engine for engine in engines if engine.state in LIVE and not engine.leaving]
    if published is None or any(engine.serves or can_catch_up(engine, published) for engine in live):
        return False
    without = (EngineState.PENDING_WEIGHTS, EngineState.OFFLOADED)
    return any(engine.state in without and engine.takes_weights for engine in live)
