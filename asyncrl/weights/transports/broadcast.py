"""Broadcast transport: a process group {trainer rank 0, TP ranks of one engine} for each engine, bucket by bucket.

Invariants
- An engine that dies, hangs or refuses breaks its own group, and the others get every bucket in the same transfer. (In
  one group of all engines gloo passes messages on along a tree, so that the end of one engine takes others with it. It
  is no faster: `benchmarks/transfer_groups.py`.)
- A group stays while its engine (id, generation) stays the same and nothing fails there. After that a new group is
  made, with another name and port: a group can neither grow nor be mended.
- The trainer's half leaves a group as soon as it fails or hears of a failure. Over gloo that frees an engine that is
  blocked in a receive, before the driver talks to it.
- An engine has the weights only if its answers and the trainer's sending say so.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from asyncrl.data.fleet import EngineEndpoint
from asyncrl.errors import EngineError, WeightUpdateError
from asyncrl.weights.shielding import finish_despite_cancellation
from asyncrl.weights.transfer import (
    BucketFiller,
    EngineFailure,
    EngineOpener,
    Payload,
    TransferFault,
    TransferResult,
    WeightReceiver,
    WeightSource,
    engine_failure,
    on_each_engine,
    open_clients,
)
from asyncrl.weights.transports.broadcast_sink import LOST_GRACE_S, BroadcastSink, is_flattened
from asyncrl.weights.transports.process_group import PROOF, Backend, TransferGroup, drop_all, form_all

ANSWER_GRACE_S = 15.0
"""How long engines may take to answer after the trainer gave up. An engine whose scheduler died closes its HTTP
connections only 6 to 8 s later (measured)."""

CANCEL_GRACE_S = 5.0
"""How long a cancelled transfer may take to end in order."""

CONNECT_S = 1.0
"""How long a group that is not wanted any more waits for its engine. If it closes before the engine has connected, the
engine tries for half an hour (measured); if it closes later, the engine leaves at once."""

DESTROY_TIMEOUT_S = 5.0
"""How long an engine may take to leave a group."""

Clients = Mapping[EngineEndpoint, WeightReceiver]
_Member = tuple[str, int, int]
"""(engine_id, generation, tensor_parallel)."""


@dataclass(frozen=True, slots=True)
class _Link:
    """An engine and its group."""

    engine: EngineEndpoint
    group: TransferGroup


def _member(engine: EngineEndpoint) -> _Member:
    return engine.engine_id, engine.generation, engine.tensor_parallel


class BroadcastTransport:
    """See the module's docstring. One instance serves all publications of a job."""

    leaves_copy = False
    copy: Path | None = None

    def __init__(
        self,
        open_engine: EngineOpener,
        *,
        backend: Backend,
        bucket_bytes: int,
        timeout_s: float,
        host: str = "127.0.0.1",
        flush_cache: bool = True,
    ) -> None:
        """`flush_cache`: engines empty their prefix caches with the last bucket, which needs an engine without KV."""
        self._open_engine = open_engine
        self._backend: Backend = backend
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._host = host
        self._flush_cache = flush_cache
        self._links: dict[_Member, _Link] = {}
        """Groups that are whole, or are being formed."""
        self._left: dict[str, _Link] = {}
        """By engine id, groups that the trainer left and the engine may not have left."""
        self._sink: BroadcastSink | None = None
        self._source: WeightSource | None = None
        self._stopped: str | None = None

    async def transfer(
        self,
        source: WeightSource,
        payload: Payload,
        engines: Sequence[EngineEndpoint],
        in_use: Collection[Path] = (),
    ) -> TransferResult:
        """See `Transport`; a cancellation lets the bucket in progress end, within `CANCEL_GRACE_S`."""
        self._source = source
        async with open_clients(self._open_engine, engines) as clients:
            # A cancellation stops the trainer at the next bucket. If it stopped the calls to the engines, the trainer
            # would wait for them in the present bucket.
            return await finish_despite_cancellation(
                lambda: self._transfer(source, payload, clients),
                grace_s=CANCEL_GRACE_S,
                on_cancel=lambda: self._stop("the publication was cancelled"),
            )

    async def abandon(self, engines: Sequence[EngineEndpoint]) -> None:
        """Leaves the groups of `engines`, in the trainer thread; engines that wait in a receive are free then."""
        self._stop("the transfer was given up")
        self._sink = None
        await self._leave(_member(engine) for engine in engines)

    async def aclose(self) -> None:
        """Leaves all groups. Engines that go on after the job leave them too, so that they keep nothing of it."""
        self._stop("the transfer was given up")
        try:
            await self._leave(tuple(self._links))
        finally:  # engines leave also where a rank of the trainer has failed
            engines = [link.engine for link in self._left.values() if link.engine.external]
            async with open_clients(self._open_engine, engines) as clients:
                await self._part_from_left(clients)

    def _stop(self, reason: str) -> None:
        self._stopped = reason
        for link in self._links.values():
            link.group.give_up_at = time.monotonic() + CONNECT_S  # of those that are being formed
        if self._sink is not None:
            self._sink.fail(reason)

    def _check_not_stopped(self) -> None:
        if self._stopped is not None:
            raise WeightUpdateError(self._stopped)

    async def _leave(self, members: Iterable[_Member]) -> None:
        links = [self._links.pop(member) for member in tuple(members) if member in self._links]
        self._left |= {link.engine.engine_id: link for link in links}
        if links and self._source is not None:
            groups = [link.group for link in links]
            what, timeout_s = "leaving the weight transfer groups", self._timeout_s + ANSWER_GRACE_S
            await self._source.call(drop_all, groups, what=what, timeout_s=timeout_s)

    async def _part_from_left(self, clients: Clients) -> None:
        """Has engines leave groups that the trainer left. One that cannot shows that in the transfer."""
        left = {engine: self._left.pop(engine.engine_id) for engine in clients if engine.engine_id in self._left}

        async def part(client: WeightReceiver, engine: EngineEndpoint) -> None:
            await client.destroy_weights_group(left[engine].group.name, timeout_s=DESTROY_TIMEOUT_S)

        await on_each_engine({engine: clients[engine] for engine in left}, part)

    async def _transfer(self, source: WeightSource, payload: Payload, clients: Clients) -> TransferResult:
        self._stopped = None
        failures: dict[str, EngineFailure] = {}
        await self._form_groups(source, clients, failures)
        groups = {engine: link.group for engine in clients if (link := self._links.get(_member(engine))) is not None}
        try:
            self._check_not_stopped()
            if not groups:
                raise WeightUpdateError("no engine joined its weight transfer group")
        except WeightUpdateError as error:
            return TransferResult(0, failures, str(error), touched=False)
        by_id = {engine.engine_id: group for engine, group in groups.items()}
        self._sink = sink = BroadcastSink(by_id, BucketFiller(payload.specs, self._bucket_bytes), self._backend)
        result = await self._send(payload, {engine: clients[engine] for engine in groups}, sink, failures)
        lost = [engine for engine, group in groups.items() if engine.engine_id in failures or not group.alive]
        await self._leave(map(_member, lost))
        return result

    async def _send(
        self, payload: Payload, clients: Clients, sink: BroadcastSink, failures: dict[str, EngineFailure]
    ) -> TransferResult:
        """Runs both halves at once: tells engines of each bucket, while the trainer thread sends.

        An engine has the time of one bucket to answer after the last one was sent.
        """
        source_error: str | None = None
        unanswered = {e.engine_id for e in clients}

        async def feed(engine: EngineEndpoint, client: WeightReceiver) -> None:
            with scopes[engine.engine_id]:
                await feed_all(engine, client)
                unanswered.discard(engine.engine_id)

        async def feed_all(engine: EngineEndpoint, client: WeightReceiver) -> None:
            last = len(sink.buckets) - 1
            for index, bucket in enumerate(sink.buckets):
                if not await sink.due(index):
                    failures[engine.engine_id] = EngineFailure(TransferFault.COLLATERAL, str(sink.broken))
                    return
                try:
                    await client.update_from_distributed(
                        bucket,
                        group_name=sink.name_for(engine.engine_id),
                        flattened=is_flattened(bucket, self._backend),
                        flush_cache=self._flush_cache and index == last,
                        timeout_s=2 * self._timeout_s + ANSWER_GRACE_S,
                    )
                except EngineError as error:
                    failures[engine.engine_id] = engine_failure(error, broken_before=sink.broken is not None)
                    sink.part_with(engine.engine_id)
                    return

        scopes = {engine.engine_id: anyio.CancelScope() for engine in clients}
        raised: Exception | None = None
        async with anyio.create_task_group() as task_group:
            for engine, client in clients.items():
                task_group.start_soon(feed, engine, client)
            try:
                await payload.export(sink, 2 * self._timeout_s)
                wait_s = self._timeout_s
            except WeightUpdateError as error:
                source_error, wait_s = str(error), ANSWER_GRACE_S
            except Exception as error:  # a failed rank; raised outside the task group, which would wrap it
                raised, wait_s = error, 0.0
                task_group.cancel_scope.cancel()
            for engine_id, scope in scopes.items():
                scope.deadline = anyio.current_time() + min(wait_s, sink.grace_s(engine_id))
        if raised is not None:
            raise raised
        for engine_id in unanswered:
            told = sink.groups[engine_id].failure or source_error
            reason = f"no answer within {self._timeout_s:g} s after all weights were sent"
            if told is not None:
                reason = f"its weight transfer broke, and it gave no answer ({told})"
            failures[engine_id] = EngineFailure(TransferFault.GONE, reason)
        for engine_id, group in sink.groups.items():
            # Over NCCL an engine answers before it has the tensors, and may stand still for ever after a good answer.
            if group.failure is not None and engine_id not in failures:
                failures[engine_id] = EngineFailure(TransferFault.GONE, f"its weight transfer broke: {group.failure}")
        return TransferResult(sink.bytes_sent, failures, source_error)

    async def _form_groups(self, source: WeightSource, clients: Clients, failures: dict[str, EngineFailure]) -> None:
        """Makes a group with each engine that has none; one that does not come is among `failures`, and is let go."""
        members = {_member(engine) for engine in clients}
        await self._leave(member for member in self._links if member not in members)
        new = {engine: client for engine, client in clients.items() if _member(engine) not in self._links}
        if not new:
            return
        await self._part_from_left(new)

        def open_stores() -> dict[EngineEndpoint, TransferGroup]:
            # An engine refuses a name that it knows.
            return {
                engine: TransferGroup(
                    self._backend,
                    f"asyncrl-{uuid.uuid4().hex}",
                    1 + engine.tensor_parallel,
                    self._host,
                    self._timeout_s,
                )
                for engine in new
            }

        groups = await source.call(
            open_stores, what="stores of the weight transfer groups", timeout_s=self._timeout_s + ANSWER_GRACE_S
        )
        self._links |= {_member(engine): _Link(engine, group) for engine, group in groups.items()}
        await self._join(source, new, groups, failures)
        await self._leave(_member(engine) for engine in groups if engine.engine_id in failures)

    async def _join(
        self,
        source: WeightSource,
        clients: Clients,
        groups: Mapping[EngineEndpoint, TransferGroup],
        failures: dict[str, EngineFailure],
    ) -> None:
        """Invites the engines, and joins the group of each that comes."""
        unanswered = {engine.engine_id for engine in clients}

        async def invite(engine: EngineEndpoint, client: WeightReceiver) -> None:
            group = groups[engine]
            with scopes[engine]:
                try:
                    await client.init_weights_group(
                        master_address=self._host,
                        master_port=group.port,
                        rank_offset=1,
                        world_size=group.world_size,
                        group_name=group.name,
                        backend=self._backend,
                        timeout_s=2 * self._timeout_s + ANSWER_GRACE_S,
                    )
                    if self._backend == "nccl":
                        await client.update_from_distributed(
                            [PROOF],
                            group_name=group.name,
                            flattened=False,
                            flush_cache=False,
                            timeout_s=2 * self._timeout_s + ANSWER_GRACE_S,
                        )
                except EngineError as error:
                    failures[engine.engine_id] = engine_failure(error, broken_before=self._stopped is not None)
                    group.declined = True
                unanswered.discard(engine.engine_id)

        scopes = {engine: anyio.CancelScope() for engine in clients}

        raised: Exception | None = None
        async with anyio.create_task_group() as task_group:
            for engine, client in clients.items():
                task_group.start_soon(invite, engine, client)
            try:
                await source.call(
                    form_all,
                    tuple(groups.values()),
                    self._timeout_s,
                    what="weight transfer groups",
                    timeout_s=2 * self._timeout_s + ANSWER_GRACE_S,
                )
                for engine, scope in scopes.items():
                    wait_s = self._timeout_s if groups[engine].failure is None else LOST_GRACE_S
                    scope.deadline = anyio.current_time() + wait_s
            except Exception as error:  # of any kind: raised outside the task group, which would wrap it
                raised = error
                task_group.cancel_scope.deadline = anyio.current_time() + ANSWER_GRACE_S
        if raised is not None:
            raise raised
        for engine, group in groups.items():
            if engine.engine_id in unanswered:
                reason = group.failure or "it did not answer the invitation to its weight transfer group"
                failures[engine.engine_id] = EngineFailure(TransferFault.GONE, reason)
            elif group.failure is not None and engine.engine_id not in failures:
                failures[engine.engine_id] = EngineFailure(TransferFault.REFUSED, group.failure)
