"""Tensor handover: engines on the trainer's GPUs read each bucket from memory that they share with the trainer.

On a GPU an engine opens memory of the trainer's process (CUDA IPC). A colocated engine needs that, since NCCL refuses
two ranks on one device. A process can open only memory of the GPU that it sees. So each trainer rank offers every
bucket on its own GPU, and each tensor-parallel rank of an engine reads from the trainer rank on its GPU
(`tensor_sink.py`; `handover.py` has the messages). On CPU the same calls go through shared memory.

Invariants
- A bucket stays untouched until every engine that reads it has answered: ranks wait for that, with a deadline.
- Each rank's handles go to one tensor-parallel rank of one engine: a handle may be opened once.
- An engine that fails costs no other one the weights: its ranks offer nothing more, and the others go on.
- However a transfer ends, every rank is told, and walks to the end of the export.
- A rank that offers nothing within the timeout of a bucket, or does not end the export, ends the transfer with a
  TrainerError that names the ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from asyncrl.data.fleet import EngineEndpoint
from asyncrl.errors import TrainerError, WeightUpdateError
from asyncrl.observability.waits import waiting
from asyncrl.tasks import Changes
from asyncrl.weights.handover import Desk, Handover, Offer, OtherRanks, Stopped, Taken
from asyncrl.weights.transfer import (
    BucketFiller,
    EngineFailure,
    EngineOpener,
    Payload,
    TransferResult,
    WeightReceiver,
    WeightSource,
    on_each_engine,
    open_clients,
)
from asyncrl.weights.transports.tensor_sink import TensorSink

_STACK_TIMEOUT_S = 2.0

Clients = Mapping[EngineEndpoint, WeightReceiver]


def ranks_of(engine: EngineEndpoint) -> tuple[int, ...]:
    """The trainer rank from which each tensor-parallel rank of the engine reads; rank 0 where they share no GPU."""
    return engine.trainer_ranks or (0,) * engine.tensor_parallel


class TensorTransport:
    """See the module's docstring. One instance serves all publications of a job."""

    leaves_copy = False
    copy: Path | None = None

    def __init__(
        self, open_engine: EngineOpener, *, bucket_bytes: int, timeout_s: float, flush_cache: bool = True
    ) -> None:
        self._open_engine = open_engine
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._flush_cache = flush_cache
        self._exports = 0
        self._counter: OfferCounter | None = None

    async def transfer(
        self,
        source: WeightSource,
        payload: Payload,
        engines: Sequence[EngineEndpoint],
        in_use: Collection[Path] = (),
    ) -> TransferResult:
        """See `Transport`; every engine reads a bucket before the trainer makes the next one."""
        self._exports += 1
        ranks = tuple(sorted({rank for engine in engines for rank in ranks_of(engine)}))
        handover = Handover(self._exports, ranks, self._bucket_bytes, self._timeout_s)
        filler = BucketFiller(payload.specs, self._bucket_bytes)
        self._counter = counter = OfferCounter(handover, source.other_ranks)
        sink = TensorSink(filler, handover, 0, counter.desk)
        raised: list[Exception] = []
        problem: TrainerError | None = None
        reading = _Reading(handover, counter, flush_cache=self._flush_cache)

        async def export() -> None:
            try:
                await payload.export(sink, 2 * handover.wait_s, handover)
            except Exception as error:  # sorted below, outside the task group, which would wrap it
                raised.append(error)
            finally:
                counter.end()

        try:
            async with open_clients(self._open_engine, engines) as clients, anyio.create_task_group() as task_group:
                task_group.start_soon(export)
                try:
                    await reading.read_all(clients, [sum(spec.size_bytes for spec in b) for b in filler.buckets])
                    await counter.wait_end()
                except TrainerError as error:  # raised below, outside the task group, which would wrap it
                    problem = error
                task_group.cancel_scope.cancel()
        finally:
            await counter.stop("the transfer ended")
        for failure in raised:
            if not isinstance(failure, WeightUpdateError):
                raise failure
        if problem is not None:
            raise problem
        told = counter.error if raised == [] else counter.error or str(raised[0])
        source_error = None if len(reading.failures) == len(engines) else told
        return TransferResult(reading.bytes_read, reading.failures, source_error, touched=reading.touched)

    async def abandon(self, engines: Sequence[EngineEndpoint]) -> None:
        """Stops the export on every rank; engines wait for nothing here."""
        if self._counter is not None:
            await self._counter.stop("the transfer was given up")
            self._counter = None

    async def aclose(self) -> None:
        """Stops an export that still runs."""
        await self.abandon(())


