"""Copies that are written while training goes on: what crosses them costs the copy, never a publication or a step."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import anyio
import pytest
from safetensors.torch import load_file

from asyncrl.errors import TrainerError, WeightUpdateError
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS, format_waits
from asyncrl.tasks import Background
from asyncrl.weights import copy_file
from asyncrl.weights.copies import Copies
from asyncrl.weights.copy_file import FILE
from asyncrl.weights.transfer import TransferResult
from tests.inference.conftest import eventually
from tests.weights.conftest import MakeCopies
from tests.weights.fakes import AccountingFleet, ThreadSource, random_tensors
from tests.weights.test_copies import holds, names
from tests.weights.test_publication import COLLATERAL, ENGINES, GONE, ScriptedTransport, run

pytestmark = pytest.mark.anyio


class Job:
    """A trainer, a fleet and the copies between them."""

    def __init__(self, copies: Copies, source: ThreadSource, events: EventLog) -> None:
        self.copies, self.source, self.events = copies, source, events
        self.fleet = AccountingFleet(ENGINES)
        self.transport = ScriptedTransport(exports=True)

    async def publish(self, version: str, copy_timeout_s: float = 60.0) -> None:
        """Publishes weights that no other version has."""
        self.source.tensors = random_tensors(crc32(version.encode()))
        with anyio.fail_after(30.0):
            await run(
                self.fleet,
                self.source,
                self.transport,
                self.events,
                version,
                self.copies,
                copy_timeout_s=copy_timeout_s,
            )
        assert {self.fleet.serving[e.engine_id] for e in ENGINES} == {version}

    async def written(self, directory: Path) -> bool:
        """How the writing of a copy ended, once it has."""
        await eventually(lambda: self.fleet.copies[directory] is not None)
        return bool(self.fleet.copies[directory])

    def holds(self, directory: Path) -> bool:
        return holds(directory, random_tensors(crc32(directory.name.encode())))

    async def trainer_is_free(self) -> None:
        await self.source.call(lambda: None, what="the next command", timeout_s=10.0)


@pytest.fixture
def job(tmp_path: Path, make_copies: MakeCopies, source: ThreadSource, events: EventLog) -> Job:
    return Job(make_copies(tmp_path), source, events)


async def test_nothing_is_written_before_the_commit_and_the_copy_is_that_of_the_commit(
    job: Job, tmp_path: Path
) -> None:
    found: list[list[str]] = []

    async def look() -> None:
        found.append(names(tmp_path))

    job.fleet.hooks = {"begin": look, "commit": look}
    job.transport.hooks["transfer"] = look
    await job.publish("0.1")
    assert found == [[]] * 3
    for tensor in job.source.tensors.values():
        tensor.zero_()  # the trainer goes on
    assert await job.written(tmp_path / "0.1") and job.holds(tmp_path / "0.1")
    assert job.fleet.directories == [tmp_path / "0.1"]
    assert job.source.exported == len(job.source.tensors), "it was exported once"


async def test_a_copy_that_is_being_written_is_a_wait_that_names_the_disk(
    job: Job, tmp_path: Path, disk_answers: threading.Event
) -> None:
    await job.publish("0.1")
    await eventually(lambda: bool(WAITS.snapshot()))
    assert f"copy of the weights from the disk of {tmp_path / '0.1'}" in format_waits()
    assert job.fleet.copies == {tmp_path / "0.1": None}
    disk_answers.set()
    assert await job.written(tmp_path / "0.1")
    assert not WAITS.snapshot()


async def test_the_newest_version_wins_over_a_copy_that_is_still_being_written(
    job: Job, tmp_path: Path, disk_answers: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("0.1", "0.2", "0.3"):
        await job.publish(version)
        await job.trainer_is_free()
    assert job.fleet.copies[tmp_path / "0.3"] is None
    disk_answers.set()
    assert await job.written(tmp_path / "0.3") and job.holds(tmp_path / "0.3")
    assert not await job.written(tmp_path / "0.1") and not await job.written(tmp_path / "0.2")
    assert names(tmp_path) == ["0.3"]
    assert capsys.readouterr().out.count("newer weights were published before the disk") == 2


async def test_a_copy_is_given_up_by_the_export_of_a_newer_version_and_not_by_its_wait_for_engines(
    job: Job, tmp_path: Path, disk_answers: threading.Event
) -> None:
    await job.publish("0.1")

    async def no_engine() -> None:
        raise WeightUpdateError("no engine can take weights")

    job.fleet.hooks["begin"] = no_engine
    with pytest.raises(WeightUpdateError):
        await job.publish("0.2")
    disk_answers.set()
    assert await job.written(tmp_path / "0.1") and job.holds(tmp_path / "0.1")


async def test_a_publication_that_fails_in_its_transfer_leaves_no_copy_of_torn_tensors(
    job: Job, tmp_path: Path, disk_answers: threading.Event
) -> None:
    await job.publish("0.1")
    broken = TransferResult(0, {e.engine_id: COLLATERAL for e in ENGINES}, "the wire broke")
    job.transport.results = [broken, broken]
    with pytest.raises(WeightUpdateError):
        await job.publish("0.2")
    disk_answers.set()
    assert not await job.written(tmp_path / "0.1"), "its tensors were written over"
    assert job.fleet.directories == [tmp_path / "0.1"] and not (tmp_path / "0.2").exists()
    await job.publish("0.3")
    assert await job.written(tmp_path / "0.3") and job.holds(tmp_path / "0.3")


async def test_a_trainer_that_fails_in_its_export_leaves_no_copy(job: Job, tmp_path: Path) -> None:
    def fail(number: int) -> None:
        if number == 5:
            raise TrainerError("trainer rank 1: out of memory")

    job.source.before_tensor = fail
    with pytest.raises(TrainerError):
        await job.publish("0.1")
    assert job.fleet.directories == [] and names(tmp_path) == []
    job.source.before_tensor = None
    await job.publish("0.2")
    assert await job.written(tmp_path / "0.2") and job.holds(tmp_path / "0.2")


async def test_a_transfer_that_is_repeated_is_copied_as_it_was_at_last(job: Job, tmp_path: Path) -> None:
    job.transport.results = [TransferResult(0, {"engine-1": GONE}, "connection reset")]

    async def change() -> None:
        if len(job.transport.asked) == 1:
            job.source.tensors = random_tensors(1)  # what the first export delivered is not what the second does

    job.transport.hooks["transfer"] = change
    await run(job.fleet, job.source, job.transport, job.events, "0.1", job.copies)
    assert await job.written(tmp_path / "0.1") and holds(tmp_path / "0.1", random_tensors(1))
    assert job.source.exported == 2 * len(job.source.tensors)


async def test_a_disk_that_hangs_past_the_deadline_costs_copies_until_it_answers(
    job: Job, tmp_path: Path, disk_answers: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    await job.publish("0.1", copy_timeout_s=0.2)
    assert not await job.written(tmp_path / "0.1")
    assert "no copy of the weights from the disk of" in capsys.readouterr().out
    for version in ("0.2", "0.3"):
        await job.publish(version)
    assert job.fleet.directories == [tmp_path / "0.1", None, None]
    assert "the disk has not answered yet" in capsys.readouterr().out
    disk_answers.set()
    await eventually(lambda: not job.copies._disk.locked())
    await job.publish("0.4")
    assert await job.written(tmp_path / "0.4") and job.holds(tmp_path / "0.4")
    assert names(tmp_path) == ["0.4"]


async def test_a_file_that_takes_no_more_costs_the_copy_and_nobody_waits_for_it(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe that nobody reads: it takes 64 KiB, and the next write never returns."""
    (tmp_path / ".next").mkdir()
    os.mkfifo(tmp_path / ".next" / FILE)
    # Else the opening would wait for a reader.
    reader = os.open(tmp_path / ".next" / FILE, os.O_RDONLY | os.O_NONBLOCK)
    try:
        await job.publish("0.1", copy_timeout_s=0.2)
        assert not await job.written(tmp_path / "0.1")
        assert not WAITS.snapshot() and job.copies._disk.locked()
        await job.publish("0.2")
        assert job.fleet.directories == [tmp_path / "0.1", None]

        def drain() -> bool:
            with suppress(BlockingIOError):
                os.read(reader, 1 << 20)
            return not job.copies._disk.locked()

        await eventually(drain)
    finally:
        os.close(reader)
    assert names(tmp_path) in ([], [".next"])


