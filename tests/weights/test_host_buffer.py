"""Exported tensors in host memory: one buffer, bounded, which belongs to the newest recording."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.errors import WeightUpdateError
from asyncrl.weights.host_buffer import HostBuffer, Recording
from tests.weights.fakes import Nowhere, payload_of, random_tensors

pytestmark = pytest.mark.anyio


async def record(buffer: HostBuffer, tensors: dict[str, Tensor], sink: Any = None) -> Recording:
    recording = Recording(buffer, payload_of(tensors))
    recording.reserve()
    await recording.payload.export(sink or Nowhere(), 5.0)
    return recording


def bytes_of(tensors: dict[str, Tensor]) -> bytes:
    return b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values())


@pytest.mark.parametrize("block_bytes", [7, 4096, 1 << 30])
async def test_tensors_lie_one_after_another_wherever_blocks_end(block_bytes: int) -> None:
    tensors = random_tensors()
    recording = await record(HostBuffer(block_bytes), tensors)
    assert recording.complete and recording.held
    assert b"".join(recording.read()) == bytes_of(tensors)


async def test_tensors_on_the_host_are_copied_since_the_trainer_goes_on_with_them() -> None:
    tensors = random_tensors()
    expected = bytes_of(tensors)
    recording = await record(HostBuffer(), tensors)
    for tensor in tensors.values():
        tensor.zero_()
    assert b"".join(recording.read()) == expected


async def test_a_tensor_that_is_no_run_of_memory_is_taken_as_one() -> None:
    tensors = {"turned": torch.arange(12.0).reshape(3, 4).t(), "next": torch.ones(2)}
    recording = await record(HostBuffer(), tensors)
    assert b"".join(recording.read()) == bytes_of({n: t.contiguous() for n, t in tensors.items()})


async def test_every_publication_uses_the_same_memory_as_much_as_the_weights_take() -> None:
    buffer, tensors = HostBuffer(), random_tensors()
    places = set()
    for seed in range(3):
        await record(buffer, random_tensors(seed))
        places.add(tuple(block.data_ptr() for block in buffer._blocks))
        assert buffer.size_bytes == len(bytes_of(tensors))
    assert len(places) == 1
    few = {"norm": tensors["layer.0.norm"]}
    recording = await record(buffer, few)
    assert b"".join(recording.read()) == bytes_of(few)
    larger = tensors | {"more": torch.ones(1000)}
    recording = await record(buffer, larger)
    assert b"".join(recording.read()) == bytes_of(larger)
    assert buffer.size_bytes == len(bytes_of(larger))


async def test_the_buffer_belongs_to_the_newest_recording_from_its_first_tensor_on() -> None:
    buffer = HostBuffer()
    older = await record(buffer, random_tensors(0))
    seen: list[bool] = []

    class Looking(Nowhere):
        def put(self, name: str, tensor: Tensor) -> None:
            seen.append(older.held)

    newer = Recording(buffer, payload_of(random_tensors(1)))
    newer.reserve()
    assert older.held, "the export has not begun"
    await newer.payload.export(Looking(), 5.0)
    assert not any(seen) and newer.held


async def test_a_recording_that_was_given_up_takes_nothing_from_a_newer_one() -> None:
    buffer = HostBuffer()
    older, newer = await record(buffer, random_tensors(0)), await record(buffer, random_tensors(1))
    older.give_up()
    assert newer.held
    newer.give_up()
    assert not newer.held


async def test_an_export_that_fails_leaves_an_incomplete_recording_until_it_is_repeated() -> None:
    tensors = random_tensors()

    class Failing(Nowhere):
        def put(self, name: str, tensor: Tensor) -> None:
            if name == "big":
                raise WeightUpdateError("the wire broke")

    recording = await record(HostBuffer(), tensors)
    with pytest.raises(WeightUpdateError, match="the wire broke"):
        await recording.payload.export(Failing(), 5.0)
    assert not recording.complete
    await recording.payload.export(Nowhere(), 5.0)
    assert recording.complete and b"".join(recording.read()) == bytes_of(tensors)


async def test_a_machine_without_memory_loses_the_copy_and_not_the_export(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none_left(*size: int, **how: Any) -> Tensor:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch, "empty", none_left)
    buffer = HostBuffer()
    recording = await record(buffer, random_tensors())
    assert not recording.complete and buffer.size_bytes == 0
    assert "no host memory" in capsys.readouterr().out


async def test_beside_a_gpu_memory_is_page_locked_and_its_copies_are_waited_for_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPU's part, in its order; nothing of it runs here."""
    calls: list[str] = []
    empty = torch.empty

    def allocate(size: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        calls.append(f"pin {size}" if pin_memory else f"take {size}")
        return empty(size, dtype=dtype)

    class Stream:
        def synchronize(self) -> None:
            calls.append("synchronize")

    class Noting(Nowhere):
        def finish(self) -> None:
            calls.append("finish")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: calls.append("give back"))
    buffer = HostBuffer(4096)
    recording = await record(buffer, {"w": torch.ones(1500)}, Noting())
    assert calls == ["pin 4096", "pin 1904", "finish", "synchronize"] and recording.complete
    await record(buffer, {"w": torch.ones(1500)}, Noting())
    assert calls[4:] == ["finish", "synchronize"], "page-locking is slow, and done once"
    buffer.release()
    assert calls[6:] == ["give back"] and buffer.size_bytes == 0


async def test_memory_that_was_given_back_is_no_recording_and_is_taken_again() -> None:
    buffer, tensors = HostBuffer(), random_tensors()
    recording = await record(buffer, tensors)
    buffer.release()
    assert not recording.held and buffer.size_bytes == 0
    again = await record(buffer, tensors)
    assert again.held and b"".join(again.read()) == bytes_of(tensors)