class OfferCounter:
    """Rank 0's end of one export, in the event loop: collects the offers of all ranks and answers them."""

    def __init__(self, handover: Handover, others: OtherRanks) -> None:
        loop = asyncio.get_running_loop()

        def send(offer: Offer) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self.take, 0, offer)

        self.desk = Desk(send)
        """Of rank 0 itself."""
        self.error: str | None = None
        """The first failure of a rank that offers, or why the export was stopped."""
        self._handover = handover
        self._others = others
        self._offers: dict[int, dict[int, str]] = {}
        """By bucket, the handles of each rank."""
        self._ended = False
        self._stopped = False
        self._changes = Changes()
        others.listen(self.take)

    def take(self, rank: int, offer: Offer) -> None:
        """Takes the offer of a rank."""
        if offer.export != self._handover.number:
            return
        if offer.error is None:
            self._offers.setdefault(offer.bucket, {})[rank] = offer.handles
        elif self.error is None:
            self.error = offer.error if rank == 0 else f"trainer rank {rank}: {offer.error}"
        self._changes.notify()

    def end(self) -> None:
        """The export has ended on every rank, or its failure is known."""
        self._ended = True
        self._changes.notify()

    async def collect(self, bucket: int, ranks: Collection[int]) -> Mapping[int, str] | None:
        """The handles of each of `ranks` for a bucket; None where a rank failed or the export ended, which stops it.

        Raises TrainerError where a rank offers nothing in time.
        """
        try:
            with waiting("handles of a bucket", _named(ranks), self._handover.timeout_s):
                while self.error is None and not self._ended and self._missing(bucket, ranks):
                    await self._changes.wait()
        except TimeoutError:
            missing = self._missing(bucket, ranks)
            what = f"{_named(missing)} offered no tensors of bucket {bucket} within {self._handover.timeout_s:g} s"
            raise await self._hung(what, missing) from None
        if not self._missing(bucket, ranks):
            return self._offers.pop(bucket)
        await self.stop(self.error or "the weight export ended early")
        return None

    async def release(self, bucket: int, reading: Collection[int], lost: Collection[int]) -> None:
        """The engines have answered: ranks that are still `reading` go on, and those whose engines are lost are out."""
        await self._tell(reading, Taken(self._handover.number, bucket))
        await self._tell(lost, Stopped(self._handover.number))

    async def stop(self, reason: str) -> None:
        """No rank offers anything more; the first reason stays. Also in a task that is being cancelled."""
        if not self._stopped:
            self._stopped = True
            self.error = self.error or (None if self._ended else reason)
            await self._tell(self._handover.ranks, Stopped(self._handover.number, reason))

    async def wait_end(self) -> None:
        """Returns when the export has ended. Raises TrainerError where a rank does not come to its end."""
        try:
            with waiting("end of the weight export", "trainer ranks", self._handover.timeout_s):
                while not self._ended:
                    await self._changes.wait()
        except TimeoutError as error:
            raise await self._hung(str(error), self._handover.ranks) from None

    async def _hung(self, what: str, ranks: Collection[int]) -> TrainerError:
        """The error for ranks that do not go on, with the stacks of those that say where they are."""
        await self._others.ask_stacks(_STACK_TIMEOUT_S)
        stacks = {rank: stack for rank, stack in self._others.stacks.items() if rank in ranks}
        lines = [f"{what}: a rank hangs in the weight export"]
        lines += [f"rank {rank} is at:\n{stack}".rstrip() for rank, stack in stacks.items()]
        return TrainerError("\n".join(lines))

    def _missing(self, bucket: int, ranks: Collection[int]) -> list[int]:
        return sorted(set(ranks) - self._offers.get(bucket, {}).keys())

    async def _tell(self, ranks: Collection[int], message: Taken | Stopped) -> None:
        if 0 in ranks:
            self.desk.hear(message)
        others = [rank for rank in ranks if rank != 0]
        if others:
            await self._others.tell(others, message)


class _Reading:
    """The engines of one transfer, and how far they have read."""

    def __init__(self, handover: Handover, counter: OfferCounter, *, flush_cache: bool) -> None:
        self.failures: dict[str, EngineFailure] = {}
        self.bytes_read = 0
        self.touched = False
        """Some engine may have read something."""
        self._timeout_s = handover.timeout_s
        self._counter = counter
        self._flush_cache = flush_cache

    async def read_all(self, clients: Clients, sizes: Sequence[int]) -> None:
        """Has the engines read one bucket after the other, of so many bytes.

        Returns early when no engine is left, or the export failed. Raises TrainerError where a rank offers nothing.
        """
        for bucket, size in enumerate(sizes):
            left = {engine: client for engine, client in clients.items() if engine.engine_id not in self.failures}
            ranks = _ranks_of_all(left)
            handles = await self._counter.collect(bucket, ranks)
            if handles is None:
                return
            self.touched = True
            flush_cache = self._flush_cache and bucket == len(sizes) - 1
            self.failures |= await on_each_engine(left, self._read_call(handles, flush_cache=flush_cache))
            reading = _ranks_of_all(engine for engine in left if engine.engine_id not in self.failures)
            await self._counter.release(bucket, reading, ranks - reading)
            if not reading:
                return
            self.bytes_read += size

    def _read_call(
        self, handles: Mapping[int, str], *, flush_cache: bool
    ) -> Callable[[WeightReceiver, EngineEndpoint], Awaitable[None]]:
        async def read(client: WeightReceiver, engine: EngineEndpoint) -> None:
            await client.update_from_tensor(
                [handles[rank] for rank in ranks_of(engine)],
                flattened=True,
                flush_cache=flush_cache,
                timeout_s=self._timeout_s,
            )

        return read


def _ranks_of_all(engines: Iterable[EngineEndpoint]) -> frozenset[int]:
    return frozenset(rank for engine in engines for rank in ranks_of(engine))


def _named(ranks: Iterable[int]) -> str:
    """`trainer ranks 1, 3`."""
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"trainer rank{'s' if len(numbers) != 1 else ''} {', '.join(numbers)}"
