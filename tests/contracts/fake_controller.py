"""A controller in memory, with the contract of the real one and nothing behind it.

A loop can be run against it in milliseconds. It keeps the real one's books (leases, life cycle), so that what is
refused there is refused here; engines are entries in a table.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import anyio
import anyio.abc

from asyncrl.data.fleet import (
    EngineEndpoint,
    EngineState,
    EngineStatus,
    EvalFleetInfo,
    FleetView,
    UpdateAck,
    UpdateLease,
)
from asyncrl.errors import EngineError, EnginesLostError, WeightUpdateError
from asyncrl.inference.engines.lifecycle import UPDATABLE, transition
from asyncrl.inference.gpus.memory import TAGS
from asyncrl.inference.sglang.engine_api import CheckAction, Checksums, RankChecksums
from asyncrl.inference.updates.leases import LeaseBook, sort_acks
from asyncrl.inference.updates.verify import differing
from asyncrl.inference.views import InferenceStatistics
from asyncrl.tasks import Changes


@dataclass(slots=True)
class _Engine:
    endpoint: EngineEndpoint
    state: EngineState = EngineState.PENDING_WEIGHTS
    version: str | None = None
    held: str = "as on disk"
    """Stands for its tensors."""
    offloaded: frozenset[str] = frozenset()

    def move(self, to: EngineState) -> None:
        self.state = transition(self.endpoint.engine_id, self.state, to)

    def renew(self) -> None:
        """A new process bears the id."""
        self.endpoint = replace(self.endpoint, generation=self.endpoint.generation + 1)
        self.version, self.held, self.offloaded = None, "as on disk", frozenset()
        self.move(EngineState.STARTING)
        self.move(EngineState.PENDING_WEIGHTS)

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(endpoint=self.endpoint, state=self.state, version=self.version)


class FakeController:
    """An InferenceController without processes."""

    router_url = "http://router"

    def __init__(self, engines: int = 2, *, colocated: bool = False, eval_fleet: bool = False) -> None:
        """`colocated`: on the trainer's GPUs; else there is no GPU at all."""
        self.published: str | None = None
        self._colocated = colocated
        self._eval_fleet = eval_fleet
        self._engines = {
            f"engine-{i}": _Engine(
                EngineEndpoint(f"engine-{i}", 0, f"http://engine-{i}", 1, trainer_ranks=(0,) if colocated else ())
            )
            for i in range(engines)
        }
        self._directory: Path | None = None
        self._copy_due: float | None = None
        self._pinned: Path | None = None
        self._away: frozenset[str] = frozenset()
        self._snapshot: dict[str, Checksums] = {}
        self._random = (f"random numbers {i}" for i in itertools.count())
        self._committed = self._aborted = self._restarts = 0
        self._changes = Changes()
        self._book = LeaseBook()
        self._disposed = False
        self._health_paused = False

    def open_engine(self, engine_id: str, url: str) -> NoReturn:
        """There is nothing at the URLs."""
        raise LookupError(f"{engine_id} is a fake")

    async def start(self, task_group: anyio.abc.TaskGroup) -> None:
        """Nothing to start."""

    def lose(self, engine_id: str) -> None:
        """The engine ends and is started again as soon as the trainer does not hold its GPU: a new generation.

        It loads the copy that was kept, or has no weights.
        """
        self._engines[engine_id].move(EngineState.DEAD)
        self._revive()

    def _revive(self) -> None:
        for engine in self._engines.values():
            if engine.state is EngineState.DEAD and not self._away:
                engine.renew()
                self._restarts += 1
            if engine.state is EngineState.PENDING_WEIGHTS and self._directory is not None and self._copy_due is None:
                engine.move(EngineState.UPDATING)
                self._serve(engine)
        self._changes.notify()

    def _serve(self, engine: _Engine) -> None:
        assert self.published is not None
        engine.version = engine.held = self.published
        engine.move(EngineState.OFFLOADED if engine.offloaded else EngineState.SERVING)

    async def wait_ready(self) -> None:
        self._check()

    async def prepare_rollout(self, rollout_id: int) -> None:
        self._require_serving(f"rollout {rollout_id}")

    async def prepare_eval(self) -> None:
        self._require_serving("evaluation")

    async def wait_publication_needed(self) -> None:
        while not self._needs_publication:
            await self._changes.wait()

    def fleet(self) -> FleetView:
        engines = tuple(engine.status for engine in self._engines.values())
        return FleetView(self.router_url, self.published, engines, needs_publication=self._needs_publication)

    @property
    def _needs_publication(self) -> bool:
        if self.published is None or self._directory is not None:
            return False
        states = {engine.state for engine in self._engines.values()}
        serves = any(engine.version is not None for engine in self._engines.values())
        return not serves and EngineState.PENDING_WEIGHTS in states

    def model_url(self, name: str) -> str:
        raise EngineError(f"no model is served as {name!r}; there are: none")

    def statistics(self) -> InferenceStatistics:
        return InferenceStatistics(
            engines=dict(Counter(engine.state.value for engine in self._engines.values())),
            beside={},
            published_version=self.published,
            open_lease=None if self._book.open is None else self._book.open.lease_id,
            updates_committed=self._committed,
            updates_aborted=self._aborted,
            restarts=self._restarts,
            paused_s=0.0,
            start_s=0.0,
            health_paused=self._health_paused,
        )

    async def wait_updatable(self, purpose: str = "weights") -> None:
        self._check()
        if self._away and all(engine.state is EngineState.DEAD for engine in self._engines.values()):
            raise EnginesLostError(f"{purpose}: no engine is left in the trainer's turn on its GPUs")

    async def begin_weight_update(self, version: str) -> UpdateLease:
        self._check()
        await self.wait_updatable(f"weights {version}")
        lease_id = self._book.next_id(version)
        if any("weights" in engine.offloaded for engine in self._engines.values()):
            raise WeightUpdateError(f"weights {version}: some are offloaded; await onload_weights() first")
        engines = [engine for engine in self._engines.values() if engine.state in UPDATABLE]
        if not engines:
            raise WeightUpdateError(f"weights {version} have no engine to go to")
        for engine in engines:
            engine.move(EngineState.UPDATING)
        now = anyio.current_time()
        endpoints = [engine.endpoint for engine in engines]
        return self._book.grant(lease_id, version, endpoints, paused_at=now, now=now, duration_s=60.0, settle_s=60.0)

    async def commit_weight_update(
        self,
        lease_id: str,
        acks: Sequence[UpdateAck],
        directory: Path | None = None,
        *,
        copy_due: float | None = None,
    ) -> None:
        lease = self._book.claim(lease_id)
        generations = {engine_id: engine.endpoint.generation for engine_id, engine in self._engines.items()}
        holders, missing = sort_acks(lease, acks, generations)
        if not holders:
            await self.abort_weight_update(lease_id, {})
            raise EnginesLostError(f"weights {lease.version}: no engine holds them")
        self._book.end(lease_id, f"was committed as {lease.version}")
        self.published, self._directory, self._copy_due = lease.version, directory, copy_due
        self._committed += 1
        for engine_id in missing:
            if self._engines[engine_id].state is EngineState.UPDATING:
                self.lose(engine_id)
        for engine_id in holders:
            self._serve(self._engines[engine_id])

    def copy_written(self, directory: Path, complete: bool) -> None:
        if directory == self._directory and self._copy_due is not None:
            self._directory, self._copy_due = directory if complete else None, None
            self._revive()

    async def abort_weight_update(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool = False) -> None:
        if self._book.has_ended(lease_id):
            return
        lease = self._book.claim(lease_id)
        self._book.end(lease_id, "was given up (the publisher aborted)")
        self._aborted += 1
        for endpoint in lease.engines:
            engine = self._engines[endpoint.engine_id]
            if engine.endpoint != endpoint or engine.state is not EngineState.UPDATING:
                continue
            if endpoint.engine_id in failed:
                self.lose(endpoint.engine_id)
            elif untouched and engine.version is not None:
                engine.move(EngineState.OFFLOADED if engine.offloaded else EngineState.SERVING)
            else:
                engine.version = None
                engine.move(EngineState.OFFLOADED if engine.offloaded else EngineState.PENDING_WEIGHTS)
        self._revive()

    def copies_in_use(self) -> frozenset[Path]:
        return frozenset(path for path in (self._directory, self._pinned) if path is not None)

    async def recover_updatable_engines(self) -> None:
        """Engines that were lost are back at once, where there is a copy."""
        self._check()

    async def check_weights(self, action: CheckAction, skip_list: Sequence[str] = ()) -> Mapping[str, Checksums]:
        self._check()
        if action == "reset_tensors":
            for engine in self._engines.values():
                engine.held = next(self._random)
        sums: dict[str, Checksums] = {
            engine_id: (RankChecksums({"layer": engine.held}, engine.held),)
            for engine_id, engine in self._engines.items()
            if engine.state is not EngineState.STOPPED and "weights" not in engine.offloaded
        }
        if action == "snapshot":
            self._snapshot = sums
        if action == "compare":
            if not self._snapshot:
                raise EngineError("no snapshot to compare with")
            if any(differing(self._snapshot[engine_id], now) for engine_id, now in sums.items()):
                raise EngineError("weights differ from the snapshot in layer")
        return sums if action == "checksum" else {}

    def quarantine_engine(self, engine_id: str, reason: str) -> None:
        engine = self._engines.get(engine_id)
        if engine is not None and engine.state is EngineState.SERVING:
            self.lose(engine_id)

    async def pin_eval_fleet(self, hf_dir: Path | None = None, version: str | None = None) -> EvalFleetInfo:
        while hf_dir is None and self._copy_due is not None:
            await self._changes.wait()
        directory, version = hf_dir or self._directory, version or self.published
        if directory is None or version is None:
            raise EngineError("there is no copy of published weights to evaluate")
        if not self._eval_fleet:
            raise EngineError("there are no engines for evaluation only; add a section [eval.fleet]")
        self._pinned = directory
        return EvalFleetInfo("http://router-eval", version, ("http://eval-0",))

    async def offload(self, tags: Sequence[str] | None = None) -> None:
        self._away |= self._checked(tags)
        for engine in self._engines.values():
            if engine.state in (EngineState.SERVING, EngineState.PENDING_WEIGHTS):
                engine.move(EngineState.OFFLOADED)
            if engine.state is EngineState.OFFLOADED:
                engine.offloaded |= self._checked(tags)
                if "weights" in engine.offloaded:
                    engine.version, engine.held = None, next(self._random)

    async def onload(self, tags: Sequence[str] | None = None) -> None:
        self._away -= self._checked(tags)
        for engine in self._engines.values():
            engine.offloaded -= self._checked(tags)
            if engine.state is EngineState.OFFLOADED and not engine.offloaded:
                engine.move(EngineState.PENDING_WEIGHTS if engine.version is None else EngineState.SERVING)
        self._revive()

    async def onload_weights(self) -> None:
        await self.onload(("weights",))

    async def offload_kv(self) -> None:
        await self.offload(("kv_cache", "cuda_graph"))

    async def onload_kv(self) -> None:
        await self.onload(("kv_cache", "cuda_graph"))

    def _checked(self, tags: Sequence[str] | None) -> frozenset[str]:
        if not self._colocated:
            raise EngineError("engines on CPU cannot release memory")
        if not set(tags or ()) <= set(TAGS):
            raise EngineError(f"unknown memory tags; there are {', '.join(TAGS)}")
        return frozenset(TAGS if tags is None else tags)

    async def health_monitoring_pause(self) -> None:
        self._health_paused = True

    async def health_monitoring_resume(self) -> None:
        self._health_paused = False

    async def start_cell(self, engine_id: str | None = None) -> str:
        if engine_id is None:
            stopped = (name for name, engine in self._engines.items() if engine.state is EngineState.STOPPED)
            engine_id = next(stopped, f"engine-{len(self._engines)}")
        engine = self._engines.get(engine_id)
        if engine is None:
            if engine_id != f"engine-{len(self._engines)}":
                raise EngineError(f"there is no engine {engine_id}")
            self._engines[engine_id] = _Engine(EngineEndpoint(engine_id, 0, f"http://{engine_id}", 1))
        elif engine.state is not EngineState.STOPPED:
            raise EngineError(f"{engine_id} cannot be started: it is {engine.state}")
        else:
            engine.renew()
        return engine_id

    async def stop_cell(self, engine_id: str, *, force: bool = False) -> None:
        if engine_id not in self._engines:
            raise EngineError(f"there is no engine {engine_id}")
        others = (engine for name, engine in self._engines.items() if name != engine_id)
        if not force and not any(engine.state is EngineState.SERVING for engine in others):
            raise EngineError(f"{engine_id} was not stopped: it is the last engine that serves")
        engine = self._engines[engine_id]
        if engine.state is EngineState.SERVING:
            engine.move(EngineState.DRAINING)
        engine.move(EngineState.STOPPED)

    async def dispose(self) -> None:
        self._disposed = True
        for engine in self._engines.values():
            if engine.state is not EngineState.STOPPED:
                engine.move(EngineState.STOPPED)

    def _require_serving(self, purpose: str) -> None:
        self._check()
        if not any(engine.state in (EngineState.SERVING, EngineState.UPDATING) for engine in self._engines.values()):
            raise EngineError(f"no engine can serve {purpose}")

    def _check(self) -> None:
        if self._disposed:
            raise EngineError("the fleet has been disposed of")
