"""One served model: its engines, their router, and the keepers of both.

Invariants
- What makes the group unable to serve is a failure (`supervision.py`): an engine that fails at its first start, a
  router that is given up, the last engine given up. Every task that waits for the group gets that error.
- An engine that is given up, or asked to stop, leaves the others alone.
- `stop` ends every process, whatever happened before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
import structlog

from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError, EnginesLostError
from asyncrl.host import HostedProcess
from asyncrl.inference.context import FleetContext
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.engine_keeper import EngineKeeper
from asyncrl.inference.engines.keeper import CatchUpEngine, Keeper, KeeperContext
from asyncrl.inference.engines.supervision import Supervision
from asyncrl.inference.external.keeper import ExternalKeeper
from asyncrl.inference.fleet_events import FleetReady
from asyncrl.inference.gpus.shared_gpus import SharedGpus
from asyncrl.inference.routing.router_keeper import RouterKeeper
from asyncrl.inference.routing.routing import Routing
from asyncrl.inference.updates.deadlines import Deadlines
from asyncrl.observability.waits import waiting
from asyncrl.tasks import Changes, finish_all

DISPOSE_TIMEOUT_S = 30.0
"""For all processes at once: what the host gives to one that does not want to end, and a little."""

_log = structlog.get_logger(__name__)


class EngineGroup:
    """The engines that serve one model, behind one router."""

    def __init__(
        self,
        context: FleetContext,
        name: str,
        routing: Routing,
        router_process: HostedProcess,
        catch_up: CatchUpEngine,
        *,
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
        gpus: SharedGpus | None = None,
        essential: bool = True,
    ) -> None:
        """Nothing is started yet.

        Args:
            name: of the model, in messages and events.
            router_process: the router's process; `routing` speaks to it.
            catch_up: brings an engine that generates to the weights of the group, for as long as the engine lives.
            deadlines: of the steps that an engine of the group may be asked for.
            gpus: those that its engines share with the trainer; None where they share none.
            essential: whether a failure ends the job. That of another group reaches only the tasks that wait for it.
        """
        self.name = name
        self.engines: list[ManagedEngine] = []
        """All that were ever started, in the order of their start."""
        self.start_s: float | None = None
        """From `start` to the last engine's first generation; None before."""
        self.routing = routing
        self.deadlines = deadlines
        self._config = context.config
        self._events = context.events
        self._gpus = gpus or SharedGpus()
        self._keeping = KeeperContext(
            config=context.config,
            events=context.events,
            monitoring=context.monitoring,
            routing=routing,
            engines=self.engines,
            observer=self,
            catch_up=catch_up,
            gpus=self._gpus,
            deadlines=deadlines,
        )
        self._supervision = Supervision(name, context.task_group, essential=essential, on_failure=self.changed)
        self._keepers: dict[str, Keeper] = {}
        self._router = RouterKeeper(self._keeping, router_process)
        self._earlier_restarts = 0
        """Of keepers that have a successor."""
        self._changes = Changes()
        self._started_at = anyio.current_time()

    # processes

    def start_router(self) -> None:
        """Starts the router and keeps it running."""
        self._supervision.start(self._router.run, f"keep the router of {self.name}")

    def start_engine(self, engine: ManagedEngine, process: HostedProcess) -> None:
        """Starts a new engine and keeps it running."""
        self._take(engine)
        self._start_keeper(EngineKeeper(engine, self._keeping, process))

    def join_engine(self, engine: ManagedEngine, model: Path, owner: str) -> None:
        """Has an external engine join, which must serve the model in directory `model`, as an engine of job `owner`."""
        self._take(engine)
        self._start_keeper(ExternalKeeper(engine, self._keeping, model, owner))

    def _take(self, engine: ManagedEngine) -> None:
        self.engines.append(engine)
        engine.observer = self

    def start_again(self, engine: ManagedEngine) -> None:
        """Starts an engine that was stopped or given up, and whose keeper has ended."""
        keeper = self._keepers[engine.engine_id]
        self._earlier_restarts += keeper.restarts
        engine.renew()
        self._start_keeper(keeper.successor())

    async def start_over(self) -> None:
        """Starts router and engines of a group that failed, as if for the first time; else there is nothing to do."""
        if not self._supervision.failed:
            return
        await self._end_all()
        if self._supervision.ending:
            return
        self._supervision.forget_failure()
        self.start_s, self._started_at = None, anyio.current_time()
        self._earlier_restarts += self._router.restarts
        self._router = self._router.successor()
        self.start_router()
        for engine in self.engines:
            self.start_again(engine)

    def _start_keeper(self, keeper: Keeper) -> None:
        self._keepers[keeper.engine.engine_id] = keeper
        self._supervision.start(partial(self._keep, keeper), f"keep {keeper.engine.engine_id}")

    async def _keep(self, keeper: Keeper) -> None:
        try:
            await keeper.run()
        except EngineError as error:
            job_starts = self.start_s is None
            if job_starts or not self._wanted():
                raise
            _log.error("an engine was given up; the others go on", engine=keeper.engine.engine_id, reason=str(error))
            self.changed()

    async def retire_engine(self, engine: ManagedEngine) -> None:
        """Takes an engine out of service before it is stopped: no new request reaches it."""
        await self._keepers[engine.engine_id].retire()
        self.changed()

    async def stop_engine(self, engine: ManagedEngine) -> None:
        """Ends an engine that is to be no part of the group any more."""
        try:
            await self._keepers[engine.engine_id].stop()
        finally:
            self.changed()

    async def quarantine(self, engine: ManagedEngine, reason: str) -> None:
        """Takes an engine that cannot be trusted out of service; it is started again."""
        await self._keepers[engine.engine_id].quarantine(reason)

    def distrust(self, engine: ManagedEngine, reason: str) -> None:
        """Has an engine that serves quarantined, and returns at once."""
        if engine.state is EngineState.SERVING:
            self._supervision.start(partial(self.quarantine, engine, reason), f"quarantine of {engine.engine_id}")

    async def stop(self) -> None:
        """Ends router and engines, all at once, and the tasks that kept them; none of it counts as a failure."""
        self._supervision.begin_end()
        self.changed()
        try:
            await self._end_all()
        finally:
            self._supervision.cancel()

    async def _end_all(self) -> None:
        await finish_all(self._router.stop, *(partial(self.stop_engine, engine) for engine in self.engines))

    @property
    def restarts(self) -> int:
        """Restarts of engines and router, so far."""
        return self._router.restarts + self._earlier_restarts + sum(k.restarts for k in self._keepers.values())

    def is_wanted(self, engine: ManagedEngine) -> bool:
        """Whether the engine is to run, and was not given up."""
        return self._keepers[engine.engine_id].wanted

    def is_over(self, engine: ManagedEngine) -> bool:
        """Whether no keeper has the engine any more, so that it can be started again."""
        return self._keepers[engine.engine_id].ended

    # waiting for it

    def check(self) -> None:
        """Raises EngineError once the group cannot serve any more."""
        self._supervision.check()

    async def wait_ready(self) -> None:
        """Returns when the router answers and every engine has generated; each start has its own deadline.

        External engines that do not answer are not waited for, if others do.

        Raises EngineError when no engine is to run.
        """
        await self._wait(lambda: self._router.answers and self._all_generated(), "first start")

    async def wait_serving(self, purpose: str) -> None:
        """Returns when some engine serves; waits for engines that are being brought back."""
        await self._wait(lambda: any(engine.serves for engine in self.engines), purpose)

    async def wait_updatable(self, number: int, purpose: str) -> None:
        """Returns when `number` engines (or all that are wanted, if fewer) can take weights.

        Raises EnginesLostError when none can before the trainer has left its GPUs.
        """

        def enough() -> bool:
            coming = self._coming()
            if not coming:
                raise EnginesLostError(
                    f"{purpose}: no engine is left in the trainer's turn on its GPUs: {self.states()}"
                )
            able = sum(engine.takes_weights for engine in self.engines)
            return able > 0 and able >= min(number, sum(not keeper.absent for keeper in coming))

        await self._wait(enough, purpose)

    async def wait_recovered(self) -> None:
        """Returns when every engine that is wanted serves; raises EngineError when none is wanted.

        Does not wait for an engine that is started only after the trainer has left its GPUs.
        """
        await self._wait(lambda: all(k.engine.serves for k in self._coming() if not k.absent), "recovery")

    async def wait_until(self, satisfied: Callable[[], bool]) -> None:
        """Returns once `satisfied()`, which is asked after each change; the caller sets a deadline."""
        while not satisfied():
            await self._changes.wait()

    def states(self) -> str:
        """`engine-0 is dead (why); engine-1 is starting`."""
        told = (f"{e.engine_id} is {e.state}" + ("" if e.failure is None else f" ({e.failure})") for e in self.engines)
        return "; ".join(told)

    async def _wait(self, satisfied: Callable[[], bool], purpose: str) -> None:
        """Returns once `satisfied()`; raises EngineError when the group has failed or no engine is wanted."""
        timeout_s = self._config.engine.start_timeout_s + self._config.router.start_timeout_s
        try:
            with waiting(purpose, f"the engines of {self.name}", timeout_s):
                while True:
                    self.check()
                    if not self._wanted():
                        raise EngineError(
                            f"no engine runs for {purpose}: {self.states()}; start one with start_cell "
                            "(asyncrl cell start)"
                        )
                    if satisfied():
                        return
                    await self._changes.wait()
        except TimeoutError as error:
            raise EngineError(f"{error}: {self.states()}") from error

    def _wanted(self) -> list[Keeper]:
        return [keeper for keeper in self._keepers.values() if keeper.wanted]

    def _coming(self) -> list[Keeper]:
        """Keepers of the wanted engines that serve, or come to serve without the end of the trainer's turn."""
        return [keeper for keeper in self._wanted() if not self._gpus.keeps_out(keeper.engine)]

    def _all_generated(self) -> bool:
        wanted = self._wanted()
        return any(k.has_generated for k in wanted) and all(k.has_generated or k.absent for k in wanted)

    def changed(self) -> None:
        """Makes waiting tasks look again: an engine generated, changed its state, or is wanted no more."""
        wanted = self._wanted()
        if self.start_s is None and wanted and self._all_generated():
            self.start_s = anyio.current_time() - self._started_at
            router = self.routing.router
            self._events.emit(
                FleetReady(
                    model=self.name,
                    engines=sum(keeper.has_generated for keeper in wanted),
                    seconds=self.start_s,
                    router_url=router.url,
                    metrics_url=router.metrics_url,
                )
            )
        self._changes.notify()


async def end_groups(groups: Sequence[EngineGroup]) -> None:
    """Ends all processes of all groups at once, within bounds; the host ends those that remain."""
    try:
        with waiting("end of the fleet", "engines and routers", DISPOSE_TIMEOUT_S):
            await finish_all(*(group.stop for group in groups))
    except TimeoutError as error:
        states = "; ".join(group.states() for group in groups)
        _log.error("the fleet did not end in time; the host ends the rest of it", reason=str(error), states=states)
