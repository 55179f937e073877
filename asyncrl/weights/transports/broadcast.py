"""Broadcast transport: one process group {trainer rank 0, every engine TP rank}, bucket by bucket.

Invariants
- The group stays while the set of engines (id, generation) stays the same and nothing fails. After that a new group is
  made, with another name and port: a group can neither grow nor be mended.
- The trainer's half leaves the group, in its own thread, as soon as it fails or hears of a failure. That frees the
  engines that are blocked in a receive, before the driver talks to them.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import torch
from torch import Tensor

from asyncrl.data.fleet import EngineEndpoint
from asyncrl.errors import EngineError, WeightUpdateError
from asyncrl.weights.buckets import Bucket
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
from asyncrl.weights.transports.process_group import Backend, TransferGroup

ANSWER_GRACE_S = 15.0
"""How long engines may take to answer after the wire broke. An engine whose scheduler died closes its HTTP
connections only 6 to 8 s later (measured)."""

CANCEL_GRACE_S = 5.0
"""How long a cancelled transfer may take to end in order."""

DESTROY_TIMEOUT_S = 5.0
"""How long an engine may take to leave a group."""

HEAD_START_S = 0.1
"""How long the trainer waits before it joins a new group. An engine that is dead or refuses shows that within
milliseconds; a join that has begun cannot be interrupted."""

CONNECT_S = 1.0
"""How long a group stays open after an engine has refused it. If it closes before another engine has connected, that
engine tries for half an hour (measured); if it closes later, the engine leaves at once."""

RECEIVE_FAILED = "Failed to receive weights"
"""An engine says so when its end of the wire broke, which it may notice before the trainer does."""

FLATTEN_BELOW_BYTES = 256 * 1024
"""A bucket whose mean tensor is smaller travels as one message. Larger tensors travel one by one: a copy of them into
one buffer costs more than the messages."""

_Member = tuple[str, int, int]
"""(engine_id, generation, tensor_parallel)."""


def is_flattened(bucket: Bucket) -> bool:
    """Whether a bucket travels as one uint8 message; the trainer and the engines both go by this."""
    return len(bucket) > 1 and sum(t.size_bytes for t in bucket) < len(bucket) * FLATTEN_BELOW_BYTES


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
        self._group: TransferGroup | None = None
        self._members: tuple[_Member, ...] = ()
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
        """Leaves the group, in the trainer thread; engines that wait in a receive are free then."""
        self._stop("the transfer was given up")
        group, self._group, self._members, self._sink = self._group, None, (), None
        if group is not None and self._source is not None:
            await self._source.call(
                group.drop, what="leaving the weight transfer group", timeout_s=self._timeout_s + ANSWER_GRACE_S
            )

    async def aclose(self) -> None:
        """Leaves the group."""
        await self.abandon(())

    def _stop(self, reason: str) -> None:
        self._stopped = reason
        if self._sink is not None:
            self._sink.fail(reason)

    def _check_not_stopped(self) -> None:
        if self._stopped is not None:
            raise WeightUpdateError(self._stopped)

    async def _transfer(
        self, source: WeightSource, payload: Payload, clients: Mapping[EngineEndpoint, WeightReceiver]
    ) -> TransferResult:
        self._stopped = None
        failures: dict[str, EngineFailure] = {}
        try:
            group = await self._group_with(source, clients, failures)
            self._check_not_stopped()
        except WeightUpdateError as error:
            return TransferResult(0, failures, str(error), touched=False)
        self._sink = BroadcastSink(group, BucketFiller(payload.specs, self._bucket_bytes))
        return await self._send(payload, clients, self._sink, failures)

    async def _send(
        self,
        payload: Payload,
        clients: Mapping[EngineEndpoint, WeightReceiver],
        sink: BroadcastSink,
        failures: dict[str, EngineFailure],
    ) -> TransferResult:
        """Runs both halves at once: tells engines of each bucket, while the trainer thread sends."""
        source_error: str | None = None
        unanswered = {e.engine_id for e in clients}

        async def feed(engine: EngineEndpoint, client: WeightReceiver) -> None:
            last = len(sink.buckets) - 1
            for index, bucket in enumerate(sink.buckets):
                try:
                    await client.update_from_distributed(
                        bucket,
                        group_name=sink.group_name,
                        flattened=is_flattened(bucket),
                        flush_cache=self._flush_cache and index == last,
                        timeout_s=2 * self._timeout_s + ANSWER_GRACE_S,
                    )
                except EngineError as error:
                    suffered = sink.broken is not None or RECEIVE_FAILED in str(error)
                    failure = engine_failure(error, broken_before=suffered)
                    failures[engine.engine_id] = failure
                    sink.fail(str(error))
                    if failure.kind is TransferFault.REFUSED:
                        await self._part_from(client, sink)
                    break
            unanswered.discard(engine.engine_id)

        raised: Exception | None = None
        async with anyio.create_task_group() as task_group:
            for engine, client in clients.items():
                task_group.start_soon(feed, engine, client)
            try:
                await payload.export(sink, self._timeout_s * (len(sink.buckets) + 1))
            except WeightUpdateError as error:
                source_error = str(error)
                task_group.cancel_scope.deadline = anyio.current_time() + ANSWER_GRACE_S
            except Exception as error:  # a failed rank; raised outside the task group, which would wrap it
                raised = error
                task_group.cancel_scope.cancel()
        if raised is not None:
            raise raised
        for engine_id in unanswered:
            reason = f"no answer within {ANSWER_GRACE_S:g} s after the transfer broke ({source_error})"
            failures[engine_id] = EngineFailure(TransferFault.GONE, reason)
        return TransferResult(sink.bytes_sent, failures, source_error)

    async def _part_from(self, client: WeightReceiver, sink: BroadcastSink) -> None:
        """Makes an engine that refused a bucket leave the group.

        The trainer may be sending that bucket or the next one, and would wait for the engine in vain. If the engine
        received the next bucket in place of this one, it would die of a message of another size (measured).
        """
        with suppress(EngineError):  # the engine hangs or has ended; the trainer's own deadline ends the wait then
            await client.destroy_weights_group(sink.group_name, timeout_s=DESTROY_TIMEOUT_S)

    async def _group_with(
        self,
        source: WeightSource,
        clients: Mapping[EngineEndpoint, WeightReceiver],
        failures: dict[str, EngineFailure],
    ) -> TransferGroup:
        """The kept group when its members are the same, else a new one."""
        members = tuple((e.engine_id, e.generation, e.tensor_parallel) for e in clients)
        if self._group is not None and self._group.alive and members == self._members:
            return self._group
        old, self._group, self._members = self._group, None, ()
        if old is not None:
            await source.call(old.drop, what="leaving the weight transfer group", timeout_s=self._timeout_s)
            # A new engine does not know the group. An engine that cannot leave it shows that in the transfer.
            await on_each_engine(
                clients, lambda client, _: client.destroy_weights_group(old.name, timeout_s=DESTROY_TIMEOUT_S)
            )
        world_size = 1 + sum(e.tensor_parallel for e in clients)
        name = f"asyncrl-{uuid.uuid4().hex}"  # an engine refuses a name that it knows
        self._group = group = await source.call(
            TransferGroup,
            self._backend,
            name,
            world_size,
            self._host,
            self._timeout_s,
            what="store of the weight transfer group",
            timeout_s=self._timeout_s,
        )

        await self._form(source, group, clients, failures)
        self._members = members
        return group

    async def _form(
        self,
        source: WeightSource,
        group: TransferGroup,
        clients: Mapping[EngineEndpoint, WeightReceiver],
        failures: dict[str, EngineFailure],
    ) -> None:
        """Invites all engines and joins; raises WeightUpdateError, and leaves no engine waiting, when one fails."""
        unanswered = {e.engine_id for e in clients}
        refused = anyio.Event()

        async def invite(engine: EngineEndpoint, client: WeightReceiver, rank_offset: int) -> None:
            try:
                await client.init_weights_group(
                    master_address=self._host,
                    master_port=group.port,
                    rank_offset=rank_offset,
                    world_size=group.world_size,
                    group_name=group.name,
                    backend=self._backend,
                    timeout_s=self._timeout_s + ANSWER_GRACE_S,
                )
            except EngineError as error:
                failures[engine.engine_id] = engine_failure(error, broken_before=not group.alive)
                refused.set()
            unanswered.discard(engine.engine_id)

        broken: Exception | None = None
        async with anyio.create_task_group() as task_group:
            offset = 1
            for engine, client in clients.items():
                task_group.start_soon(invite, engine, client, offset)
                offset += engine.tensor_parallel
            try:
                with anyio.move_on_after(HEAD_START_S):
                    await refused.wait()
                if failures:
                    if unanswered:
                        await anyio.sleep(CONNECT_S)
                    await source.call(group.drop, what="leaving the weight transfer group", timeout_s=self._timeout_s)
                    raise WeightUpdateError("an engine did not join the weight transfer group")
                await source.call(group.join, what="weight transfer group", timeout_s=2 * self._timeout_s)
            except Exception as error:  # of any kind: raised outside the task group, which would wrap it
                broken = error
                task_group.cancel_scope.deadline = anyio.current_time() + ANSWER_GRACE_S
        for engine_id in unanswered:
            reason = f"no answer to an invitation to the weight transfer group {group.name}"
            failures[engine_id] = EngineFailure(TransferFault.GONE, reason)
        if broken is None and failures:
            broken = WeightUpdateError("an engine did not join the weight transfer group")
        if broken is not None:
            raise broken


class BroadcastSink:
    """The trainer's half: fills buckets and sends each full one. Made in the event loop, used in the trainer thread."""

    def __init__(self, group: TransferGroup, filler: BucketFiller) -> None:
        self._group = group
        self._filler = filler
        self.bytes_sent = 0
        self.broken: str | None = None
        """Why nothing more is sent; the event loop sets it too, and it is read between buckets."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The plan, in the order of the export."""
        return self._filler.buckets

    @property
    def group_name(self) -> str:
        """Name under which engines know the group."""
        return self._group.name

    def fail(self, reason: str) -> None:
        """Stops the transfer at the next bucket; the first reason stays."""
        if self.broken is None:
            self.broken = reason

    def put(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor, and sends the bucket that it completes; leaves the group before it raises."""
        try:
            full = self._filler.add(name, tensor)
            if full is not None:
                self._send(*full)
        except Exception as error:
            self._leave(error)
            raise

    def finish(self) -> None:
        """Raises WeightUpdateError when the export was too short, and leaves the group first."""
        try:
            self._filler.check_complete()
        except WeightUpdateError as error:
            self._leave(error)
            raise

    def _send(self, index: int, tensors: list[Tensor]) -> None:
        if self.broken is not None:
            raise WeightUpdateError(self.broken)
        payload = [tensor.detach().to(self._group.device).contiguous() for tensor in tensors]
        if is_flattened(self.buckets[index]):
            payload = [torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in payload])]
        self._group.broadcast(payload)
        self.bytes_sent += sum(tensor.nbytes for tensor in payload)

    def _leave(self, error: Exception) -> None:
        self.fail(str(error))
        self._group.drop()
