"""The thread that writes a copy: the trainer never waits for a disk beyond its patience, engines for none at all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import anyio
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.errors import TrainerError
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS
from asyncrl.weights import copy_writer
from asyncrl.weights.copies import Copies
from asyncrl.weights.copy_writer import FILE, CopyWriter
from tests.inference.conftest import eventually
from tests.weights.fakes import AccountingFleet, ThreadSource, specs_of
from tests.weights.test_publication import ENGINES, ScriptedTransport, run

pytestmark = pytest.mark.anyio


class ExportingTransport(ScriptedTransport):
    """Exports into nothing."""

    async def transfer(self, source, engines, in_use=()):  # type: ignore[no-untyped-def]
        await source.export(Nowhere(), 5.0)
        return await super().transfer(source, engines, in_use)


class Nowhere:
    def put(self, name: str, tensor: Tensor) -> None: ...

    def finish(self) -> None: ...


@pytest.fixture
def fleet() -> AccountingFleet:
    return AccountingFleet(ENGINES)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_writer, "PATIENCE_S", 0.5)
    monkeypatch.setattr(copy_writer, "PATIENCE_S_PER_GB", 0.0)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each wait of the trainer for the disk might have taken, in their order."""
    allowed: list[float] = []
    register = WAITS.register

    def count(what: str, subject: str, deadline_s: float) -> AbstractContextManager[None]:
        if what == "copy of the weights":
            allowed.append(deadline_s)
        return register(what, subject, deadline_s)

    monkeypatch.setattr(WAITS, "register", count)
    return allowed


@pytest.fixture
def disk_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every write to a copy waits until it is set."""
    answers, write = threading.Event(), copy_writer._write_all

    def hang(*arguments: object) -> None:
        assert answers.wait(20)
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(copy_writer, "_write_all", hang)
    yield answers
    answers.set()


def transfer(writer: CopyWriter, tensors: dict[str, Tensor]) -> None:
    writer.start()
    for name, tensor in tensors.items():
        writer.put(name, tensor)
    writer.finish()


def test_a_file_that_takes_no_more_costs_the_copy_and_the_patience(
    tmp_path: Path, impatient: None, waits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe that nobody reads: it takes 64 KiB, and the next write never returns."""
    directory = tmp_path / ".next"
    directory.mkdir()
    os.mkfifo(directory / FILE)
    tensors = {f"w{i}": torch.zeros(5000) for i in range(20)}
    writer = CopyWriter(directory, specs_of(tensors))
    began = time.monotonic()
    transfer(writer, tensors)
    transfer(writer, tensors)  # the transfer is repeated
    assert time.monotonic() - began < 5.0
    assert sum(allowed > 0 for allowed in waits) == 1, "the second transfer has no patience left"
    assert not writer.complete and writer.gave_up and not writer.wait_idle(0.05)
    assert capsys.readouterr().out.count("the disk took longer than") == 1
    assert not WAITS.snapshot()
    with open(directory / FILE, "rb", buffering=0) as reader:  # the write ends, and nothing follows it
        os.set_blocking(reader.fileno(), False)
        while not writer.wait_idle(0.05):
            reader.read(1 << 20)
    assert not writer.complete


def test_what_was_handed_over_and_not_written_is_bounded(
    tmp_path: Path, disk_answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_writer, "BACKLOG_BYTES", 1000)
    tensors = {f"w{i}": torch.full((100,), float(i)) for i in range(10)}
    writer = CopyWriter(tmp_path / ".next", specs_of(tensors))
    trainer = threading.Thread(target=transfer, args=(writer, tensors))
    trainer.start()
    while not WAITS.snapshot():
        time.sleep(0.001)
    assert writer._backlog_bytes == 800
    disk_answers.set()
    trainer.join(5)
    loaded = load_file(tmp_path / ".next" / FILE)
    assert writer.complete and all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_transfer_that_is_repeated_is_written_from_the_beginning(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((1000,), float(i)) for i in range(50)}
    writer = CopyWriter(tmp_path / ".next", specs_of(tensors))
    for _ in range(20):
        writer.start()
        for name in list(tensors)[:30]:
            writer.put(name, tensors[name] - 1)
    transfer(writer, tensors)
    loaded = load_file(tmp_path / ".next" / FILE)
    assert writer.complete and all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


