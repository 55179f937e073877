"""While data are read, a line every few seconds says how far that is."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from asyncrl.data.sources import Progress
from asyncrl.errors import DataError
from asyncrl.observability.waits import WAITS
from asyncrl.rollout import reading
from asyncrl.rollout.reading import read_in_thread

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_TELL_EVERY_S", 0.02)


async def test_reading_tells_how_far_it_is_also_where_no_record_comes() -> None:
    release = threading.Event()

    def read(progress: Progress) -> str:
        release.wait(10)
        progress.read, progress.ready = 1000, 512
        return "prompts"

    told: list[dict[str, Any]] = []
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_in_thread, read, "data", "slow:source")
            with anyio.fail_after(10):
                while not (told := [dict(entry) for entry in logs]):  # noqa: ASYNC110 (logs tell nobody)
                    await anyio.sleep(0.01)
            waits = [wait for wait in WAITS.snapshot() if wait.subject == "slow:source"]
            assert [wait.what for wait in waits] == ["records of data"]
            release.set()
    first = told[0]
    assert (first["event"], first["setting"], first["source"]) == ("reading data", "data", "slow:source")
    assert (first["records"], first["prompts"], first["log_level"]) == (0, 0, "info")
    assert not [wait for wait in WAITS.snapshot() if wait.subject == "slow:source"]


async def test_what_reading_returns_or_raises_arrives_as_it_is() -> None:
    def fail(progress: Progress) -> str:
        raise DataError("no")

    assert await read_in_thread(lambda progress: progress.read, "data", "a.jsonl") == 0
    with pytest.raises(DataError, match=r"^no$"):
        await read_in_thread(fail, "data", "a.jsonl")


async def test_a_cancelled_job_does_not_wait_for_a_source_without_end() -> None:
    release = threading.Event()
    try:
        with anyio.fail_after(5), anyio.move_on_after(0.05) as scope:
            await read_in_thread(lambda progress: release.wait(20), "data", "slow:source")
        assert scope.cancelled_caught
    finally:
        release.set()