async def test_a_publication_that_is_cancelled_in_its_commit_keeps_the_copy_of_what_was_committed(
    job: Job, tmp_path: Path, disk_answers: threading.Event
) -> None:
    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            scope.cancel()

        job.fleet.hooks["commit"] = cancel
        await job.publish("0.1")
    assert scope.cancelled_caught and set(job.fleet.serving.values()) == {"0.1"}
    disk_answers.set()
    assert await job.written(tmp_path / "0.1") and job.holds(tmp_path / "0.1")


@pytest.mark.parametrize("how", ["raises", "hangs"])
async def test_a_commit_that_fails_says_that_the_copy_which_it_promised_will_not_come(
    job: Job, tmp_path: Path, how: str
) -> None:
    async def fail() -> None:
        if how == "hangs":
            await anyio.sleep_forever()
        raise WeightUpdateError("no engine holds them")

    job.fleet.hooks["commit"] = fail
    job.fleet.settle_s = 0.2
    with pytest.raises(WeightUpdateError):
        await job.publish("0.1")
    assert job.fleet.copies == {tmp_path / "0.1": False}
    job.fleet.hooks.clear()
    job.fleet.settle_s = 5.0
    await job.publish("0.2")
    assert await job.written(tmp_path / "0.2") and names(tmp_path) == ["0.2"]


