"""InferenceController: owns the engines and the router, and nobody else touches them.

Invariants
- What leaves it is frozen data: addresses, versions, leases. Processes are started and ended through the host only.
- An exit is noticed at once. A fleet that cannot serve (an engine that fails to start, the router gone, no engine
  left) raises EngineError into the task group given to `start`, so that nothing waits for it in vain.
- `dispose` leaves neither process nor port, whatever happened before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from asyncrl.config import Config
from asyncrl.config.layout import ProcessLayout
from asyncrl.data.fleet import EngineState, FleetView, UpdateAck, UpdateLease
from asyncrl.errors import EngineError
from asyncrl.inference.engine import ManagedEngine
from asyncrl.inference.engine_api import CheckAction, EngineClient, new_session
from asyncrl.inference.lifecycle import LIVE, ROUTABLE
from asyncrl.inference.memory import Memory
from asyncrl.inference.ports import PortAllocator
from asyncrl.inference.router import RouterClient
from asyncrl.inference.scratch import Scratch
from asyncrl.inference.supervision import Supervisor
from asyncrl.inference.updates import WeightUpdates
from asyncrl.inference.verify import Checksums, abbreviate, differing
from asyncrl.observability.events import EventLog

if TYPE_CHECKING:
    from asyncrl.host import EngineHost


@dataclass(frozen=True, slots=True)
class InferenceStatistics:
    """A snapshot of the controller."""

    engines: Mapping[str, int]
    """State → engines in it."""
    published_version: str | None
    open_lease: str | None
    updates_committed: int
    updates_aborted: int
    paused_s: float
    """Seconds without generation over all committed updates."""
    start_s: float | None
    """From `start` to the last engine's first generation; None before."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What exists once the fleet was started."""

    router: RouterClient
    processes: Supervisor
    updates: WeightUpdates


