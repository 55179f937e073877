"""The weights of a scripted engine: the tensors that it holds, the groups that it joined, the update session.

Invariants, as measured on the real engine
- The engine ignores an unknown tensor name without an error. A wrong shape leaves the weights partly updated.
- The keys of a group in the store nest as in torch's own helper.
- Only the other end can free a blocked receive.
- (Over NCCL, as its sources say.) A group forms in its first receive. A receive is answered once it is queued on the
  GPU. What needs the tensors waits for that queue, and for ever where a sender has left: nothing ends its kernel.
- A message of several tensors has each at a multiple of its element's size.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import pickle
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from asyncrl.tasks import finish_all

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

T = TypeVar("T")
_TIMEOUT = timedelta(seconds=20)
"""The real engine waits half an hour. Here the threads must end with their test."""
_THREADS = 1000


class Refused(Exception):
    """The engine answers 400 with this message."""


def default_tensors() -> dict[str, Tensor]:
    """Returns the weights of an engine whose test does not care about them."""
    return {"embed": torch.arange(8, dtype=torch.float32), "layer": torch.ones(4, 2)}


class HeldWeights:
    """The weights of one life of an engine with `ranks` tensor-parallel ranks. Each rank holds all of them."""

    def __init__(self, base: Mapping[str, Tensor], ranks: int) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in base.items()}
        """Tensors by name."""
        self.session = False
        """True while an update session is open."""
        self.groups: dict[str, list[_Group]] = {}
        """By name, the process groups of all ranks."""
        self.joined: list[str] = []
        """Names of all groups that it joined in this life."""
        self._ranks = ranks
        self._digest: int | None = None
        self._queued: list[_Queued] = []
        """Receives over NCCL that have not ended, oldest first."""

    @property
    def digest(self) -> int:
        """Hash of all values. Generated tokens depend on it."""
        if self._digest is None:
            self._digest = zlib.crc32("".join(self._checksums().values()).encode())
        return self._digest

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copies the tensors whose names it knows. At a wrong shape it raises Refused, with earlier tensors loaded."""
        self._digest = None
        for name, tensor in named:
            held = self.tensors.get(name)
            if held is None:
                continue
            if held.shape != tensor.shape:
                raise Refused(
                    f"Failed to update parameter online: {name}: {tuple(tensor.shape)} does not fit "
                    f"{tuple(held.shape)}. The full weights of the ModelRunner are partially updated. "
                    "Please discard the whole weights."
                )
            held.copy_(tensor)

    def reset(self) -> None:
        """Fills all tensors with random numbers, as `reset_tensors` does."""
        self._digest = None
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape))

    def rank_checksums(self, skip: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Returns the checksums of each rank, without tensors whose names contain one of `skip`."""
        checksums = self._checksums()
        overall = hashlib.blake2b("".join(checksums.values()).encode(), digest_size=16).hexdigest()
        shown = {name: checksum for name, checksum in checksums.items() if not any(part in name for part in skip)}
        return [
            {"checksums": shown, "per_gpu_checksum": overall, "parallelism_info": [{"tp_rank": rank}]}
            for rank in range(self._ranks)
        ]

    def _checksums(self) -> dict[str, str]:
        return {name: _checksum(tensor) for name, tensor in self.tensors.items()}

    # transports

    async def join(self, body: Mapping[str, Any]) -> None:
        """Joins a group with all ranks; blocks until rank 0 of the group has joined. Raises Refused on failure."""
        name, world_size = body["group_name"], body["world_size"]
        if name in self.groups:
            raise Refused("group name has already been created")

        def join(rank: int) -> _Group:
            store = TCPStore(body["master_address"], body["master_port"], world_size, is_master=False, timeout=_TIMEOUT)
            nested = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
            group = _Group(
                lambda: ProcessGroupGloo(nested, rank, world_size, _TIMEOUT), queues=body["backend"] == "nccl"
            )
            if not group.queues:
                group.form()
            return group

        ranks = range(body["rank_offset"], body["rank_offset"] + self._ranks)
        try:
            self.groups[name] = await _on_all_ranks([partial(join, rank) for rank in ranks])
        except RuntimeError as error:
            raise Refused(f"Failed to initialize custom process group: {error}.") from error
        self.joined.append(name)

    def leave(self, name: str) -> None:
        """Leaves a group; raises Refused if it is unknown."""
        if self.groups.pop(name, None) is None:
            raise Refused("The group to be destroyed does not exist.")

    async def receive(self, body: Mapping[str, Any]) -> None:
        """Receives and loads one bucket of a broadcast, by tensor or in one message; raises Refused if that fails."""
        name = body["group_name"]
        if name not in self.groups:
            known = list(self.groups)
            raise Refused(f"Failed to receive weights: Group {name} not in {known}. Please call init first.")
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        specs = list(zip(body["names"], dtypes, body["shapes"], strict=True))
        flattened = body.get("load_format") == "flattened_bucket"
        groups = self.groups[name]
        calls = [partial(_receive, group, specs, flattened) for group in groups]
        try:
            await _on_all_ranks([group.form for group in groups])
            if not groups[0].queues:
                self.load((await _on_all_ranks(calls))[0])
        except (RuntimeError, ValueError) as error:
            raise Refused(f"Failed to receive weights: {error}") from error
        if groups[0].queues:
            self._queued.append(_Queued(calls, self._queued[-1] if self._queued else None))

    async def settle(self) -> None:
        """Waits for the receives that are queued, and loads them; for ever where one fails."""
        while self._queued:
            first = self._queued[0]
            while not first.ended.is_set() or first.received is None:  # noqa: ASYNC110 - threads end it
                await anyio.sleep(0.002)
            self.load(self._queued.pop(0).received or ())

    async def load_directory(self, directory: str) -> None:
        """Loads safetensors files; raises Refused, with the former weights, at a wrong shape or unreadable files."""
        before = {name: tensor.clone() for name, tensor in self.tensors.items()}
        try:
            self.load(await anyio.to_thread.run_sync(_read_directory, directory))
        except (OSError, SafetensorError) as error:
            raise Refused(f"Failed to get weights iterator: {error}.") from error
        except Refused as refusal:
            self.tensors = before
            raise Refused(f"Failed to update weights: {refusal}.\nRolling back to original weights.") from refusal

    def load_handles(self, serialized: Sequence[str], flattened: bool) -> None:
        """Loads tensors of other processes on this machine: each rank opens the handles that are meant for it.

        Raises Refused where two ranks read different tensors: what one rank alone has would be torn.
        """
        assert len(serialized) == self._ranks
        by_rank = [_opened(pickle.load(io.BytesIO(base64.b64decode(text))), flattened) for text in serialized]
        for named in by_rank[1:]:
            if named.keys() != by_rank[0].keys() or not all(torch.equal(t, by_rank[0][n]) for n, t in named.items()):
                raise Refused("the ranks of the engine read different tensors")
        self.load(by_rank[0].items())


def _opened(handles: Any, flattened: bool) -> dict[str, Tensor]:
    """The tensors behind the handles of one rank, copied."""
    if not flattened:
        return {name: tensor.clone() for name, tensor in handles}
    flat = handles["flattened_tensor"]
    return {
        place.name: flat[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape).clone()
        for place in handles["metadata"]
    }


class _Group:
    """One rank's end of a group."""

    def __init__(self, make: Callable[[], ProcessGroupGloo], *, queues: bool) -> None:
        self.queues = queues
        """Receives are answered before they have ended, as over NCCL."""
        self._make = make
        self.group: Any = None

    def form(self) -> None:
        """Blocks until the other end has come, once."""
        if self.group is None:
            self.group = self._make()

    def took_one(self) -> None:
        """Over NCCL the sender's kernel ends with the receiver's."""
        if self.queues:
            self.group.allreduce([torch.zeros(1)]).wait()


class _Queued:
    """A receive of all ranks, after another one; in threads that stand for the GPU."""

    def __init__(self, calls: Sequence[Callable[[], list[tuple[str, Tensor]]]], before: _Queued | None) -> None:
        self.ended = threading.Event()
        self.received: list[tuple[str, Tensor]] | None = None
        """None after a failure: the kernel spins."""
        self._before = before
        self._calls = calls
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        if self._before is not None:
            self._before.ended.wait()
        if self._before is None or self._before.received is not None:
            ranks = [threading.Thread(target=_tried, args=(call,), daemon=True) for call in self._calls[1:]]
            for rank in ranks:
                rank.start()
            self.received = _tried(self._calls[0])
            for rank in ranks:
                rank.join()
        self._before = None
        self.ended.set()


def _tried(receive: Callable[[], list[tuple[str, Tensor]]]) -> list[tuple[str, Tensor]] | None:
    try:
        return receive()
    except RuntimeError:
        return None


def _checksum(tensor: Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(memoryview(data), digest_size=16).hexdigest()


def _read_directory(directory: str) -> list[tuple[str, Tensor]]:
    paths = sorted(Path(directory).glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"Cannot find any model weights with `{directory}`")
    return [item for path in paths for item in load_file(path).items()]


def _receive(
    group: _Group, specs: Sequence[tuple[str, torch.dtype, list[int]]], flattened: bool
) -> list[tuple[str, Tensor]]:
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = _TIMEOUT
    received = [(name, torch.empty(shape, dtype=dtype)) for name, dtype, shape in specs]
    broadcast: Any = group.group
    if not flattened:
        works = [broadcast.broadcast([tensor], options) for _, tensor in received]
        for work in works:
            work.wait()
            group.took_one()
        return received
    offset = 0
    for name, tensor in received:
        if offset % tensor.element_size():
            raise ValueError(f"Unaligned received tensor {name}: byte offset {offset}, dtype {tensor.dtype}")
        offset += tensor.nbytes
    flat = torch.empty(sum(tensor.nbytes for _, tensor in received), dtype=torch.uint8)
    broadcast.broadcast([flat], options).wait()
    group.took_one()
    offset = 0
    for _, tensor in received:
        tensor.copy_(flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        offset += tensor.nbytes
    return received


async def _on_all_ranks(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Runs each blocking call in its own thread, as an engine's ranks would; raises the first error once all ended."""
    results: dict[int, T] = {}
    limiter = anyio.CapacityLimiter(_THREADS)

    async def one(rank: int, call: Callable[[], T]) -> None:
        results[rank] = await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter)

    await finish_all(*(partial(one, rank, call) for rank, call in enumerate(calls)))
    return [results[rank] for rank in range(len(calls))]
