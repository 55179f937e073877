"""Weight updates as the fleet's side of a transaction: begin, commit, abort.

Invariants
- begin = pause (running requests keep their tokens) → stamp `torn:<version>` → open the session, on every engine.
  commit = close the session → verify → stamp `<version>` → continue → serve. In this order no sample shows a torn span.
- Whatever raises or is cancelled: the lease has ended, and no engine is left paused. An engine whose weights may be
  torn is out of the router and waits for the next publication; one that does not answer is killed.
- An engine that hangs holds the others up for a bounded time (`deadlines`), whatever the step.
- An engine is registered with the router only once it serves the published version. A router that refuses it undoes no
  commit: the engine is started again, a bounded number of times, catches up and is registered.
- A lease that passes its deadline is taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from asyncrl.config.sections.inference import WeightsConfig
from asyncrl.data.fleet import EngineState, UpdateAck, UpdateLease
from asyncrl.errors import EnginesLostError, WeightUpdateError
from asyncrl.inference.engines.engine import ManagedEngine, reason_of
from asyncrl.inference.engines.group import EngineGroup
from asyncrl.inference.fleet_events import WeightUpdateAborted, WeightUpdateBegun, WeightUpdateCommitted
from asyncrl.inference.sglang.engine_api import Checksums
from asyncrl.inference.updates.copies_in_use import Published
from asyncrl.inference.updates.leases import sort_acks
from asyncrl.inference.updates.participants import Participants, complaints, register
from asyncrl.inference.updates.sessions import PAUSE_MODES, close_session, open_session, resume, stamp
from asyncrl.inference.updates.state import UpdateState
from asyncrl.inference.updates.verify import abbreviate, disagreement, unreceived
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting


class WeightUpdates:
    """The update transactions of one fleet."""

    def __init__(
        self,
        group: EngineGroup,
        state: UpdateState,
        config: WeightsConfig,
        *,
        events: EventLog,
        task_group: TaskGroup,
    ) -> None:
        """`task_group` runs the task that takes back a lease past its deadline."""
        self.committed = 0
        self.aborted = 0
        self.paused_s = 0.0
        """Seconds without generation over all committed updates."""
        self._group = group
        self._state = state
        self._config = config
        self._events = events
        self._task_group = task_group
        self._paused_at = 0.0
        self._expiry = anyio.CancelScope()

    def close(self) -> None:
        """Stops watching the open lease's deadline."""
        self._expiry.cancel()

    async def begin(self, version: str) -> UpdateLease:
        """Pauses and opens every engine that can take weights; one that refuses is quarantined, the others go on."""
        with self._state.beginning():
            async with self._state.lock:
                return await self._begin(version)

    async def _begin(self, version: str) -> UpdateLease:
        book, deadlines, verify = self._state.book, self._group.deadlines, self._config.verify != "never"
        lease_id = book.next_id(version)
        engines = self._able(version)
        self._paused_at = anyio.current_time()
        for engine in engines:
            engine.move(EngineState.UPDATING, f"weights {version}")
        opened, mode = Participants(engines), PAUSE_MODES[self._config.on_update]
        try:
            await opened.each(
                lambda engine: open_session(engine, version, verify=verify, deadlines=deadlines, mode=mode)
            )
            await opened.quarantine_failed()
            opened.keep_updating()
            if not opened.remaining:
                raise EnginesLostError(f"weights {version}: no engine could be opened: {opened.complaints()}")
        except BaseException as error:
            # Nothing was transferred, so an engine that served goes on with the weights that it holds.
            await self._take_back(engines, f"weights {version}: {reason_of(error)}", untouched=True)
            raise
        now = anyio.current_time()
        lease = book.grant(
            lease_id,
            version,
            [engine.endpoint for engine in opened.remaining],
            paused_at=self._paused_at,
            now=now,
            duration_s=self._config.lease_timeout_s,
            settle_s=deadlines.settle_s(verify=verify),
        )
        self._expiry = anyio.CancelScope()
        self._task_group.start_soon(self._expire, lease, self._expiry)
        self._events.emit(
            WeightUpdateBegun(
                lease=lease_id, version=version, engines=_ids(opened.remaining), seconds=now - self._paused_at
            )
        )
        return lease

    def _able(self, version: str) -> list[ManagedEngine]:
        """Engines that an update may begin with; raises WeightUpdateError if none may, or memory of one is away."""
        engines = [engine for engine in self._group.engines if engine.takes_weights]
        if not engines:
            states = ", ".join(f"{e.engine_id} is {e.state}" for e in self._group.engines)
            raise WeightUpdateError(f"weights {version} have no engine to go to: {states}")
        away = [engine.engine_id for engine in engines if "weights" in engine.offloaded]
        if away:
            raise WeightUpdateError(
                f"weights {version}: those of {', '.join(away)} are offloaded; await onload_weights() first"
            )
        return engines

    async def commit(
        self,
        lease_id: str,
        acks: Sequence[UpdateAck],
        directory: Path | None = None,
        *,
        copy_due: float | None = None,
    ) -> None:
        """Makes the engines that acknowledged serve the lease's version; the others are quarantined.

        `directory` holds a copy of the weights for engines that join later; with `copy_due` it is still being written.

        Raises WeightUpdateError when no engine is left, or when the weights did not arrive as sent. The lease has
        ended either way. A commit stays valid: an engine that the router refuses is quarantined, even the last one.
        """
        async with self._state.lock:
            lease = self._state.book.claim(lease_id)
            leased = self._leased(lease)
            try:
                holders, verified = await self._settle(lease, leased, acks)
            except BaseException as error:
                await self._give_up(lease, leased, reason_of(error))
                raise
            # From here on the update is committed, whatever happens to the router.
            self._state.published = Published(lease.version, directory, copy_due)
            self._end(lease_id, f"was committed as {lease.version}")
            for engine in holders:
                engine.version = lease.version
                engine.move(EngineState.OFFLOADED if engine.offloaded else EngineState.SERVING)
            paused_s = anyio.current_time() - self._paused_at
            self.committed += 1
            self.paused_s += paused_s
            self._events.emit(
                WeightUpdateCommitted(
                    lease=lease_id,
                    version=lease.version,
                    engines=_ids(holders),
                    paused_s=paused_s,
                    verified=verified,
                )
            )
            self._state.signal_end()
            await register(holders, self._group.routing)

    async def _settle(
        self, lease: UpdateLease, leased: Sequence[ManagedEngine], acks: Sequence[UpdateAck]
    ) -> tuple[list[ManagedEngine], bool]:
        """Has the engines that acknowledged go on with the new weights; quarantines the others.

        Returns the engines that do, and whether their weights were verified. Raises WeightUpdateError if none does.
        """
        deadlines = self._group.deadlines
        party = Participants(leased)
        party.exclude(sort_acks(lease, acks, {engine.engine_id: engine.endpoint.generation for engine in leased})[1])
        party.keep_updating()
        await party.each(lambda engine: engine.client.end_weight_update(deadlines.walk_s))
        verified = await self._verify(party, lease.version)
        await party.each(lambda engine: stamp(engine, lease.version, deadlines))
        if not party.remaining:
            raise EnginesLostError(f"weights {lease.version}: no engine holds them: {party.complaints()}")
        await party.each(lambda engine: resume(engine, deadlines))
        await party.quarantine_failed()
        party.keep_updating()
        if not party.remaining:
            raise EnginesLostError(f"weights {lease.version}: the last engine died as it took them")
        return party.remaining, verified

    async def _verify(self, party: Participants, version: str) -> bool:
        """Excludes engines whose weights are not as sent; raises if all ignored some. Returns False if not due."""
        engines = party.remaining
        first = any(engine.baseline is not None for engine in engines)
        if not engines or self._config.verify == "never" or not (first or self._config.verify == "always"):
            return False
        checksums: dict[str, Checksums] = {}

        async def read(engine: ManagedEngine) -> None:
            walk_s = self._group.deadlines.walk_s
            checksums[engine.engine_id] = await engine.client.check_weights("checksum", timeout_s=walk_s)

        await party.each(read)
        wrong: dict[str, str] = {}
        for engine in party.remaining:
            if engine.baseline is not None:
                names = unreceived(engine.baseline, checksums[engine.engine_id])
                if names:
                    wrong[engine.engine_id] = f"took the update but ignored {abbreviate(names)}"
        ignored = bool(wrong)
        good = {engine_id: sums for engine_id, sums in checksums.items() if engine_id not in wrong}
        for engine_id, names in disagreement(good).items():
            wrong[engine_id] = f"holds other values than the other engines in {abbreviate(names)}"
        party.exclude(wrong)
        if ignored and not party.remaining:
            raise WeightUpdateError(
                f"weights {version} did not arrive as sent: {complaints(wrong)}. The export must use the tensor names "
                "of the checkpoint format that the engine loads"
            )
        for engine in engines:
            engine.baseline = None
        return True

    async def abort(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool = False) -> None:
        """Takes the engines back; those in `failed` are quarantined. Nothing to do for a lease that has ended.

        `untouched`: no tensor was sent, so engines that served go on with the version that they hold.
        """
        with anyio.CancelScope(shield=True):  # every step below has a deadline
            async with self._state.lock:
                if self._state.book.has_ended(lease_id):
                    return
                lease = self._state.book.claim(lease_id)
                leased = self._leased(lease)
                lost = Participants(leased)
                lost.exclude(failed)
                await lost.quarantine_failed()
                await self._give_up(lease, leased, "the publisher aborted", untouched=untouched)

    def _leased(self, lease: UpdateLease) -> list[ManagedEngine]:
        """Engines of the lease, without those that have a newer process by now."""
        engines = {(engine.engine_id, engine.endpoint.generation): engine for engine in self._group.engines}
        found = (engines.get((endpoint.engine_id, endpoint.generation)) for endpoint in lease.engines)
        return [engine for engine in found if engine is not None]

    async def _give_up(
        self, lease: UpdateLease, engines: Iterable[ManagedEngine], reason: str, *, untouched: bool = False
    ) -> None:
        self._end(lease.lease_id, f"was given up ({reason})")
        self.aborted += 1
        await self._take_back(engines, f"weights {lease.version}: {reason}", untouched=untouched)
        self._events.emit(
            WeightUpdateAborted(lease=lease.lease_id, version=lease.version, reason=reason, restored=untouched)
        )
        self._state.signal_end()

    async def _take_back(self, engines: Iterable[ManagedEngine], reason: str, *, untouched: bool) -> None:
        """Ends sessions and pauses; bounded, and not to be cancelled halfway."""
        deadlines = self._group.deadlines

        async def one(engine: ManagedEngine) -> None:
            keep = untouched and engine.version is not None
            if not keep:
                await self._group.routing.remove(engine)
            with waiting("end of its weight update", engine.engine_id, deadlines.take_back_s):
                await close_session(engine, restored=engine.version if keep else None, deadlines=deadlines)
            if engine.state is EngineState.UPDATING:
                if not keep:
                    engine.lose_weights()
                serves = EngineState.SERVING if keep else EngineState.PENDING_WEIGHTS
                engine.move(EngineState.OFFLOADED if engine.offloaded else serves, reason)

        with anyio.CancelScope(shield=True):
            torn = Participants(engines)
            torn.keep_updating()
            await torn.each(one)
            await torn.quarantine_failed()

    def _end(self, lease_id: str, how: str) -> None:
        self._state.book.end(lease_id, how)
        self._expiry.cancel()

    async def _expire(self, lease: UpdateLease, scope: anyio.CancelScope) -> None:
        with scope:
            await anyio.sleep_until(lease.deadline)
            async with self._state.lock:
                if self._state.book.has_ended(lease.lease_id):
                    return
                late = f"it passed its deadline of {self._config.lease_timeout_s:g} s"
                await self._give_up(lease, self._leased(lease), late)


def _ids(engines: Iterable[ManagedEngine]) -> tuple[str, ...]:
    return tuple(engine.engine_id for engine in engines)