class InferenceController:
    """The inference side of a job."""

    def __init__(
        self,
        config: Config,
        *,
        host: EngineHost,
        events: EventLog,
        layout: ProcessLayout,
        model_path: Path,
        run_dir: Path,
    ) -> None:
        self._config = config
        self._host = host
        self._events = events
        self._layout = layout
        self._model_path = model_path
        self._logs = run_dir / "logs"
        self._ports = PortAllocator()
        self._scratch = Scratch(run_dir)
        self._memory = Memory(layout.device)
        self._references: dict[str, Checksums] = {}
        self._engines: tuple[ManagedEngine, ...] = ()
        self._session: aiohttp.ClientSession | None = None
        self._parts: _Parts | None = None

    # start and end

    async def start(self, task_group: TaskGroup) -> None:
        """Starts router and engines and returns while they boot; they are watched in `task_group` until `dispose`.

        Raises ConfigError for a port that is taken.
        """
        config, address = self._config, self._config.run.host
        self._logs.mkdir(parents=True, exist_ok=True)
        port = config.router.port
        router_port = self._ports.single() if port is None else self._ports.given(port, "router.port")
        self._scratch.create()
        session = self._session = new_session()
        router = RouterClient(f"http://{address}:{router_port}", session)
        self._engines = tuple(
            ManagedEngine(
                placement,
                self._ports.engine(),
                host_address=address,
                log_path=self._logs / f"{placement.engine_id}.log",
                session=session,
                events=self._events,
            )
            for placement in self._layout.engines
        )
        processes = Supervisor(
            config,
            self._layout,
            self._engines,
            router,
            host=self._host,
            events=self._events,
            model_path=self._model_path,
            router_log=self._logs / "router.log",
            scratch=self._scratch.path,
        )
        updates = WeightUpdates(
            self._engines,
            router,
            config.weights,
            quarantine=processes.quarantine,
            events=self._events,
            task_group=task_group,
        )
        self._parts = _Parts(router, processes, updates)
        processes.start(task_group, router_port, self._ports.single())

    async def wait_ready(self) -> None:
        """Returns when the router answers and every engine has generated; raises EngineError as soon as one cannot.

        Each start has its own deadline (`engine.start_timeout_s`, `router.start_timeout_s`).
        """
        await self._started.processes.wait_ready()

    async def dispose(self) -> None:
        """Ends router and engines and frees their ports. May be called at any time, and again."""
        with anyio.CancelScope(shield=True):
            if self._parts is not None:
                self._parts.updates.close()
                await self._parts.processes.stop()
            if self._session is not None:
                await self._session.close()
            self._ports.close()
            await anyio.to_thread.run_sync(self._scratch.remove)

    # what the loop asks

    async def prepare_rollout(self, rollout_id: int) -> None:
        """Raises EngineError unless the fleet can serve rollout `rollout_id`."""
        await self._require_serving(f"rollout {rollout_id}")

    async def prepare_eval(self) -> None:
        """Raises EngineError unless the fleet can serve an evaluation."""
        await self._require_serving("evaluation")

    def fleet(self) -> FleetView:
        """Addresses, states and versions as they are now."""
        return FleetView(
            router_url=self.router_url,
            published_version=self._started.updates.published,
            engines=tuple(engine.status for engine in self._engines),
        )

    @property
    def router_url(self) -> str:
        """Where requests go; known once `start` has returned."""
        return self._started.router.url

    def statistics(self) -> InferenceStatistics:
        processes, updates = self._started.processes, self._started.updates
        lease = updates.open_lease
        return InferenceStatistics(
            engines=dict(Counter(engine.state.value for engine in self._engines)),
            published_version=updates.published,
            open_lease=None if lease is None else lease.lease_id,
            updates_committed=updates.committed,
            updates_aborted=updates.aborted,
            paused_s=updates.paused_s,
            start_s=processes.start_s,
        )

    # weight updates

    async def begin_weight_update(self, version: str) -> UpdateLease:
        """Pauses the engines and opens them for weights `version` (`attempt.step`).

        Raises WeightUpdateError while another update is open or when no engine can take part; nothing is paused then.
        """
        self._started.processes.check()
        return await self._started.updates.begin(version)

    async def commit_weight_update(self, lease_id: str, acks: Sequence[UpdateAck]) -> None:
        """Makes the engines that acknowledged serve the lease's version; others of the lease are killed.

        Returns when they generate again, are known to the router, and (the first time) have answered through it.
        Raises WeightUpdateError when the weights did not arrive; the lease has ended then and nothing is paused.
        """
        await self._started.updates.commit(lease_id, acks)

    async def abort_weight_update(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool = False) -> None:
        """Gives the engines back; `failed` (engine id → reason) are killed. An ended lease is nothing to do.

        Engines leave the router until the next publication, unless `untouched` says that no tensor was sent.
        """
        await self._started.updates.abort(lease_id, failed, untouched=untouched)

    def open_engine(self, engine_id: str, url: str) -> AbstractAsyncContextManager[EngineClient]:
        """A client for one engine of a lease, for whoever carries the weights there."""
        return EngineClient.open(engine_id, url)

    async def check_weights(self, action: CheckAction, skip_list: Sequence[str] = ()) -> Mapping[str, Checksums]:
        """Runs the weight checker on all live engines; returns their checksums for `checksum`, else nothing.

        `compare` (with the last `snapshot`) raises EngineError naming the tensors that differ. Both work on checksums,
        since the engine's own comparison needs a GPU.
        """
        results: dict[str, Checksums] = {}
        read: CheckAction = "checksum" if action in ("snapshot", "compare") else action

        async def one(engine: ManagedEngine) -> None:
            results[engine.engine_id] = await engine.client.check_weights(read, skip_list)

        async with anyio.create_task_group() as task_group:
            for engine in self._engines:
                if engine.state in LIVE and engine.state is not EngineState.STARTING:
                    task_group.start_soon(one, engine)
        if action == "snapshot":
            self._references = results
        if action == "compare":
            self._compare(results)
        return results if action == "checksum" else {}

    # memory

    async def offload(self, tags: Sequence[str] | None = None) -> None:
        """Pauses colocated engines and releases memory of `tags` (all by default). Refused on CPU."""
        await self._memory.offload(self._engines, tags)

    async def onload(self, tags: Sequence[str] | None = None) -> None:
        """Takes memory of `tags` (all by default) back; an engine goes on once it has all of it."""
        await self._memory.onload(self._engines, tags)

    async def onload_weights(self) -> None:
        await self.onload(("weights",))

    async def offload_kv(self) -> None:
        await self.offload(("kv_cache", "cuda_graph"))

    async def onload_kv(self) -> None:
        await self.onload(("kv_cache", "cuda_graph"))

    # failures

    async def _require_serving(self, purpose: str) -> None:
        self._started.processes.check()
        if any(engine.state in ROUTABLE and engine.routed for engine in self._engines):
            return
        states = "; ".join(f"{e.engine_id} is {e.state}" + _because(e.failure) for e in self._engines)
        raise EngineError(f"no engine can serve {purpose}: {states or 'the fleet was not started'}")

    @property
    def _started(self) -> _Parts:
        if self._parts is None:
            raise EngineError("the fleet was not started; await start() first")
        return self._parts

    def _compare(self, results: Mapping[str, Checksums]) -> None:
        different = {
            engine_id: differing(self._references[engine_id], sums)
            for engine_id, sums in results.items()
            if engine_id in self._references
        }
        told = "; ".join(f"{engine_id}: {abbreviate(names)}" for engine_id, names in different.items() if names)
        if not different:
            raise EngineError("no snapshot to compare with; await check_weights('snapshot') first")
        if told:
            raise EngineError(f"weights differ from the snapshot in {told}")


def _because(failure: EngineError | None) -> str:
    return "" if failure is None else f" ({failure})"
