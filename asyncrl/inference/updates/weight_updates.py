"""Weight updates as the fleet's side of a transaction: begin, commit, abort.

Invariants
- begin = pause (running requests keep their tokens) → stamp `torn:<version>` → open the session, on every engine.
  commit = close the session → verify → stamp `<version>` → continue → serve. In this order no sample shows a torn span.
- Whatever raises or is cancelled: the lease has ended, and no engine is left paused. An engine whose weights may be
  torn is out of the router and waits for the next publication; one that does not answer is killed.
- An engine that hangs holds the others up for a bounded time (`deadlines`), whatever the step.
- An engine is registered with the router only here, and only once it serves the published version. A router that
  refuses it undoes no commit: the engine is started again, a bounded number of times, catches up and is registered.
- A lease that passes its deadline is taken back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup

from asyncrl.config.sections.inference import WeightsConfig
from asyncrl.data.fleet import EngineState, UpdateAck, UpdateLease
from asyncrl.errors import EnginesLostError, WeightUpdateError
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.fleet_events import WeightUpdateAborted, WeightUpdateBegun, WeightUpdateCommitted
from asyncrl.inference.routing.routing import Routing
from asyncrl.inference.updates.copies_in_use import Published
from asyncrl.inference.updates.deadlines import Deadlines
from asyncrl.inference.updates.leases import LeaseBook, sort_acks
from asyncrl.inference.updates.sessions import PAUSE_MODES, close_session, on_each, open_session, reason_of, resume
from asyncrl.inference.updates.verify import Checksums, abbreviate, disagreement, unreceived
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting

_Member = tuple[ManagedEngine, int]
"""An engine and the generation of the process that is meant."""
Quarantine = Callable[[ManagedEngine, str], Coroutine[Any, Any, None]]


class WeightUpdates:
    """The update transactions of one fleet."""

    def __init__(
        self,
        engines: Sequence[ManagedEngine],
        routing: Routing,
        config: WeightsConfig,
        deadlines: Deadlines,
        *,
        quarantine: Quarantine,
        events: EventLog,
        task_group: TaskGroup,
    ) -> None:
        self.published: Published | None = None
        self.committed = 0
        self.aborted = 0
        self.paused_s = 0.0
        """Seconds without generation over all committed updates."""
        self._engines = engines
        self._routing = routing
        self._config = config
        self.deadlines = deadlines
        """Of the steps on each engine: how long they hold the others up, at most."""
        self._quarantine = quarantine
        self._events = events
        self._task_group = task_group
        self._book = LeaseBook()
        self._lock = anyio.Lock()
        self.ends = 0
        """Leases that ended, their engines settled, and updates that did not come to one."""
        self.beginning = 0
        """Updates that are about to get a lease, or not to."""
        self._ended = anyio.Event()
        self._paused_at = 0.0
        self._expiry = anyio.CancelScope()

    @property
    def lock(self) -> anyio.Lock:
        """While somebody else holds it, no update begins, commits or is given up."""
        return self._lock

    @property
    def open_lease(self) -> UpdateLease | None:
        return self._book.open

    def close(self) -> None:
        """Stops watching the open lease's deadline."""
        self._expiry.cancel()

    async def next_end(self, after: int) -> None:
        """Returns when more than `after` leases have ended and none is open; each has a deadline."""
        while self._book.open is not None or self.ends <= after:
            await self._ended.wait()

    async def admit(self, engine: ManagedEngine, version: str) -> bool:
        """Lets an engine that loaded `version` by itself serve, if that is what is published and nothing else begins.

        Otherwise it waits for weights again, and False is returned.
        """
        async with self._lock:
            current = self.published is not None and self.published.version == version and self._book.open is None
            if engine.state is not EngineState.UPDATING or engine.leaving:
                return False
            if not current:
                engine.move(EngineState.PENDING_WEIGHTS, "newer weights are being published")
                return False
            engine.version = version
            engine.move(EngineState.SERVING, f"caught up with weights {version}")
        await self._route([engine])
        return True

    async def begin(self, version: str) -> UpdateLease:
        """Pauses and opens every engine that can take weights; one that refuses is quarantined, the others go on."""
        self.beginning += 1  # before anything is awaited: no engine starts to load what is about to be old
        try:
            return await self._begin(version)
        except BaseException:  # a cancellation too: engines that were left to this update look for a copy again
            self.signal_end()
            raise
        finally:
            self.beginning -= 1

    async def _begin(self, version: str) -> UpdateLease:
        async with self._lock:
            lease_id = self._book.next_id(version)
            engines = [engine for engine in self._engines if engine.takes_weights]
            if not engines:
                states = ", ".join(f"{e.engine_id} is {e.state}" for e in self._engines)
                raise WeightUpdateError(f"weights {version} have no engine to go to: {states}")
            away = [engine.engine_id for engine in engines if "weights" in engine.offloaded]
            if away:
                raise WeightUpdateError(
                    f"weights {version}: those of {', '.join(away)} are offloaded; await onload_weights() first"
                )
            self._paused_at = anyio.current_time()
            for engine in engines:
                engine.move(EngineState.UPDATING, f"weights {version}")
            members = _members(engines)
            try:
                verify = self._config.verify != "never"
                mode = PAUSE_MODES[self._config.on_update]
                failed = await on_each(
                    engines,
                    lambda engine: open_session(engine, version, verify=verify, deadlines=self.deadlines, mode=mode),
                )
                await self._drop(failed, members)
                ready = [e for e in engines if e.engine_id not in failed and e.state is EngineState.UPDATING]
                if not ready:
                    raise EnginesLostError(f"weights {version}: no engine could be opened: {_told(failed)}")
            except BaseException as error:
                # Nothing was transferred, so an engine that served goes on with what it holds.
                await self._take_back(engines, f"weights {version}: {reason_of(error)}", untouched=True)
                raise
            now = anyio.current_time()
            lease = self._book.grant(
                lease_id,
                version,
                [engine.endpoint for engine in ready],
                paused_at=self._paused_at,
                now=now,
                duration_s=self._config.lease_timeout_s,
                settle_s=self.deadlines.settle_s(verify=self._config.verify != "never"),
            )
            self._expiry = anyio.CancelScope()
            self._task_group.start_soon(self._expire, lease, self._expiry)
            self._events.emit(
                WeightUpdateBegun(
                    lease=lease_id,
                    version=version,
                    engines=tuple(engine.engine_id for engine in ready),
                    seconds=now - self._paused_at,
                )
            )
            return lease

    async def commit(self, lease_id: str, acks: Sequence[UpdateAck], directory: Path | None = None) -> None:
        """Makes the engines that acknowledged serve the lease's version; the others are quarantined.

        `directory` holds a copy of the weights for engines that join later.

        Raises WeightUpdateError when no engine is left, or when the weights did not arrive as sent. The lease has
        ended either way. What is committed stays so: an engine that the router refuses is quarantined, even the last.
        """
        async with self._lock:
            lease = self._book.claim(lease_id)
            leased = self._leased(lease)
            members = _members(leased.values())
            generations = {engine_id: engine.endpoint.generation for engine_id, engine in leased.items()}
            holders, missing = sort_acks(lease, acks, generations)
            engines = [leased[i] for i in holders if leased[i].state is EngineState.UPDATING]
            try:
                walk_s, step_s = self.deadlines.walk_s, self.deadlines.step_s
                engines = await self._narrow(engines, missing, lambda engine: engine.client.end_weight_update(walk_s))
                verified = await self._verify(engines, missing, lease.version)
                engines = [engine for engine in engines if engine.engine_id not in missing]
                engines = await self._narrow(
                    engines, missing, lambda engine: engine.client.set_version(lease.version, step_s)
                )
                if not engines:
                    raise EnginesLostError(f"weights {lease.version}: no engine holds them: {_told(missing)}")
                engines = await self._narrow(engines, missing, lambda engine: resume(engine, self.deadlines))
                await self._drop(missing, members)
                engines = [engine for engine in engines if engine.state is EngineState.UPDATING]
                if not engines:
                    raise EnginesLostError(f"weights {lease.version}: the last engine died as it took them")
            except BaseException as error:
                await self._give_up(lease, leased.values(), reason_of(error))
                raise
            # From here on the update is committed, whatever happens to the router.
            self.published = Published(lease.version, directory)
            self._end(lease_id, f"was committed as {lease.version}")
            for engine in engines:
                engine.version = lease.version
                engine.move(EngineState.OFFLOADED if engine.offloaded else EngineState.SERVING)
            paused_s = anyio.current_time() - self._paused_at
            self.committed += 1
            self.paused_s += paused_s
            self._events.emit(
                WeightUpdateCommitted(
                    lease=lease_id,
                    version=lease.version,
                    engines=tuple(engine.engine_id for engine in engines),
                    paused_s=paused_s,
                    verified=verified,
                )
            )
            self.signal_end()
            await self._route(engines)

    async def abort(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool = False) -> None:
        """Takes the engines back; those in `failed` are quarantined. Nothing to do for a lease that has ended.

        `untouched`: no tensor was sent, so engines that served go on with the version that they hold.
        """
        with anyio.CancelScope(shield=True):  # every step below has a deadline
            async with self._lock:
                if self._book.has_ended(lease_id):
                    return
                lease = self._book.claim(lease_id)
                leased = self._leased(lease)
                await self._drop(failed, _members(leased.values()))
                await self._give_up(lease, leased.values(), "the publisher aborted", untouched=untouched)

    async def _verify(self, engines: Sequence[ManagedEngine], missing: dict[str, str], version: str) -> bool:
        """Adds engines whose weights are not as sent to `missing`; raises if all ignored some. False: not due."""
        first = any(engine.baseline is not None for engine in engines)
        if not engines or self._config.verify == "never" or not (first or self._config.verify == "always"):
            return False
        checksums: dict[str, Checksums] = {}

        async def read(engine: ManagedEngine) -> None:
            checksums[engine.engine_id] = await engine.client.check_weights("checksum", timeout_s=self.deadlines.walk_s)

        missing |= await on_each(engines, read)
        wrong: dict[str, str] = {}
        for engine in engines:
            if engine.baseline is None or engine.engine_id not in checksums:
                continue
            names = unreceived(engine.baseline, checksums[engine.engine_id])
            if names:
                wrong[engine.engine_id] = f"took the update but ignored {abbreviate(names)}"
        ignored = bool(wrong)
        good = {engine_id: sums for engine_id, sums in checksums.items() if engine_id not in wrong}
        for engine_id, names in disagreement(good).items():
            wrong[engine_id] = f"holds other values than the other engines in {abbreviate(names)}"
        missing |= wrong
        if ignored and all(engine.engine_id in missing for engine in engines):
            raise WeightUpdateError(
                f"weights {version} did not arrive as sent: {_told(wrong)}. The export must use the tensor names "
                "of the checkpoint format that the engine loads"
            )
        for engine in engines:
            engine.baseline = None
        return True

    async def _route(self, engines: Sequence[ManagedEngine]) -> None:
        """Registers those that the router does not know; one that it refuses is quarantined, and started again.

        One whose memory is still away is paused: requests wait in it until it has all of it back.
        """
        states = (EngineState.SERVING, EngineState.OFFLOADED)
        new = [engine for engine in engines if not engine.routed and engine.state in states]
        members = _members(new)
        await self._drop(await on_each(new, self._routing.add), members)

    async def _narrow(
        self,
        engines: Sequence[ManagedEngine],
        missing: dict[str, str],
        step: Callable[[ManagedEngine], Awaitable[None]],
    ) -> list[ManagedEngine]:
        """Takes `step` on each engine; those that fail go into `missing`, the others are returned."""
        failed = await on_each(engines, step)
        missing |= failed
        return [engine for engine in engines if engine.engine_id not in failed]

    def _leased(self, lease: UpdateLease) -> dict[str, ManagedEngine]:
        """Engines of the lease by id, without those whose process is another one by now."""
        engines = {engine.engine_id: engine for engine in self._engines}
        found = ((endpoint, engines.get(endpoint.engine_id)) for endpoint in lease.engines)
        return {
            endpoint.engine_id: engine
            for endpoint, engine in found
            if engine is not None and engine.endpoint.generation == endpoint.generation
        }

    async def _drop(self, failed: Mapping[str, str], members: Mapping[str, _Member]) -> None:
        """Quarantines those of `members` that failed, all at once: one that hangs must not delay the next.

        A process that was started since is not to blame for the one before it.
        """

        async def one(engine: ManagedEngine, generation: int, reason: str) -> None:
            if engine.endpoint.generation == generation:
                await self._quarantine(engine, reason)

        async with anyio.create_task_group() as task_group:
            for engine_id, reason in failed.items():
                if engine_id in members:
                    task_group.start_soon(one, *members[engine_id], reason)

    async def _give_up(
        self, lease: UpdateLease, engines: Iterable[ManagedEngine], reason: str, *, untouched: bool = False
    ) -> None:
        self._end(lease.lease_id, f"was given up ({reason})")
        self.aborted += 1
        await self._take_back(engines, f"weights {lease.version}: {reason}", untouched=untouched)
        self._events.emit(
            WeightUpdateAborted(lease=lease.lease_id, version=lease.version, reason=reason, restored=untouched)
        )
        self.signal_end()

    async def _take_back(self, engines: Iterable[ManagedEngine], reason: str, *, untouched: bool) -> None:
        """Ends sessions and pauses; bounded, and not to be cancelled halfway."""

        async def one(engine: ManagedEngine) -> None:
            keep = untouched and engine.version is not None
            if not keep:
                await self._routing.remove(engine)
            with waiting("end of its weight update", engine.engine_id, self.deadlines.take_back_s):
                await close_session(engine, restored=engine.version if keep else None, deadlines=self.deadlines)
            if engine.state is EngineState.UPDATING:
                if not keep:
                    engine.lose_weights()
                serves = EngineState.SERVING if keep else EngineState.PENDING_WEIGHTS
                engine.move(EngineState.OFFLOADED if engine.offloaded else serves, reason)

        with anyio.CancelScope(shield=True):
            torn = [engine for engine in engines if engine.state is EngineState.UPDATING]
            members = _members(torn)
            await self._drop(await on_each(torn, one), members)

    def _end(self, lease_id: str, how: str) -> None:
        self._book.end(lease_id, how)
        self._expiry.cancel()

    def signal_end(self) -> None:
        """Engines that wait for weights look again how they can come by them."""
        self.ends += 1
        ended, self._ended = self._ended, anyio.Event()
        ended.set()

    async def _expire(self, lease: UpdateLease, scope: anyio.CancelScope) -> None:
        with scope:
            await anyio.sleep_until(lease.deadline)
            async with self._lock:
                if self._book.has_ended(lease.lease_id):
                    return
                leased = self._leased(lease).values()
                await self._give_up(lease, leased, f"it passed its deadline of {self._config.lease_timeout_s:g} s")


def _members(engines: Iterable[ManagedEngine]) -> dict[str, _Member]:
    """The engines as they are now, by id: for a step that may outlast their processes."""
    return {engine.engine_id: (engine, engine.endpoint.generation) for engine in engines}


def _told(failed: Mapping[str, str]) -> str:
    return "; ".join(f"{engine_id}: {reason}" for engine_id, reason in failed.items())
