"""What is said of a process that ended."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from asyncrl.host import ProcessExit
from asyncrl.inference.engines.exits import describe_exit

Disk = namedtuple("Disk", "total used free")


@pytest.mark.parametrize(
    ("returncode", "free_mib", "told"), [(-7, 0, True), (-7, 900, True), (1, 0, True), (1, 900, False)]
)
def test_full_shared_memory_is_named_where_it_may_have_ended_an_engine(
    monkeypatch: pytest.MonkeyPatch, returncode: int, free_mib: int, told: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(1 << 30, 0, free_mib << 20))
    exited = ProcessExit("engine-0", 17, returncode, "last words")
    text = describe_exit("engine-0", exited, Path("engine-0.log"), "while starting")
    assert (f"/dev/shm has {free_mib} of 1024 MiB free" in text and "--shm-size" in text) is told
    assert ("SIGBUS" in text) is (told or returncode == -7)
