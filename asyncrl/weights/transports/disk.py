"""Disk transport: the trainer writes safetensors into the run directory, and every engine loads them from there.

It serves engines that no process group reaches. Each transfer has a directory of its own. A directory that is in use
stays, so that an engine that joins later loads the published weights from it. The next transfer removes the others,
also those that a killed job left. The end of the job removes the rest.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
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
    Payload,
    TransferResult,
    WeightSource,
    on_each_engine,
    open_clients,
)


class DiskTransport:
    """See the module's docstring; `directory` belongs to the transport alone."""

    leaves_copy = True

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
        """The directory of the last transfer; None before the first."""
        return self._place if self._transfers else None

    @property
    def _place(self) -> Path:
        return self._directory / f"transfer-{self._transfers:06d}"

    async def transfer(
        self,
        source: WeightSource,
        payload: Payload,
        engines: Sequence[EngineEndpoint],
        in_use: Collection[Path] = (),
    ) -> TransferResult:
        """See `Transport`; the trainer has written all before the first engine loads."""
        self._transfers += 1
        place = self._place
        filler = BucketFiller(payload.specs, self._bucket_bytes)
        self._sink = sink = DiskSink(place, filler, in_use=frozenset(in_use))
        buckets = len(sink.filler.buckets)
        try:
            await payload.export(sink, 2 * self._timeout_s)
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
        """Stops the writing. No engine waits for the trainer here."""
        if self._sink is not None:
            self._sink.stopped = True

    async def aclose(self) -> None:
        """Removes every directory."""
        await self.abandon(())
        await anyio.to_thread.run_sync(partial(shutil.rmtree, self._directory, ignore_errors=True))


class DiskSink:
    """Writes one safetensors file per bucket, in the trainer thread."""

    def __init__(self, directory: Path, filler: BucketFiller, *, in_use: frozenset[Path]) -> None:
        """Removes what lies beside `directory` and is not `in_use`, before the first tensor."""
        self.filler = filler
        self.bytes_written = 0
        self.stopped = False
        self._directory = directory
        self._in_use = in_use
        self._prepared = False

    def put(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor, and writes the bucket that it completes; raises OSError, WeightUpdateError once stopped."""
        if self.stopped:
            raise WeightUpdateError("the transfer was given up")
        if not self._prepared:
            self._directory.parent.mkdir(parents=True, exist_ok=True)
            for other in tuple(self._directory.parent.iterdir()):
                if other not in self._in_use:
                    shutil.rmtree(other, ignore_errors=True)
            self._directory.mkdir()
            self._prepared = True
        full = self.filler.add(name, tensor)
        if full is not None:
            index, tensors = full
            bucket = self.filler.buckets[index]
            named = {spec.name: value.detach().cpu().contiguous() for spec, value in zip(bucket, tensors, strict=True)}
            save_file(named, self._directory / f"weights-{index:05d}.safetensors", metadata={"format": "pt"})
            self.bytes_written += sum(spec.size_bytes for spec in bucket)

    def finish(self) -> None:
        """Raises WeightUpdateError when the export was too short."""
        self.filler.check_complete()
