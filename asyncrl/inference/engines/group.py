"""One served model: its engines, their router, and whoever keeps them running.

Invariants
- What makes the group unable to serve raises EngineError into the task group: an engine that fails at its first start,
  a router that is given up, the last engine given up. Other waiters get the same error from `check`.
- An engine that is given up, or asked to stop, leaves the others alone.
- `stop` ends every process, whatever happened before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import structlog
from anyio.abc import TaskGroup

from asyncrl.config import Config
from asyncrl.errors import EngineError, EnginesLostError
from asyncrl.host import ProcessSpec
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.engine_keeper import EngineKeeper
from asyncrl.inference.engines.external_keeper import ExternalKeeper
from asyncrl.inference.engines.keeper import CatchUpEngine, Keeper, KeeperSettings
from asyncrl.inference.engines.lifecycle import ROUTABLE
from asyncrl.inference.engines.restarts import RestartPolicy
from asyncrl.inference.fleet_events import FleetReady
from asyncrl.inference.gpus.shared_gpus import SharedGpus
from asyncrl.inference.routing.router_keeper import RouterKeeper
from asyncrl.inference.routing.routing import Routing
from asyncrl.inference.updates.deadlines import Deadlines
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting
from asyncrl.tasks import finish_all

if TYPE_CHECKING:
    from asyncrl.host import EngineHost

DISPOSE_TIMEOUT_S = 30.0
"""For all processes at once: what the host gives to one that does not want to end, and a little."""

_log = structlog.get_logger(__name__)


class EngineGroup:
    """The engines that serve one model, behind one router."""

    def __init__(
        self,
        name: str,
        config: Config,
        *,
        host: EngineHost,
        routing: Routing,
        router_spec: ProcessSpec,
        events: EventLog,
        task_group: TaskGroup,
        catch_up: CatchUpEngine,
        gpus: SharedGpus | None = None,
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
        essential: bool = True,
    ) -> None:
        """`catch_up` brings an engine that generates to the weights of the group, for as long as the engine lives.

        `gpus`: those that engines of it share with the trainer; None where they share none.
        Of a group that is not `essential`, a failure is told to whoever waits for it and ends nothing else.
        """
        self._essential = essential
        self.name = name
        self.engines: list[ManagedEngine] = []
        """All that were ever started, in the order of their start."""
        self.start_s: float | None = None
        """From `start` to the last engine's first generation; None before."""
        self.routing = routing
        self.deadlines = deadlines
        self._config = config
        self._host = host
        self._events = events
        self._task_group = task_group
        self._gpus = gpus or SharedGpus()
        self._settings = KeeperSettings(
            routing=routing,
            policy=RestartPolicy(config.engine.max_restarts, config.engine.restart_window_s),
            health=config.health,
            start_timeout_s=config.engine.start_timeout_s,
            deadlines=deadlines,
            events=events,
            on_ready=self._notify,
            catch_up=catch_up,
            gpus=self._gpus,
        )
        self._keepers: dict[str, Keeper] = {}
        self._specs: dict[str, ProcessSpec] = {}
        self._new_router_keeper = partial(
            RouterKeeper,
            routing,
            router_spec,
            host=host,
            engines=self.engines,
            policy=self._settings.policy,
            health=config.health,
            start_timeout_s=config.router.start_timeout_s,
            events=events,
            on_answer=self._notify,
            quarantine=self.quarantine,
        )
        self._router = self._new_router_keeper()
        self._health_paused = False
        self._earlier_restarts = 0
        """Of keepers that others have taken over from."""
        self._given_up: set[str] = set()
        self._failure: EngineError | None = None
        self._stopping = False
        self._watches: set[anyio.CancelScope] = set()
        """Of the tasks that keep router and engines."""
        self._changed = anyio.Event()
        self._started_at = anyio.current_time()

    # processes

    def start_router(self) -> None:
        self._task_group.start_soon(self._watched, self._router.run, name=f"keep the router of {self.name}")

    def start_engine(self, engine: ManagedEngine, spec: ProcessSpec | None) -> None:
        """Starts a new engine and keeps it running; without `spec`, one that somebody else runs joins."""
        self.engines.append(engine)
        engine.on_change = self._notify
        if spec is not None:
            self._specs[engine.engine_id] = spec
        self._start_keeper(engine)

    def start_again(self, engine: ManagedEngine) -> None:
        """Starts an engine that was stopped or given up, and whose keeper has ended."""
        self._earlier_restarts += self._keepers[engine.engine_id].restarts
        engine.renew()
        self._start_keeper(engine)

    async def start_over(self) -> None:
        """Starts all of a group that failed anew, as if for the first time; nothing to do for one that did not."""
        if self._failure is None:
            return
        await self._end_all()
        if self._stopping:
            return
        self._failure = None
        self.start_s, self._started_at = None, anyio.current_time()
        self._earlier_restarts += self._router.restarts
        self._router = self._new_router_keeper()
        self.start_router()
        for engine in self.engines:
            self.start_again(engine)

    def _start_keeper(self, engine: ManagedEngine) -> None:
        spec = self._specs.get(engine.engine_id)
        keeper: Keeper
        if spec is None:
            keeper = ExternalKeeper(engine, self._settings)
        else:
            keeper = EngineKeeper(engine, self._settings, spec, self._host)
        keeper.health_paused = self._health_paused
        self._keepers[engine.engine_id] = keeper
        self._given_up.discard(engine.engine_id)
        self._task_group.start_soon(self._watched, self._keep, keeper, name=f"keep {engine.engine_id}")

    async def stop_engine(self, engine: ManagedEngine) -> None:
        """Ends an engine that is to be no part of the group any more."""
        try:
            await self._keepers[engine.engine_id].stop()
        finally:
            self._notify()

    async def retire_engine(self, engine: ManagedEngine) -> None:
        """Takes an engine out of service before it is stopped: no new request reaches it."""
        await self._keepers[engine.engine_id].retire()
        self._notify()

    async def quarantine(self, engine: ManagedEngine, reason: str) -> None:
        """Takes an engine that cannot be trusted out of service; it is started again."""
        await self._keepers[engine.engine_id].quarantine(reason)

    async def stop(self) -> None:
        """Ends router and engines, all at once; none of it counts as a failure. Whoever kept them does so no more."""
        self._stopping = True
        self._notify()
        try:
            await self._end_all()
        finally:
            for scope in tuple(self._watches):
                scope.cancel()

    async def _end_all(self) -> None:
        await finish_all(self._router.stop, *(partial(self.stop_engine, engine) for engine in self.engines))

    def pause_health(self, paused: bool) -> None:
        """Probes are made only while not `paused`."""
        self._health_paused = paused
        for keeper in self._keepers.values():
            keeper.health_paused = paused

    @property
    def restarts(self) -> int:
        """Of engines and router, so far."""
        return self._router.restarts + self._earlier_restarts + sum(k.restarts for k in self._keepers.values())

    def is_wanted(self, engine: ManagedEngine) -> bool:
        """Whether the engine is to run, and was not given up."""
        return self._keepers[engine.engine_id] in self._expected()

    def is_over(self, engine: ManagedEngine) -> bool:
        """Whether nobody keeps the engine any more, so that it can be started again."""
        return self._keepers[engine.engine_id].ended

    # waiting for it

    def check(self) -> None:
        """Raises EngineError once the group cannot serve any more."""
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise EngineError("the fleet has been disposed of")

    async def wait_ready(self) -> None:
        """Returns when the router answers and every engine has generated; each start has its own deadline.

        Raises EngineError where none is to run.
        """
        await self._wait(
            lambda: self._some_run("first start") and self._router.answers and self._all_generated(), "first start"
        )

    async def wait_serving(self, purpose: str) -> None:
        """Returns when some engine serves; waits for engines that are being brought back."""
        await self._wait(lambda: self._some_run(purpose) and any(map(serves, self.engines)), purpose)

    async def wait_updatable(self, number: int, purpose: str) -> None:
        """Returns when `number` engines (or all that are wanted, if fewer) can take weights.

        Raises EnginesLostError where none can before the trainer has left its GPUs.
        """

        def enough() -> bool:
            self._some_run(purpose)
            coming = self._coming()
            if not coming:
                raise EnginesLostError(
                    f"{purpose}: no engine is left in the trainer's turn on its GPUs: {self.states()}"
                )
            able = sum(engine.takes_weights for engine in self.engines)
            return able > 0 and able >= min(number, len(coming))

        await self._wait(enough, purpose)

    async def wait_recovered(self) -> None:
        """Returns when every engine that is wanted serves; raises EngineError where none is.

        One that waits for the trainer to leave its GPUs is not waited for.
        """
        await self._wait(
            lambda: self._some_run("recovery") and all(serves(keeper.engine) for keeper in self._coming()), "recovery"
        )

    async def wait_until(self, satisfied: Callable[[], bool]) -> None:
        """Looks again at each change of state of an engine; whoever waits has a deadline of its own."""
        while not satisfied():
            await self._changed.wait()

    def states(self) -> str:
        """`engine-0 is dead (why); engine-1 is starting`."""
        told = (f"{e.engine_id} is {e.state}" + ("" if e.failure is None else f" ({e.failure})") for e in self.engines)
        return "; ".join(told)

    def _some_run(self, purpose: str) -> bool:
        if not self._expected():
            raise EngineError(f"no engine runs for {purpose}: {self.states()}; start one with start_cell")
        return True

    def _expected(self) -> list[Keeper]:
        return [k for k in self._keepers.values() if k.wanted and k.engine.engine_id not in self._given_up]

    def _coming(self) -> list[Keeper]:
        return [keeper for keeper in self._expected() if not self._gpus.keeps_out(keeper.engine)]

    async def _wait(self, satisfied: Callable[[], bool], purpose: str) -> None:
        timeout_s = self._config.engine.start_timeout_s + self._config.router.start_timeout_s
        try:
            with waiting(purpose, f"the engines of {self.name}", timeout_s):
                while True:
                    self.check()
                    if satisfied():
                        return
                    await self._changed.wait()
        except TimeoutError as error:
            raise EngineError(f"{error}: {self.states()}") from error

    def _all_generated(self) -> bool:
        return all(keeper.has_generated for keeper in self._expected())

    def _notify(self) -> None:
        """Something is not as it was: engines that generated, changed their state, or are wanted no more."""
        expected = self._expected()
        if self.start_s is None and expected and self._all_generated():
            self.start_s = anyio.current_time() - self._started_at
            router = self.routing.router
            self._events.emit(
                FleetReady(
                    model=self.name,
                    engines=len(expected),
                    seconds=self.start_s,
                    router_url=router.url,
                    metrics_url=router.metrics_url,
                )
            )
        self._changed.set()
        self._changed = anyio.Event()

    # failures

    async def _keep(self, keeper: Keeper) -> None:
        try:
            await keeper.run()
        except EngineError as error:
            engine_id = keeper.engine.engine_id
            self._given_up.add(engine_id)
            job_starts = self.start_s is None
            if job_starts or not self._expected():
                raise
            _log.error("an engine was given up; the others go on", engine=engine_id, reason=str(error))
            self._notify()

    async def _watched(self, run: Callable[..., Awaitable[None]], *args: Any) -> None:
        failure: BaseException | None = None
        scope = anyio.CancelScope()
        self._watches.add(scope)
        try:
            with scope:
                await run(*args)
        except* EngineError as group:  # also the host's own: it is gone, and the processes with it
            failure = group
        finally:
            self._watches.discard(scope)
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        if isinstance(failure, EngineError) and not self._stopping:
            self._failure = self._failure or failure
            self._notify()
            if self._essential:
                raise failure
            _log.error("a model is served no more; the job goes on", model=self.name, reason=str(failure))


def serves(engine: ManagedEngine) -> bool:
    """Whether requests that the router takes now will be answered, if only after a pause."""
    return engine.routed and engine.state in ROUTABLE


async def end_groups(groups: Sequence[EngineGroup]) -> None:
    """Ends all processes of all groups at once, within bounds: the host sees to those that do not end."""
    try:
        with waiting("end of the fleet", "engines and routers", DISPOSE_TIMEOUT_S):
            await finish_all(*(group.stop for group in groups))
    except TimeoutError as error:
        states = "; ".join(group.states() for group in groups)
        _log.error("the fleet did not end in time; the host ends the rest of it", reason=str(error), states=states)
