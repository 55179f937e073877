"""InferenceController: owns the engines and the router, and nobody else touches them.

Invariants
- What leaves it is frozen data: addresses, versions, leases. Processes are started and ended through the host only.
- A process that ends or hangs is noticed, and started again a bounded number of times; an engine then catches up with
  the published weights before it serves. A fleet that cannot serve any more (an engine that fails at its first start,
  the last one given up) raises EngineError into the task group given to `start`, so that nothing waits in vain.
- `dispose` leaves neither process nor port, whatever happened before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from asyncrl.config import Config
from asyncrl.config.layout import ProcessLayout
from asyncrl.data.fleet import ACTOR, EngineState, EvalFleetInfo, FleetView, UpdateAck, UpdateLease
from asyncrl.errors import EngineError
from asyncrl.inference.actor import ActorParts, build_actor
from asyncrl.inference.building import Builder, ServedModel
from asyncrl.inference.engines.group import EngineGroup, end_groups
from asyncrl.inference.eval_fleet import EvalFleet
from asyncrl.inference.models import FrozenModels
from asyncrl.inference.routing.routing import Routing
from asyncrl.inference.sglang.engine_api import CheckAction
from asyncrl.inference.statistics import InferenceStatistics
from asyncrl.inference.updates.catch_up import needs_publication
from asyncrl.inference.updates.copies_in_use import CopiesInUse
from asyncrl.inference.updates.deadlines import Deadlines
from asyncrl.inference.updates.verify import Checksums
from asyncrl.inference.updates.weights_check import WeightsCheck
from asyncrl.observability.events import EventLog
from asyncrl.tasks import run_all

if TYPE_CHECKING:
    from asyncrl.host import EngineHost

ROUTER = "router"


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
        self._builder = Builder(config, layout, run_dir=run_dir, events=events)
        self._copies = CopiesInUse()
        self._weights_check = WeightsCheck()
        self._models = FrozenModels(config, layout, self._builder, host=host, events=events)
        self._eval_fleet = EvalFleet(config, layout, self._builder, host=host, copies=self._copies, events=events)
        self._parts: ActorParts | None = None
        self._answered = False
        """Whether a generation ever came through the router."""

    # start and end

    async def start(self, task_group: TaskGroup) -> None:
        """Starts router and engines and returns while they boot; they are watched in `task_group` until `dispose`.

        Raises ConfigError for a port that is taken.
        """
        self._builder.open()
        model = ServedModel(ACTOR, self._model_path, self._config.engine, self._config.model.context_length)
        routing, spec = self._builder.router(ROUTER, self._config.router.port)
        ranks = self._config.engine.tensor_parallel
        self._parts = parts = build_actor(
            self._config,
            self._layout,
            self._builder,
            host=self._host,
            routing=Routing(routing),
            router_spec=spec,
            model=model,
            deadlines=await anyio.to_thread.run_sync(Deadlines.of_model, self._model_path, ranks),
            copies=self._copies,
            events=self._events,
            task_group=task_group,
        )
        parts.actor.start_router()
        for placement in self._layout.engines:
            parts.actor.start_engine(*self._builder.engine(placement, model))
        for external in self._layout.external:
            parts.actor.start_engine(self._builder.external(external), None)
        self._models.start(task_group, model)

    async def wait_ready(self) -> None:
        """Returns when the router answers and every engine has generated, and models beside are served.

        Raises EngineError as soon as one cannot. Each start has its own deadline (`engine.start_timeout_s`,
        `router.start_timeout_s`).
        """
        models = self._models
        answers = (partial(models.wait_answering, group) for group in models.groups.values())
        await run_all(self._started.actor.wait_ready, *answers)

    async def dispose(self) -> None:
        """Ends router and engines and frees their ports. May be called at any time, and again."""
        with anyio.CancelScope(shield=True):
            async with AsyncExitStack() as ends:  # each of them, whatever another raises
                ends.push_async_callback(self._builder.close)
                if self._parts is not None:
                    self._parts.updates.close()
                    self._eval_fleet.close()
                    ends.push_async_callback(end_groups, self._groups)

    # what the loop asks

    async def prepare_rollout(self, rollout_id: int) -> None:
        """Returns when some engine serves (the first time: has answered through the router).

        Waits for engines that are being started again; raises EngineError where none will serve.
        """
        await self._require_serving(f"rollout {rollout_id}")

    async def prepare_eval(self) -> None:
        """As `prepare_rollout`, for an evaluation."""
        await self._require_serving("evaluation")

    async def wait_publication_needed(self) -> None:
        """Returns once `FleetView.needs_publication`: for whoever can publish, beside a wait that has a deadline."""
        await self._started.actor.wait_until(lambda: self._needs_publication)

    def fleet(self) -> FleetView:
        """Addresses, states and versions as they are now."""
        return FleetView(
            router_url=self.router_url,
            published_version=self._published_version,
            engines=tuple(engine.status for group in self._groups for engine in group.engines),
            model_urls={name: group.routing.router.url for name, group in self._models.groups.items()},
            metrics_urls={group.name: group.routing.router.metrics_url for group in self._groups},
            needs_publication=self._needs_publication,
        )

    def model_url(self, name: str) -> str:
        """Where requests for the model of section [models.NAME] go; known once `start` has returned."""
        return self._models.url(name)

    @property
    def router_url(self) -> str:
        """Where requests go; known once `start` has returned."""
        return self._started.actor.routing.router.url

    def statistics(self) -> InferenceStatistics:
        """What it counted until now."""
        actor, updates = self._started.actor, self._started.updates
        lease = updates.open_lease
        return InferenceStatistics(
            engines=dict(Counter(engine.state.value for engine in actor.engines)),
            beside={
                group.name: dict(Counter(engine.state.value for engine in group.engines)) for group in self._groups[1:]
            },
            published_version=self._published_version,
            open_lease=None if lease is None else lease.lease_id,
            updates_committed=updates.committed,
            updates_aborted=updates.aborted,
            restarts=sum(group.restarts for group in self._groups),
            paused_s=updates.paused_s,
            start_s=actor.start_s,
        )

    # weight updates

    async def begin_weight_update(self, version: str) -> UpdateLease:
        """Pauses the engines and opens them for weights `version` (`attempt.step`).

        Waits until `engine.min_serving` engines can take part; others join when they are back. Raises
        WeightUpdateError while another update is open, when no engine can take part or where weights of one are
        offloaded, EnginesLostError where they are started again only after the trainer has left its GPUs (`onload`);
        nothing is paused then.
        """
        if self._started.updates.open_lease is None:
            await self.wait_updatable(f"weights {version}")
        return await self._started.updates.begin(version)

    async def commit_weight_update(
        self, lease_id: str, acks: Sequence[UpdateAck], directory: Path | None = None
    ) -> None:
        """Makes the engines that acknowledged serve the lease's version; others of the lease are killed.

        `directory` holds a copy of these weights (safetensors, Hugging Face names) until the next commit; engines that
        join later load it. Returns when they generate again and the router knows them; those that it refuses are
        started again. Raises WeightUpdateError when the weights did not arrive; the lease has ended then and nothing
        is paused.
        """
        await self._started.updates.commit(lease_id, acks, directory)

    async def abort_weight_update(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool = False) -> None:
        """Gives the engines back; `failed` (engine id → reason) are killed. An ended lease is nothing to do.

        Engines leave the router until the next publication, unless `untouched` says that no tensor was sent.
        """
        await self._started.updates.abort(lease_id, failed, untouched=untouched)

    async def wait_updatable(self, purpose: str = "weights") -> None:
        """Returns when `engine.min_serving` engines can take weights; raises as `begin_weight_update` does."""
        await self._started.actor.wait_updatable(self._config.engine.min_serving, purpose)

    def copies_in_use(self) -> frozenset[Path]:
        """Directories of weights that are to stay as they are: published, being loaded, or pinned for evaluation."""
        published = self._started.updates.published
        directory = None if published is None else published.directory
        return self._copies.directories | (frozenset() if directory is None else {directory})

    async def recover_updatable_engines(self) -> None:
        """Returns when every engine that was not given up serves; raises EngineError where none is left."""
        await self._started.actor.wait_recovered()

    def health_monitoring_pause(self) -> None:
        """No engine is probed until `health_monitoring_resume`; ends of processes are still noticed."""
        self._pause_health(True)

    def health_monitoring_resume(self) -> None:
        """Engines are probed again."""
        self._pause_health(False)

    async def check_weights(self, action: CheckAction, skip_list: Sequence[str] = ()) -> Mapping[str, Checksums]:
        """Runs the weight checker on all live engines; returns their checksums for `checksum`, else nothing.

        `compare` (with the last `snapshot`) raises EngineError naming the tensors that differ. Both work on checksums,
        since the engine's own comparison needs a GPU.
        """
        return await self._weights_check.run(self._started.actor.engines, action, skip_list)

    # capacity

    def start_cell(self, engine_id: str) -> None:
        """Starts an engine that was stopped or given up, or a new one (`engine-<n>`, next in order).

        It catches up with the published weights as any late joiner does; `recover_updatable_engines` waits for it.
        An external engine joins again.
        Raises EngineError where it runs already, or where no GPU is left for it.
        """
        self._started.capacity.start(engine_id)

    async def stop_cell(self, engine_id: str, *, force: bool = False) -> None:
        """Takes an engine out of service: no new request reaches it, those that it has finish, then it ends.

        Bounded by `engine.drain_timeout_s`, and where it is taking weights by the end of that. Raises EngineError for
        the last engine that serves, unless `force`.
        """
        await self._started.capacity.stop(engine_id, force=force)

    # evaluation on engines of its own

    async def start_eval_fleet(self) -> None:
        """Starts the engines of `eval.fleet`, which else `pin_eval_fleet` does, and returns when they have generated.

        Raises EngineError where there are none, or they cannot start.
        """
        await self._eval_fleet.start(self._started.task_group, self._started.model)

    async def pin_eval_fleet(self, hf_dir: Path | None = None, version: str | None = None) -> EvalFleetInfo:
        """Brings every engine of `eval.fleet` to the weights in `hf_dir`, called `version`; None: to those published.

        Raises EngineError where that cannot be; an evaluation is skipped then, and the job goes on.
        """
        published = self._started.updates.published
        directory = hf_dir if hf_dir is not None or published is None else published.directory
        version = version or self._published_version
        if directory is None or version is None:
            raise EngineError(
                "there is no copy of published weights to evaluate; set weights.keep_published to always, or give a "
                "checkpoint and its version"
            )
        return await self._eval_fleet.pin(self._started.task_group, self._started.model, directory, version)

    # memory

    async def offload(self, tags: Sequence[str] | None = None) -> None:
        """Pauses colocated engines and releases memory of `tags` (all by default): the trainer's turn. Refused on CPU.

        Waits for a publication and for engines that start or end; one that fails is killed, and down until all was
        taken back. Raises EngineError on CPU, for an unknown tag, and where a publication does not end
        (`weights.lease_timeout_s`); nothing was released then.
        """
        await self._started.memory.offload(tags)

    async def onload(self, tags: Sequence[str] | None = None) -> None:
        """Takes memory of `tags` (all by default) back; an engine goes on once it has all of it.

        Raises EngineError as `offload` does.
        """
        await self._started.memory.onload(tags)

    async def onload_weights(self) -> None:
        await self.onload(("weights",))

    async def offload_kv(self) -> None:
        await self.offload(("kv_cache", "cuda_graph"))

    async def onload_kv(self) -> None:
        await self.onload(("kv_cache", "cuda_graph"))

    # failures

    async def _require_serving(self, purpose: str) -> None:
        if self._started.updates.published is None:
            raise EngineError(
                f"no engine can serve {purpose} before weights were published: {self._started.actor.states()}"
            )
        actor = self._started.actor
        await actor.wait_serving(purpose)
        # Engines that are all being updated answer nobody before that has ended; whoever asks next finds out.
        if not self._answered and any(engine.state is EngineState.SERVING for engine in actor.engines):
            await actor.routing.probe(self._published_version)
            self._answered = True

    def _pause_health(self, paused: bool) -> None:
        self._eval_fleet.health_paused = paused
        for group in self._groups:
            group.pause_health(paused)

    @property
    def _groups(self) -> list[EngineGroup]:
        """All models that are served, the trained one first."""
        on_demand = self._eval_fleet.group
        return [self._started.actor, *self._models.groups.values(), *([] if on_demand is None else [on_demand])]

    @property
    def _needs_publication(self) -> bool:
        return needs_publication(self._started.actor.engines, self._started.updates.published)

    @property
    def _published_version(self) -> str | None:
        published = self._started.updates.published
        return None if published is None else published.version

    @property
    def _started(self) -> ActorParts:
        if self._parts is None:
            raise EngineError("the fleet was not started; await start() first")
        return self._parts