async def test_a_disk_that_hangs_in_mid_write_costs_copies_until_it_answers(
    tmp_path: Path,
    impatient: None,
    waits: list[float],
    disk_answers: threading.Event,
    fleet: AccountingFleet,
    source: ThreadSource,
    events: EventLog,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies, transport = Copies(tmp_path), ExportingTransport()
    report = await run(fleet, source, transport, events, "0.1", copies)
    await run(fleet, source, transport, events, "0.2", copies)
    assert 0.4 <= report.pause_s < 5.0
    assert waits == [0.5], "nobody waits for it a second time"
    assert set(fleet.serving.values()) == {"0.2"}
    monkeypatch.setattr(copy_writer, "PATIENCE_S", 10.0)
    disk_answers.set()
    await eventually(lambda: copies.writer(source.tensor_specs) is not None)
    await run(fleet, source, transport, events, "0.3", copies)
    assert fleet.directories == [None, None, tmp_path / "0.3"]


async def test_large_weights_are_written_before_engines_are_paused(
    tmp_path: Path, fleet: AccountingFleet, source: ThreadSource, events: EventLog
) -> None:
    copies, transport = Copies(tmp_path, ahead_bytes=0), ExportingTransport()
    found: list[bool] = []

    async def look() -> None:
        path = tmp_path / "0.1" / FILE
        found.append(path.exists() and load_file(path).keys() == source.tensors.keys())

    fleet.hooks["begin"] = look
    await run(fleet, source, transport, events, "0.1", copies)
    assert found == [True]
    assert fleet.directories == [tmp_path / "0.1"]
    assert source.exported == 2 * len(source.tensors)


async def test_a_slow_disk_costs_one_wait_and_no_pause_and_is_not_tried_again(
    tmp_path: Path,
    impatient: None,
    waits: list[float],
    disk_answers: threading.Event,
    fleet: AccountingFleet,
    source: ThreadSource,
    events: EventLog,
) -> None:
    copies = Copies(tmp_path, ahead_bytes=0)
    before_pause: list[list[float]] = []

    async def look() -> None:
        before_pause.append([*waits])

    fleet.hooks["begin"] = look
    await run(fleet, source, ExportingTransport(), events, "0.1", copies)
    assert before_pause == [waits] == [[0.5]]
    disk_answers.set()
    exported = source.exported
    for version in ("0.2", "0.3"):
        await run(fleet, source, ExportingTransport(), events, version, copies)
    assert source.exported == exported + 2 * len(source.tensors) and waits == [0.5]
    assert fleet.directories == [None] * 3


@pytest.mark.parametrize("ahead_bytes", [0, 1 << 30], ids=["ahead", "beside the transfer"])
async def test_a_publication_that_is_cancelled_leaves_the_trainer_free_of_a_disk_that_hangs(
    tmp_path: Path,
    disk_answers: threading.Event,
    fleet: AccountingFleet,
    source: ThreadSource,
    events: EventLog,
    ahead_bytes: int,
) -> None:
    copies = Copies(tmp_path, ahead_bytes=ahead_bytes)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, fleet, source, ExportingTransport(), events, "0.1", copies)
        await eventually(lambda: any(wait.what == "copy of the weights" for wait in WAITS.snapshot()))
        tasks.cancel_scope.cancel()
    await source.call(lambda: None, what="the next command", timeout_s=5.0)
    assert fleet.serving == {} and not fleet.paused


async def test_a_trainer_that_fails_while_it_writes_ahead_pauses_nobody(
    tmp_path: Path, fleet: AccountingFleet, source: ThreadSource, events: EventLog
) -> None:
    def fail(number: int) -> None:
        raise TrainerError("trainer rank 1: out of memory")

    source.before_tensor = fail
    copies = Copies(tmp_path, ahead_bytes=0)
    with pytest.raises(TrainerError), anyio.fail_after(5):
        await run(fleet, source, ExportingTransport(), events, "0.1", copies)
    assert fleet.leases == 0 and events.recent[-1]["kind"] == "weight_update_failed"
    source.before_tensor = None
    await run(fleet, source, ExportingTransport(), events, "0.1", copies)
    assert fleet.directories == [tmp_path / "0.1"]
