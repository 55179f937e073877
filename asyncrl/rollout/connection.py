"""Connection: everything that an executor has to do with the engines behind one router.

The samples of groups (`generation/`) send requests through the router (`requests/`). Aborts (`requests/aborts.py`) and
questions about load (`requests/engine_queries.py`) go to the engines themselves. `weights.on_update` says what an
update of the weights does to requests:

- retract: nothing. They are paused with the engines and go on.
- in_place: likewise; and nothing is sent meanwhile, so that a request begins under the weights that it was sent under.
- wait: requests in flight end before the update; none is begun during it.
- abort: requests in flight are ended in the engines by their ids; afterwards they go on from what they had generated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial

import anyio
from anyio.abc import TaskGroup

from asyncrl.config import Config
from asyncrl.config.checks.external import normal_url
from asyncrl.config.concurrency import concurrency_of, planned_engines
from asyncrl.data.fleet import DistrustEngine, job_name
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.host.open_files import raise_open_files
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS
from asyncrl.rollout.generation.concurrency import ConcurrencyPolicy, LoadMeter, look
from asyncrl.rollout.generation.group_generator import GroupGenerator
from asyncrl.rollout.generation.slots import Slots
from asyncrl.rollout.group_events import RequestFailed
from asyncrl.rollout.requests.aborts import SEND_TIMEOUT_S, Aborts
from asyncrl.rollout.requests.engine_clock import EngineClock
from asyncrl.rollout.requests.engine_queries import EngineQueries
from asyncrl.rollout.requests.generate_client import GenerateClient, RequestOptions
from asyncrl.rollout.requests.retry import WAITED_OUT, RequestFault, RetryPolicy
from asyncrl.rollout.requests.trust import Trust
from asyncrl.rollout.rewards.scorer import Scorer
from asyncrl.run_directory.engine_key import key_file

_ABORT_TIMEOUT_S = 1.0
"""From the aborts to the answers of the aborted requests; measured below 50 ms."""


class Connection:
    """Construct it in the event loop, `start`, use `generator`; `aclose` at the end."""

    def __init__(
        self,
        router_url: str,
        config: Config,
        scorer: Scorer,
        *,
        tokenizer: PolicyTokenizer,
        events: EventLog,
        distrust: DistrustEngine | None = None,
    ) -> None:
        """Sends nothing yet. Samples are scored by `scorer`; `distrust` is told of engines that should not serve."""
        rollout, self._on_update = config.rollout, config.weights.on_update
        self._patience_s = rollout.request_timeout_s
        self._events = events
        self._trust = Trust()
        self._distrust = distrust
        external = map(normal_url, config.engine.external)
        self._queries = EngineQueries(router_url, key_file(config.run.dir), frozenset(external))
        self.clock = EngineClock(expected_pause_s=self._patience_s)
        self.aborts = Aborts(self._queries, self.clock, on_sent=events.emit)
        aborted = frozenset({RequestFault.ABORTED} if self._on_update == "abort" else ())
        options = RequestOptions(
            vocab_size=tokenizer.vocab_size,
            timeout_s=rollout.request_timeout_s,
            retry=RetryPolicy(rollout.request_retries, self._patience_s, waited_out=WAITED_OUT | aborted),
            sticky=config.router.sticky,
            keeps_kv=self._on_update == "in_place",
            keeps_aborted=self._on_update == "abort",
            detokenize=tokenizer.decode,
            owner=job_name(config.run.dir),
        )
        self.client = GenerateClient(router_url, options, observer=self, clock=self.clock)
        self._most = partial(concurrency_of, config, open_files=raise_open_files())
        self.slots = Slots(self._most(planned_engines(config)))
        self.generator = GroupGenerator(self.client, scorer, self.slots, vocab_size=tokenizer.vocab_size)
        self.scorer = scorer
        self.loads = LoadMeter()
        self._policy: ConcurrencyPolicy | None = None
        if rollout.adaptive_concurrency:
            least = min(rollout.samples_per_prompt, self.slots.limit)
            self._policy = ConcurrencyPolicy(least=least, most=self.slots.limit)
        self._looking = anyio.CancelScope()

    def start(self, task_group: TaskGroup) -> None:
        """Its tasks live in `task_group` until `aclose`."""
        self.generator.start(task_group)
        task_group.start_soon(self.aborts.serve, name="aborts")
        task_group.start_soon(self._look, name="looks at engines")

    async def aclose(self) -> None:
        """Ends what engines still do for it, then its connections; bounded. Idempotent."""
        self._looking.cancel()
        await self.generator.aclose()
        await self.aborts.aclose()
        await self.client.aclose()
        self.clock.resume()  # no pause is waited for any more

    def believed(self, engine: str) -> None:
        """As the observer of its client: the engine is trusted more."""
        self._trust.believed(engine)

    def failed(self, failure: RequestFailed) -> None:
        """As the observer of its client: a failed attempt is an event. An engine may lose all trust by it."""
        self._events.emit(failure)
        if failure.failure != RequestFault.MALFORMED or not failure.engine or self._distrust is None:
            return
        if (why := self._trust.malformed(failure.engine)) is not None:
            self._distrust(failure.engine, f"{why}; the last: {failure.detail}")

    def given_up(self, rid: str, reason: str) -> None:
        """As the observer of its client: the request is to be ended in its engine."""
        self.aborts.add(rid, reason)

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Enter it around an update of the weights; see the module's docstring."""
        match self._on_update:
            case "retract":
                yield
            case "in_place":
                with self._registered(), self.slots.holding(), self.client.held():
                    yield
            case "wait":
                async with self.slots.drained(self._patience_s):
                    with self._registered():
                        yield
            case "abort":
                with self._registered(), self.slots.holding(), self.client.held():
                    await self._abort_all()
                    yield

    def _registered(self) -> AbstractContextManager[None]:
        """One wait in the place of all samples that are held back."""
        return WAITS.register("end of the weight update", "trainer", self._patience_s)

    async def _abort_all(self) -> None:
        """Ends all requests on the wire. A request that the abort does not reach is ended by the pause that follows."""
        rids = self.client.on_the_wire
        for rid in rids:
            self.aborts.add(rid, "update of the weights")
        await self.aborts.send(SEND_TIMEOUT_S)
        with anyio.move_on_after(_ABORT_TIMEOUT_S):
            await self.client.answered(rids)

    async def _look(self) -> None:
        with self._looking:
            told = self._events.emit
            await look(
                self._queries, self.clock, self.loads, self.slots, self._policy, most=self._most, on_lowered=told
            )


class Connections:
    """Opens connections in one task group, and closes each of them when it is retired."""

    def __init__(
        self,
        config: Config,
        scorer: Scorer,
        task_group: TaskGroup,
        *,
        tokenizer: PolicyTokenizer,
        events: EventLog,
        distrust: DistrustEngine | None = None,
    ) -> None:
        self._config = config
        self._scorer = scorer
        self._tasks = task_group
        self._tokenizer = tokenizer
        self._events = events
        self._distrust = distrust
        self._open: set[Connection] = set()

    def open(self, router_url: str) -> Connection:
        """A started connection. Needs no router yet: requests wait for one."""
        connection = Connection(
            router_url,
            self._config,
            self._scorer,
            tokenizer=self._tokenizer,
            events=self._events,
            distrust=self._distrust,
        )
        self._open.add(connection)
        connection.start(self._tasks)
        return connection

    def retire(self, connection: Connection) -> None:
        """Closes it in a task of its own."""
        self._tasks.start_soon(self._close, connection, name="end of a connection")

    async def aclose(self) -> None:
        """Closes all that are open. Idempotent."""
        for connection in tuple(self._open):
            await self._close(connection)

    async def _close(self, connection: Connection) -> None:
        await connection.aclose()
        self._open.discard(connection)
