"""A controller and an executor in memory, with the contract of the real ones and nothing behind it.

A loop can be run against them in milliseconds. They keep the real ones' books (leases, ledger, life cycle), so that
what is refused there is refused here; engines are entries in a table, samples are made up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import numpy as np

from asyncrl.data.batch import RolloutBatch
from asyncrl.data.fleet import EngineEndpoint, EngineState, EngineStatus, FleetView, UpdateAck, UpdateLease
from asyncrl.data.sample import Prompt, Sample, SampleGroup, VersionSpan
from asyncrl.errors import EngineError, EnginesLostError, RolloutError, WeightUpdateError
from asyncrl.inference.leases import LeaseBook, sort_acks
from asyncrl.inference.lifecycle import UPDATABLE, transition
from asyncrl.rollout.evaluation import EvalReport, skipped_report
from asyncrl.rollout.ledger import Ledger


@dataclass(slots=True)
class _Engine:
    endpoint: EngineEndpoint
    state: EngineState = EngineState.PENDING_WEIGHTS
    version: str | None = None

    def move(self, to: EngineState) -> None:
        self.state = transition(self.endpoint.engine_id, self.state, to)

    def renew(self) -> None:
        """A new process bears the id."""
        self.endpoint = replace(self.endpoint, generation=self.endpoint.generation + 1)
        self.version = None
        self.move(EngineState.STARTING)
        self.move(EngineState.PENDING_WEIGHTS)

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(endpoint=self.endpoint, state=self.state, version=self.version)


class FakeController:
    """An InferenceController without processes."""

    router_url = "http://router"

    def __init__(self, engines: int = 2) -> None:
        self.published: str | None = None
        self._engines = {
            f"engine-{i}": _Engine(EngineEndpoint(f"engine-{i}", 0, f"http://engine-{i}", 1)) for i in range(engines)
        }
        self._book = LeaseBook()
        self._disposed = False

    def lose(self, engine_id: str) -> None:
        """The engine ends and is started again: a new generation without weights."""
        self._engines[engine_id].move(EngineState.DEAD)
        self._engines[engine_id].renew()

    async def wait_ready(self) -> None:
        self._check()

    async def prepare_rollout(self, rollout_id: int) -> None:
        self._require_serving(f"rollout {rollout_id}")

    async def prepare_eval(self) -> None:
        self._require_serving("evaluation")

    def fleet(self) -> FleetView:
        return FleetView(self.router_url, self.published, tuple(engine.status for engine in self._engines.values()))

    async def begin_weight_update(self, version: str) -> UpdateLease:
        self._check()
        lease_id = self._book.next_id(version)
        engines = [engine for engine in self._engines.values() if engine.state in UPDATABLE]
        if not engines:
            raise WeightUpdateError(f"weights {version} have no engine to go to")
        for engine in engines:
            engine.move(EngineState.UPDATING)
        now = anyio.current_time()
        endpoints = [engine.endpoint for engine in engines]
        return self._book.grant(lease_id, version, endpoints, paused_at=now, now=now, duration_s=60.0)

    async def commit_weight_update(
        self, lease_id: str, acks: Sequence[UpdateAck], directory: Path | None = None
    ) -> None:
        lease = self._book.claim(lease_id)
        generations = {engine_id: engine.endpoint.generation for engine_id, engine in self._engines.items()}
        holders, missing = sort_acks(lease, acks, generations)
        if not holders:
            await self.abort_weight_update(lease_id, {})
            raise EnginesLostError(f"weights {lease.version}: no engine holds them")
        self._book.end(lease_id, f"was committed as {lease.version}")
        self.published = lease.version
        for engine_id in missing:
            if self._engines[engine_id].state is EngineState.UPDATING:
                self.lose(engine_id)
        for engine_id in holders:
            self._engines[engine_id].version = lease.version
            self._engines[engine_id].move(EngineState.SERVING)

    async def abort_weight_update(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool = False) -> None:
        if self._book.has_ended(lease_id):
            return
        lease = self._book.claim(lease_id)
        self._book.end(lease_id, "was given up (the publisher aborted)")
        for endpoint in lease.engines:
            engine = self._engines[endpoint.engine_id]
            if engine.endpoint != endpoint or engine.state is not EngineState.UPDATING:
                continue
            if endpoint.engine_id in failed:
                self.lose(endpoint.engine_id)
            elif untouched and engine.version is not None:
                engine.move(EngineState.SERVING)
            else:
                engine.version = None
                engine.move(EngineState.PENDING_WEIGHTS)

    async def recover_updatable_engines(self) -> None:
        """Engines that were lost wait for the next publication: a fake keeps no copy of its weights."""
        self._check()

    def health_monitoring_pause(self) -> None: ...

    def health_monitoring_resume(self) -> None: ...

    def start_cell(self, engine_id: str) -> None:
        engine = self._engines.get(engine_id)
        if engine is None:
            if engine_id != f"engine-{len(self._engines)}":
                raise EngineError(f"there is no engine {engine_id}")
            self._engines[engine_id] = _Engine(EngineEndpoint(engine_id, 0, f"http://{engine_id}", 1))
        elif engine.state is not EngineState.STOPPED:
            raise EngineError(f"{engine_id} cannot be started: it is {engine.state}")
        else:
            engine.renew()

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


class FakeExecutor:
    """A RolloutExecutor that makes its samples up; rewards alternate within each group."""

    def __init__(self, *, prompts_per_step: int = 2, samples_per_prompt: int = 4, tokens: int = 3) -> None:
        self.version = ""
        self._prompts_per_step = prompts_per_step
        self._samples_per_prompt = samples_per_prompt
        self._tokens = tokens
        self._ledger = Ledger()
        self._groups = 0
        self._disposed = False

    async def get(self, rollout_id: int) -> RolloutBatch:
        if self._disposed:
            raise RolloutError(f"rollout {rollout_id} is being gathered already, or the executor was disposed")
        self._ledger.check_deliverable(rollout_id)
        groups = [self._sample() for _ in range(self._prompts_per_step)]
        self._ledger.deliver(rollout_id, [group.group_id for group in groups])
        return RolloutBatch.from_groups(rollout_id, groups, temperature=1.0)

    async def commit(self, rollout_id: int) -> None:
        self._ledger.commit(rollout_id)

    async def save(self) -> dict[str, bytes]:
        self._ledger.check_all_committed()
        return {"fake.json": str(self._groups).encode()}

    async def restore(self, files: Mapping[str, bytes], step: int) -> None:
        self._groups = int(files["fake.json"])

    async def eval(self, rollout_id: int) -> EvalReport:
        return self.report_eval_skip(rollout_id, "a fake has nothing to evaluate")

    def report_eval_skip(self, rollout_id: int, reason: str) -> EvalReport:
        return skipped_report(rollout_id, reason)

    def generate_ahead(self, first: int, num_rollouts: int) -> None:
        """What it makes up is there at once."""

    def updating(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def engines_paused(self) -> None:
        """There are no deadlines here."""

    def engines_resumed(self) -> None: ...

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def counts(self) -> Counter[str]:
        """Groups by the state in which they ended or stand."""
        return Counter({state.value: number for state, number in self._ledger.counts().items()})

    async def dispose(self) -> None:
        if not self._disposed:
            self._disposed = True
            self._ledger.drop_delivered("the job ended before they were trained")

    def _sample(self) -> SampleGroup:
        group_id = f"{self._groups:08d}"
        self._groups += 1
        prompt_ids = np.arange(1, 4, dtype=np.int32)
        prompt = Prompt(prompt_id=group_id, text="", token_ids=prompt_ids)
        self._ledger.admit(group_id, group_id, 0)
        self._ledger.run(group_id)
        samples = tuple(
            Sample(
                sample_id=f"{group_id}.{index:03d}",
                group_id=group_id,
                prompt_ids=prompt_ids,
                output_ids=np.full(self._tokens, 5, np.int32),
                logprobs=np.full(self._tokens, -1.0, np.float32),
                finish_reason="length",
                versions=(VersionSpan(self.version, 0, self._tokens),),
                text="",
                reward=float(index % 2),
            )
            for index in range(self._samples_per_prompt)
        )
        self._ledger.finish(group_id, len(samples), 0)
        return SampleGroup(group_id, prompt, samples)
