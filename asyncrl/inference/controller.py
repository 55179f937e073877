"""InferenceController: owns the engines and the router; no other part of the job touches them.

Invariants
- Only frozen data leaves it: addresses, versions, leases. Processes are started and ended through the host only.
- A process that ends or hangs is noticed, and started again a bounded number of times; an engine then catches up with
  the published weights before it serves. A fleet that cannot serve any more (an engine that fails at its first start,
  the last one given up) raises EngineError into the task group given to `start`, so that no task waits in vain.
- `dispose` leaves neither process nor port, whatever happened before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from asyncrl.config import Config
from asyncrl.config.layout import ProcessLayout
from asyncrl.data.fleet import EngineState, EvalFleetInfo, FleetView, UpdateAck, UpdateLease
from asyncrl.errors import EngineError
from asyncrl.host import Hosts
from asyncrl.inference.building import Builder
from asyncrl.inference.context import FleetContext
from asyncrl.inference.engines.group import end_groups
from asyncrl.inference.engines.health import HealthMonitoring
from asyncrl.inference.parts import FleetParts, trained_model, wire_fleet
from asyncrl.inference.sglang.engine_api import CheckAction, Checksums, EngineApi
from asyncrl.inference.updates.weights_check import WeightsCheck
from asyncrl.inference.views import InferenceStatistics, statistics_of, view_of
from asyncrl.observability.events import EventLog
from asyncrl.tasks import run_all


class InferenceController:
    """The inference side of a job."""

    def __init__(
        self,
        config: Config,
        *,
        hosts: Hosts,
        events: EventLog,
        layout: ProcessLayout,
        model_path: Path,
        run_dir: Path,
        overlaps: bool = False,
    ) -> None:
        """Nothing is started yet; engines will serve the model in directory `model_path`.

        `overlaps`: they generate while the trainer trains, so that both share the cores of a CPU.
        """
        self._config = config
        self._events = events
        self._layout = layout
        self._model_path = model_path
        self._builder = Builder(config, layout, hosts=hosts, run_dir=run_dir, events=events, overlaps=overlaps)
        self._monitoring = HealthMonitoring()
        self._weights_check = WeightsCheck()
        self._parts: FleetParts | None = None
        self._answered = False
        """Whether a generation ever came through the router."""

    @asynccontextmanager
    async def open_engine(self, engine_id: str, url: str) -> AsyncIterator[EngineApi]:
        """A client for one of its engines, with a session of its own and the key where the engine needs it."""
        key = next((e.key for group in self._started.groups for e in group.engines if e.endpoint.url == url), None)
        async with EngineApi.open(engine_id, url, key) as client:
            yield client

    # start and end

    async def start(self, task_group: TaskGroup) -> None:
        """Starts router and engines and returns while they boot; they are watched in `task_group` until `dispose`.

        Raises ConfigError for a port that is taken.
        """
        self._builder.open()
        context = FleetContext(
            config=self._config,
            layout=self._layout,
            builder=self._builder,
            events=self._events,
            monitoring=self._monitoring,
            task_group=task_group,
        )
        model = trained_model(self._config, self._model_path)
        self._parts = parts = await wire_fleet(context, model)
        await parts.start(context, model)

    async def wait_ready(self) -> None:
        """Returns when the router answers, every engine has generated, and the frozen models are served.

        Raises EngineError as soon as one of these cannot be. Each start has its own deadline
        (`engine.start_timeout_s`, `router.start_timeout_s`).
        """
        models = self._started.models
        answers = (partial(models.wait_answering, group) for group in models.groups.values())
        await run_all(self._started.actor.wait_ready, *answers)

    async def dispose(self) -> None:
        """Ends router and engines and frees their ports. May be called at any time, and again."""
        with anyio.CancelScope(shield=True):
            async with AsyncExitStack() as ends:  # each of them, whatever another raises
                ends.push_async_callback(self._builder.close)
                if self._parts is not None:
                    self._parts.updates.close()
                    self._parts.eval_fleet.close()
                    ends.push_async_callback(end_groups, self._parts.groups)

    # what the loop asks

    async def prepare_rollout(self, rollout_id: int) -> None:
        """Returns when some engine serves (the first time: has answered through the router).

        Waits for engines that are being started again; raises EngineError when none will serve.
        """
        await self._require_serving(f"rollout {rollout_id}")

    async def prepare_eval(self) -> None:
        """As `prepare_rollout`, for an evaluation."""
        await self._require_serving("evaluation")

    async def wait_publication_needed(self) -> None:
        """Returns once `FleetView.needs_publication`; has no deadline, so run it beside a wait that has one."""
        await self._started.actor.wait_until(lambda: self._started.needs_publication)

    def fleet(self) -> FleetView:
        """Addresses, states and versions as they are now."""
        return view_of(self._started)

    def model_url(self, name: str) -> str:
        """Url for requests to the model of section [models.NAME]; known once `start` has returned.

        Raises EngineError for a model that is not served.
        """
        return self._started.models.url(name)

    @property
    def router_url(self) -> str:
        """Url for requests to the trained model; known once `start` has returned."""
        return self._started.actor.routing.router.url

    def statistics(self) -> InferenceStatistics:
        """The counts so far."""
        return statistics_of(self._started, health_paused=self._monitoring.paused)

    # weight updates

    async def begin_weight_update(self, version: str) -> UpdateLease:
        """Pauses the engines and opens them for weights `version` (`attempt.step`).

        Waits until `engine.min_serving` engines can take part; others join when they are back. Raises
        WeightUpdateError while another update is open, when no engine can take part or where weights of one are
        offloaded, EnginesLostError when all engines start again only after the trainer has left its GPUs (`onload`);
        nothing is paused then.
        """
        if self._started.state.open_lease is None:
            await self.wait_updatable(f"weights {version}")
        return await self._started.updates.begin(version)

    async def commit_weight_update(
        self,
        lease_id: str,
        acks: Sequence[UpdateAck],
        directory: Path | None = None,
        *,
        copy_due: float | None = None,
    ) -> None:
        """Makes the engines that acknowledged serve the lease's version; others of the lease are killed.

        `directory` holds a copy of these weights (safetensors, Hugging Face names) until the next commit; engines that
        join later load it. With `copy_due` the copy is still being written: `copy_written` must follow by that time
        (anyio.current_time), and engines wait for it. Returns when the engines generate again and the router knows
        them; those that it refuses are started again. Raises WeightUpdateError when the weights did not arrive; the
        lease has ended then and nothing is paused.
        """
        await self._started.updates.commit(lease_id, acks, directory, copy_due=copy_due)

    def copy_written(self, directory: Path, complete: bool) -> None:
        """Tells that the copy which a commit promised is complete, or was given up; engines that wait for it go on."""
        self._started.state.copy_written(directory, complete)
        for engine in self._started.actor.engines:
            engine.changed()

    async def abort_weight_update(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool = False) -> None:
        """Gives the engines back; `failed` (engine id → reason) are killed. For an ended lease nothing is done.

        Engines leave the router until the next publication, unless `untouched` says that no tensor was sent.
        """
        await self._started.updates.abort(lease_id, failed, untouched=untouched)

    async def wait_updatable(self, purpose: str = "weights") -> None:
        """Returns when `engine.min_serving` engines can take weights; raises as `begin_weight_update` does."""
        await self._started.actor.wait_updatable(self._config.engine.min_serving, purpose)

    def copies_in_use(self) -> frozenset[Path]:
        """Directories of weights that must stay as they are: published, being loaded, or pinned for evaluation."""
        published = self._started.state.published
        directory = None if published is None else published.directory
        return self._started.copies.directories | (frozenset() if directory is None else {directory})

    async def recover_updatable_engines(self) -> None:
        """Returns when every engine that was not given up serves; raises EngineError when none is left."""
        await self._started.actor.wait_recovered()

    async def health_monitoring_pause(self) -> None:
        """No engine is probed until `health_monitoring_resume`; ends of processes are still noticed."""
        self._monitoring.paused = True

    async def health_monitoring_resume(self) -> None:
        """Engines are probed again."""
        self._monitoring.paused = False

    def quarantine_engine(self, engine_id: str, reason: str) -> None:
        """Takes an engine of the trained model that serves out of service; its process is killed and started again.

        An external engine leaves the router, and joins again. Returns at once; nothing is done to an engine that does
        not serve, or is not known.
        """
        for engine in self._started.actor.engines:
            if engine.engine_id == engine_id:
                self._started.actor.distrust(engine, reason)

    async def check_weights(self, action: CheckAction, skip_list: Sequence[str] = ()) -> Mapping[str, Checksums]:
        """Runs the weight checker on all live engines; returns engine id → checksums for `checksum`, else nothing.

        `skip_list` holds parts of names of tensors to leave out. `compare` (with the last `snapshot`) raises
        EngineError that names the tensors which differ. Both work on checksums, since the engine's own comparison needs
        a GPU.
        """
        return await self._weights_check.run(self._started.actor.engines, action, skip_list)

    # capacity

    async def start_cell(self, engine_id: str | None = None) -> str:
        """Starts an engine that was stopped or given up, or a new one (`engine-<n>`, next in order); returns its id.

        None chooses the first engine that can be started again, or a new one where there is none. The engine catches up
        with the published weights as any late joiner does; `recover_updatable_engines` waits for it. An external engine
        joins again. Raises EngineError when it runs already, and when no GPU is left for it.
        """
        return await self._started.capacity.start(engine_id)

    async def stop_cell(self, engine_id: str, *, force: bool = False) -> None:
        """Takes an engine out of service: no new request reaches it, it finishes those that it has, then it ends.

        Bounded by `engine.drain_timeout_s`; an engine that takes weights is stopped after that. Raises EngineError for
        the last engine that serves, unless `force`.
        """
        await self._started.capacity.stop(engine_id, force=force)

    # evaluation on engines of its own

    async def pin_eval_fleet(self, hf_dir: Path | None = None, version: str | None = None) -> EvalFleetInfo:
        """Brings every engine of `eval.fleet` to the weights in `hf_dir`, called `version`; None: to those published.

        Starts the engines first where they do not run, and waits for a copy that is still being written. Where
        `eval.function` evaluates there are no engines, and the checkpoint alone is kept until the next pin. Raises
        EngineError when that fails; the evaluation is skipped then, and the job goes on.
        """
        return await self._started.eval_fleet.pin(hf_dir, version)

    # memory

    async def offload(self, tags: Sequence[str] | None = None) -> None:
        """Pauses colocated engines and releases memory of `tags` (all by default): the trainer's turn. Refused on CPU.

        Waits for a publication and for engines that start or end. An engine that fails is killed, and starts again once
        all memory was taken back. Raises EngineError on CPU, for an unknown tag, and when a publication does not end
        (`weights.lease_timeout_s`); nothing was released then.
        """
        await self._started.memory.offload(tags)

    async def onload(self, tags: Sequence[str] | None = None) -> None:
        """Takes memory of `tags` (all by default) back; an engine goes on once it has all of it.

        Raises EngineError as `offload` does.
        """
        await self._started.memory.onload(tags)

    async def onload_weights(self) -> None:
        """Takes memory of the weights back; see `onload`."""
        await self.onload(("weights",))

    async def offload_kv(self) -> None:
        """Releases all memory but that of the weights; see `offload`."""
        await self.offload(("kv_cache", "cuda_graph"))

    async def onload_kv(self) -> None:
        """Takes all memory but that of the weights back; see `onload`."""
        await self.onload(("kv_cache", "cuda_graph"))

    async def _require_serving(self, purpose: str) -> None:
        actor, state = self._started.actor, self._started.state
        if state.published is None:
            raise EngineError(f"no engine can serve {purpose} before weights were published: {actor.states()}")
        await actor.wait_serving(purpose)
        # While all engines are being updated none would answer; the next call then makes the probe.
        if not self._answered and any(engine.state is EngineState.SERVING for engine in actor.engines):
            await actor.routing.probe(state.version)
            self._answered = True

    @property
    def _started(self) -> FleetParts:
        if self._parts is None:
            raise EngineError("the fleet was not started; await start() first")
        return self._parts
