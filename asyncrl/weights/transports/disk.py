"""Disk transport: the trainer writes safetensors into the run directory, every engine loads them from there.

For engines that no process group reaches. The files of the last publication stay until the next but one or the end of
the job: an engine reports their directory as its model path, and one that joins later loads them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio.to_thread
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.data.fleet import EngineEndpoint
from asyncrl.errors import WeightUpdateError
from asyncrl.weights.transfer import (
    BucketFiller,
    EngineOpener,
    TransferResult,
    WeightSource,
    on_each_engine,
    open_clients,
)


class DiskTransport:
    """See the module's docstring; `directory` belongs to it alone. Transfers alternate between two places in it."""

    def __init__(
        self,
        open_engine: EngineOpener,
        *,
        directory: Path,
        bucket_bytes: int,
        timeout_s: float,
        flush_cache: bool = True,
    ) -> None:
        self._open_engine = open_engine
        self._flush_cache = flush_cache
        self._directory = directory.absolute()
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._sink: DiskSink | None = None
        self._transfers = 0

    @property
    def copy(self) -> Path | None:
        return self._place if self._transfers else None

    @property
    def _place(self) -> Path:
        return self._directory / f"transfer-{self._transfers % 2}"

    async def transfer(self, source: WeightSource, engines: Sequence[EngineEndpoint]) -> TransferResult:
        self._transfers += 1
        place = self._place
        self._sink = sink = DiskSink(place, BucketFiller(source.tensor_specs, self._bucket_bytes))
        buckets = len(sink.filler.buckets)
        try:
            await source.export(sink, timeout_s=self._timeout_s * (buckets + 1))
        except (WeightUpdateError, OSError) as error:
            return TransferResult(0, {}, f"{place}: {error}", touched=False)
        async with open_clients(self._open_engine, engines) as clients:
            failures = await on_each_engine(
                clients,
                lambda client, _: client.update_from_disk(
                    str(place), flush_cache=self._flush_cache, timeout_s=self._timeout_s * (buckets + 1)
                ),
            )
        return TransferResult(sink.bytes_written, failures)

    async def abandon(self, engines: Sequence[EngineEndpoint]) -> None:
        """No engine ever waits for the trainer here; only the writing is stopped."""
        if self._sink is not None:
            self._sink.stopped = True

    async def aclose(self) -> None:
        await self.abandon(())
        await anyio.to_thread.run_sync(partial(shutil.rmtree, self._directory, ignore_errors=True))


class DiskSink:
    """Writes one safetensors file per bucket, in the trainer thread."""

    def __init__(self, directory: Path, filler: BucketFiller) -> None:
        self.filler = filler
        self.bytes_written = 0
        self.stopped = False
        self._directory = directory
        self._prepared = False

    def put(self, name: str, tensor: Tensor) -> None:
        if self.stopped:
            raise WeightUpdateError("the transfer was given up")
        if not self._prepared:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory.mkdir(parents=True)
            self._prepared = True
        full = self.filler.add(name, tensor)
        if full is not None:
            index, tensors = full
            bucket = self.filler.buckets[index]
            named = {spec.name: value.detach().cpu().contiguous() for spec, value in zip(bucket, tensors, strict=True)}
            save_file(named, self._directory / f"weights-{index:05d}.safetensors", metadata={"format": "pt"})
            self.bytes_written += sum(spec.size_bytes for spec in bucket)

    def finish(self) -> None:
        self.filler.check_complete()
