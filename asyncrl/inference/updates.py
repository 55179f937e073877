"""Weight updates as the fleet's side of a transaction: begin, commit, abort.

Invariants
- begin = pause (running requests keep their tokens) → stamp `torn:<version>` → open the session, on every engine.
  commit = close the session → verify → stamp `<version>` → continue → serve. In this order no sample shows a torn span.
- Whatever raises or is cancelled: the lease has ended, and no engine is left paused. An engine whose weights may be
  torn is out of the router and waits for the next publication; one that does not answer is killed.
- An engine is registered with the router only here, and only once it serves the published version.
- A lease that passes its deadline is taken back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import anyio
from anyio.abc import TaskGroup

from asyncrl.config.inference import WeightsConfig
from asyncrl.data.fleet import EngineState, UpdateAck, UpdateLease
from asyncrl.errors import EngineError, WeightUpdateError
from asyncrl.inference.engine import ManagedEngine
from asyncrl.inference.engine_api import EngineRequestError
from asyncrl.inference.events import WeightUpdateAborted, WeightUpdateBegun, WeightUpdateCommitted
from asyncrl.inference.leases import LeaseBook, sort_acks
from asyncrl.inference.lifecycle import UPDATABLE
from asyncrl.inference.router import RouterClient
from asyncrl.inference.verify import Checksums, abbreviate, disagreement, unreceived
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting

TAKE_BACK_TIMEOUT_S = 3.0
"""For an engine to end its session and go on after a failed update; one that takes longer is killed."""

Quarantine = Callable[[ManagedEngine, str], Awaitable[None]]


class WeightUpdates:
    """The update transactions of one fleet."""

    def __init__(
        self,
        engines: Sequence[ManagedEngine],
        router: RouterClient,
        config: WeightsConfig,
        *,
        quarantine: Quarantine,
        events: EventLog,
        task_group: TaskGroup,
    ) -> None:
        self.published: str | None = None
        self.committed = 0
        self.aborted = 0
        self.paused_s = 0.0
        """Seconds without generation over all committed updates."""
        self._engines = {engine.engine_id: engine for engine in engines}
        self._router = router
        self._config = config
        self._quarantine = quarantine
        self._events = events
        self._task_group = task_group
        self._book = LeaseBook()
        self._lock = anyio.Lock()
        self._paused_at = 0.0
        self._expiry = anyio.CancelScope()

    @property
    def open_lease(self) -> UpdateLease | None:
        return self._book.open

    def close(self) -> None:
        """Stops watching the open lease's deadline."""
        self._expiry.cancel()

    async def begin(self, version: str) -> UpdateLease:
        """Pauses and opens every engine that can take weights; one that refuses is quarantined, the others go on."""
        async with self._lock:
            lease_id = self._book.next_id(version)
            engines = [engine for engine in self._engines.values() if engine.state in UPDATABLE]
            if not engines:
                states = ", ".join(f"{e.engine_id} is {e.state}" for e in self._engines.values())
                raise WeightUpdateError(f"weights {version} have no engine to go to: {states}")
            self._paused_at = anyio.current_time()
            for engine in engines:
                engine.move(EngineState.UPDATING, f"weights {version}")
            try:
                failed = await _on_each(engines, lambda engine: self._open_session(engine, version))
                await self._drop(failed)
                ready = [e for e in engines if e.engine_id not in failed and e.state is EngineState.UPDATING]
                if not ready:
                    raise WeightUpdateError(f"weights {version}: no engine could be opened: {_told(failed)}")
            except BaseException as error:
                # Nothing was transferred, so an engine that served goes on with what it holds.
                await self._take_back(engines, f"weights {version}: {_reason(error)}", untouched=True)
                raise
            now = anyio.current_time()
            lease = self._book.grant(
                lease_id, version, [engine.endpoint for engine in ready], now, self._config.lease_timeout_s
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

    async def commit(self, lease_id: str, acks: Sequence[UpdateAck]) -> None:
        """Makes the engines that acknowledged serve the lease's version; the others are quarantined.

        Raises WeightUpdateError when no engine is left, or when the weights did not arrive as sent. The lease has
        ended either way.
        """
        async with self._lock:
            lease = self._book.claim(lease_id)
            generations = {engine.engine_id: engine.endpoint.generation for engine in self._engines.values()}
            holders, missing = sort_acks(lease, acks, generations)
            engines = [self._engines[i] for i in holders if self._engines[i].state is EngineState.UPDATING]
            leased = [self._engines[endpoint.engine_id] for endpoint in lease.engines]
            try:
                engines = await self._narrow(engines, missing, lambda engine: engine.client.end_weight_update())
                verified = await self._verify(engines, missing, lease.version)
                engines = [engine for engine in engines if engine.engine_id not in missing]
                engines = await self._narrow(engines, missing, lambda engine: engine.client.set_version(lease.version))
                if not engines:
                    raise WeightUpdateError(f"weights {lease.version}: no engine holds them: {_told(missing)}")
                engines = await self._narrow(engines, missing, _resume)
                await self._drop(missing)
                engines = [engine for engine in engines if engine.state is EngineState.UPDATING]
                if not engines:
                    raise WeightUpdateError(f"weights {lease.version}: the last engine died as it took them")
            except BaseException as error:
                await self._give_up(lease, leased, _reason(error))
                raise
            # From here on the update is committed, whatever happens to the router.
            first, self.published = self.published is None, lease.version
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
            await self._route(engines)
            if first:
                await self._router.probe(lease.version)

    async def abort(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool = False) -> None:
        """Takes the engines back; those in `failed` are quarantined. Nothing to do for a lease that has ended.

        `untouched`: no tensor was sent, so engines that served go on with the version that they hold.
        """
        with anyio.CancelScope(shield=True):  # every step below has a deadline
            async with self._lock:
                if self._book.has_ended(lease_id):
                    return
                lease = self._book.claim(lease_id)
                await self._drop(failed)
                leased = [self._engines[endpoint.engine_id] for endpoint in lease.engines]
                await self._give_up(lease, leased, "the publisher aborted", untouched=untouched)

    async def _open_session(self, engine: ManagedEngine, version: str) -> None:
        if "weights" in engine.offloaded:
            raise EngineError(f"{engine.engine_id}: its weights are offloaded; await onload_weights() first")
        client = engine.client
        if not engine.offloaded:
            await client.pause("retract")
        await client.set_version(f"torn:{version}")
        await client.begin_weight_update()
        if engine.version is None and self._config.verify != "never":
            await client.check_weights("reset_tensors")
            engine.baseline = await client.check_weights("checksum")

    async def _verify(self, engines: Sequence[ManagedEngine], missing: dict[str, str], version: str) -> bool:
        """Adds engines whose weights are not as sent to `missing`; raises if that is all of them. False: not due."""
        first = any(engine.baseline is not None for engine in engines)
        if not engines or self._config.verify == "never" or not (first or self._config.verify == "always"):
            return False
        checksums: dict[str, Checksums] = {}

        async def read(engine: ManagedEngine) -> None:
            checksums[engine.engine_id] = await engine.client.check_weights("checksum")

        missing |= await _on_each(engines, read)
        wrong: dict[str, str] = {}
        for engine in engines:
            if engine.baseline is None or engine.engine_id not in checksums:
                continue
            names = unreceived(engine.baseline, checksums[engine.engine_id])
            if names:
                wrong[engine.engine_id] = f"took the update but ignored {abbreviate(names)}"
        good = {engine_id: sums for engine_id, sums in checksums.items() if engine_id not in wrong}
        for engine_id, names in disagreement(good).items():
            wrong[engine_id] = f"holds other values than the other engines in {abbreviate(names)}"
        missing |= wrong
        if wrong and all(engine.engine_id in missing for engine in engines):
            raise WeightUpdateError(
                f"weights {version} did not arrive as sent: {_told(wrong)}. The export must use the tensor names "
                "of the checkpoint format that the engine loads"
            )
        for engine in engines:
            engine.baseline = None
        return True

    async def _route(self, engines: Sequence[ManagedEngine]) -> None:
        """Registers those that serve and are unknown to the router; raises EngineError if it takes none."""
        new = [engine for engine in engines if not engine.routed and engine.state is EngineState.SERVING]

        async def register(engine: ManagedEngine) -> None:
            engine.routed = True  # from the request on the router may know it
            await self._router.add(engine.endpoint.url)

        failed = await _on_each(new, register)
        await self._drop(failed)
        if failed and not any(engine.routed for engine in self._engines.values()):
            raise EngineError(f"the router took no engine: {_told(failed)}")

    async def _narrow(
        self,
        engines: Sequence[ManagedEngine],
        missing: dict[str, str],
        step: Callable[[ManagedEngine], Awaitable[None]],
    ) -> list[ManagedEngine]:
        """Takes `step` on each engine; those that fail go into `missing`, the others are returned."""
        failed = await _on_each(engines, step)
        missing |= failed
        return [engine for engine in engines if engine.engine_id not in failed]

    async def _drop(self, failed: Mapping[str, str]) -> None:
        for engine_id, reason in failed.items():
            await self._quarantine(self._engines[engine_id], reason)

    async def _give_up(
        self, lease: UpdateLease, engines: Sequence[ManagedEngine], reason: str, *, untouched: bool = False
    ) -> None:
        self._end(lease.lease_id, f"was given up ({reason})")
        self.aborted += 1
        await self._take_back(engines, f"weights {lease.version}: {reason}", untouched=untouched)
        self._events.emit(
            WeightUpdateAborted(lease=lease.lease_id, version=lease.version, reason=reason, restored=untouched)
        )

    async def _take_back(self, engines: Iterable[ManagedEngine], reason: str, *, untouched: bool) -> None:
        """Ends sessions and pauses; bounded, and not to be cancelled halfway."""

        async def one(engine: ManagedEngine) -> None:
            keep = untouched and engine.version is not None
            if not keep:
                await self._unroute(engine)
            with waiting("end of its weight update", engine.engine_id, TAKE_BACK_TIMEOUT_S):
                await _close_session(engine, restored=engine.version if keep else None)
            if engine.state is EngineState.UPDATING:
                if not keep:
                    engine.version = None
                serves = EngineState.SERVING if keep else EngineState.PENDING_WEIGHTS
                engine.move(EngineState.OFFLOADED if engine.offloaded else serves, reason)

        with anyio.CancelScope(shield=True):
            torn = [engine for engine in engines if engine.state is EngineState.UPDATING]
            await self._drop(await _on_each(torn, one))

    async def _unroute(self, engine: ManagedEngine) -> None:
        if engine.routed:
            engine.routed = False
            await self._router.remove(engine.endpoint.url, TAKE_BACK_TIMEOUT_S)

    def _end(self, lease_id: str, how: str) -> None:
        self._book.end(lease_id, how)
        self._expiry.cancel()

    async def _expire(self, lease: UpdateLease, scope: anyio.CancelScope) -> None:
        with scope:
            await anyio.sleep_until(lease.deadline)
            async with self._lock:
                if self._book.has_ended(lease.lease_id):
                    return
                leased = [self._engines[endpoint.engine_id] for endpoint in lease.engines]
                await self._give_up(lease, leased, f"it passed its deadline of {self._config.lease_timeout_s:g} s")


async def _close_session(engine: ManagedEngine, *, restored: str | None) -> None:
    """Ends a session that may not be open, and the pause. Without a version to go back to, its requests are aborted."""
    client = engine.client
    try:
        await client.end_weight_update()
    except EngineRequestError as error:
        if error.status != 400:  # 400: no session is open
            raise
    if restored is not None:
        await client.set_version(restored)
    else:
        await client.abort_all()
    await _resume(engine)
    if restored is None:
        # Requests that waited in the HTTP server while it was paused enter the scheduler only now.
        await client.abort_all()


async def _resume(engine: ManagedEngine) -> None:
    if not engine.offloaded:
        await engine.client.resume()


async def _on_each(
    engines: Iterable[ManagedEngine], step: Callable[[ManagedEngine], Awaitable[None]]
) -> dict[str, str]:
    """Takes `step` on all engines at once; engine id → reason for those that failed."""
    failed: dict[str, str] = {}

    async def one(engine: ManagedEngine) -> None:
        try:
            await step(engine)
        except (EngineError, TimeoutError) as error:
            failed[engine.engine_id] = _reason(error)

    async with anyio.create_task_group() as task_group:
        for engine in engines:
            task_group.start_soon(one, engine)
    return failed


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _told(failed: Mapping[str, str]) -> str:
    return "; ".join(f"{engine_id}: {reason}" for engine_id, reason in failed.items())
