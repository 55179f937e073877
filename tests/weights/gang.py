"""A trainer of several ranks that are only threads with tensors, and engines that open handles in this process."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio
from torch import Tensor

from asyncrl.data.fleet import EngineEndpoint
from asyncrl.errors import EngineError, TrainerError
from asyncrl.tasks import finish_all
from asyncrl.training.ranks.trainer_thread import TrainerThread
from asyncrl.weights.handover import Desk, Handover, Offer, Stopped, Taken
from asyncrl.weights.transfer import BucketFiller, Payload, Sink
from asyncrl.weights.transports.tensor_sink import TensorSink
from tests.weights.fakes import random_tensors, specs_of

T = TypeVar("T")


class Gang:
    """A WeightSource. Each rank exports its own tensors, which differ by the rank so that one can tell them apart."""

    def __init__(self, ranks: int) -> None:
        whole = random_tensors()
        self.specs = specs_of(whole)
        self.tensors = [{name: tensor + rank for name, tensor in whole.items()} for rank in range(ranks)]
        self.before_tensor: Callable[[int, int], None] = lambda rank, number: None
        """Called in the thread of a rank with the number of the tensor, and with that of the end."""
        self.walked = [0] * ranks
        """Tensors that each rank has walked past in its exports."""
        self.made: list[tuple[int, int]] = []
        """Every offer of a rank >= 1: rank and bucket."""
        self.threads = [TrainerThread() for _ in range(ranks)]
        self.stacks: dict[int, str] = {}
        self._take: Callable[[int, Offer], None] = lambda rank, offer: None
        self._desks = [Desk(partial(self._send, rank)) for rank in range(ranks)]

    @property
    def payload(self) -> Payload:
        return Payload(self.specs, self.export)

    @property
    def other_ranks(self) -> Gang:
        return self

    async def call(self, function: Callable[..., T], *args: object, what: str, timeout_s: float) -> T:
        return await self.threads[0].call(function, *args, what=what, timeout_s=timeout_s)

    def listen(self, take: Callable[[int, Offer], None]) -> None:
        self._take = take

    async def tell(self, ranks: Collection[int], message: Taken | Stopped) -> None:
        for rank in ranks:
            self._desks[rank].hear(message)

    async def ask_stacks(self, timeout_s: float) -> None:
        self.stacks = {rank: f"the stack of rank {rank}" for rank in range(1, len(self.threads))}

    def _send(self, rank: int, offer: Offer) -> None:
        if offer.error is None:
            self.made.append((rank, offer.bucket))
        anyio.from_thread.run_sync(self._take, rank, offer, token=self._token)

    async def export(self, sink: Sink, timeout_s: float, handover: Handover | None = None) -> None:
        assert handover is not None
        self._token = anyio.lowlevel.current_token()
        ranks = range(len(self.threads))

        def sink_of(rank: int) -> Sink:
            filler = BucketFiller(self.specs, handover.bucket_bytes)
            return TensorSink(filler, handover, rank, self._desks[rank]) if rank else sink

        failures: dict[int, Exception] = {}

        async def one(rank: int) -> None:
            walk = partial(self._walk, rank, sink_of(rank), failures)
            await self.threads[rank].call(walk, what=f"export of rank {rank}", timeout_s=timeout_s)

        await finish_all(*(partial(one, rank) for rank in ranks))
        if 0 in failures:
            raise failures[0]

    def _walk(self, rank: int, sink: Sink, failures: dict[int, Exception]) -> None:
        for number, (name, tensor) in enumerate(self.tensors[rank].items()):
            self.before_tensor(rank, number)
            self.walked[rank] += 1
            if rank not in failures:
                try:
                    sink.put(name, tensor)
                except Exception as error:
                    failures[rank] = error
        self.before_tensor(rank, len(self.specs))
        if rank not in failures:
            sink.finish()

    def close(self) -> None:
        for thread in self.threads:
            thread.close()


@dataclass
class Reader:
    """An engine that reads handles as SGLang does: each tensor-parallel rank opens the one at its own place."""

    endpoint: EngineEndpoint
    held: list[dict[str, Tensor]] = field(default_factory=list)
    """By tensor-parallel rank."""
    fault: Callable[[], Any] | None = None
    """Awaited in place of reading bucket `fault_at`."""
    fault_at: int = -1
    flushes: list[bool] = field(default_factory=list)

    async def update_from_tensor(
        self, serialized_named_tensors: Sequence[str], *, flattened: bool, flush_cache: bool, timeout_s: float
    ) -> None:
        assert flattened and len(serialized_named_tensors) == self.endpoint.tensor_parallel
        if self.fault is not None and self.fault_at == len(self.flushes):
            try:
                with anyio.fail_after(timeout_s):
                    await self.fault()
            except TimeoutError:
                raise EngineError(f"{self.endpoint.engine_id}: no answer within {timeout_s:g} s") from None
        for held, text in zip(self.held, serialized_named_tensors, strict=True):
            bucket = pickle.load(io.BytesIO(base64.b64decode(text)))
            for place in bucket["metadata"]:
                part = bucket["flattened_tensor"][place.start_idx : place.end_idx]
                held[place.name] = part.view(place.dtype).reshape(place.shape).clone()
        self.flushes.append(flush_cache)


def readers(layout: Mapping[str, tuple[int, ...]]) -> dict[str, Reader]:
    """Engines by id, with the trainer ranks on their GPUs."""
    return {
        engine_id: Reader(
            EngineEndpoint(engine_id, 1, f"http://{engine_id}", len(ranks), gpus=ranks, trainer_ranks=ranks),
            [{} for _ in ranks],
        )
        for engine_id, ranks in layout.items()
    }


def opener(engines: Mapping[str, Reader]) -> Callable[[str, str], Any]:
    @asynccontextmanager
    async def open_engine(engine_id: str, url: str) -> AsyncIterator[Reader]:
        yield engines[engine_id]

    return open_engine


__all__ = ["Gang", "Reader", "TrainerError", "opener", "readers"]