async def test_a_publication_that_is_cancelled_leaves_the_trainer_free_of_a_disk_that_hangs(
    job: Job, tmp_path: Path, disk_answers: threading.Event
) -> None:
    await job.publish("0.1")
    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            scope.cancel()
            await anyio.sleep_forever()

        job.transport.hooks["transfer"] = cancel
        await job.publish("0.2")
    assert scope.cancelled_caught
    await job.trainer_is_free()
    assert not job.fleet.paused


async def test_the_end_of_the_job_gives_up_what_is_being_written_and_leaves_nothing(
    tmp_path: Path, make_copies: MakeCopies, source: ThreadSource, events: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(make_copies(tmp_path / "published"), source, events)
    begun, write, blocks = threading.Event(), copy_file._write_all, 0

    def slowly(*arguments: Any) -> None:
        nonlocal blocks
        blocks += 1
        begun.set()
        ended.wait(20 if blocks == 1 else 0)
        write(*arguments)

    ended = threading.Event()
    monkeypatch.setattr(copy_file, "_write_all", slowly)
    await job.publish("0.1")
    await anyio.to_thread.run_sync(begun.wait)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(job.copies.aclose)
        await anyio.wait_all_tasks_blocked()
        ended.set()
    assert names(tmp_path) == [] and blocks <= 2
    assert not await job.written(tmp_path / "published" / "0.1")


async def test_the_end_of_the_job_is_not_held_by_a_disk_that_hangs(
    job: Job, tmp_path: Path, disk_answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncrl.weights import copies

    monkeypatch.setattr(copies, "REMOVE_TIMEOUT_S", 0.2)
    await job.publish("0.1")
    await eventually(lambda: (tmp_path / ".next").exists())
    with anyio.fail_after(10.0), anyio.CancelScope() as scope:
        scope.cancel()  # as where the job has failed
        await job.copies.aclose()
    disk_answers.set()
    assert not await job.written(tmp_path / "0.1")
    assert not (tmp_path / "0.1").exists()


async def test_a_job_that_ends_without_a_word_tells_the_fleet_all_the_same(
    tmp_path: Path, source: ThreadSource, events: EventLog, disk_answers: threading.Event
) -> None:
    async with anyio.create_task_group() as tasks:
        job = Job(Copies(tmp_path, Background(tasks)), source, events)
        await job.publish("0.1")
        await eventually(lambda: job.copies._disk.locked())
        tasks.cancel_scope.cancel()
    assert job.fleet.copies == {tmp_path / "0.1": False}


async def test_a_machine_without_memory_for_a_copy_publishes_all_the_same(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(size_bytes: int) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(job.copies._buffer, "reserve", none_left)
    await job.publish("0.1")
    assert job.fleet.directories == [None] and names(tmp_path) == []


async def test_a_hundred_publications_take_the_memory_of_one(job: Job, tmp_path: Path) -> None:
    size = sum(spec.size_bytes for spec in job.source.payload.specs)
    for step in range(100):
        await job.publish(f"0.{step}")
        assert job.copies._buffer.size_bytes == size
    assert await job.written(tmp_path / "0.99") and job.holds(tmp_path / "0.99")
    assert set(load_file(tmp_path / "0.99" / FILE)) == set(job.source.tensors)
    assert len(names(tmp_path)) <= 3
