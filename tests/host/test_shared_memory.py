"""Files in /dev/shm go with the process tree that made them, and with no other."""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.host import EngineHost, ProcessSpec
from asyncrl.host.proc import pids
from asyncrl.host.shared_memory import mapped_by
from tests.inference.conftest import eventually

PythonSpec = Callable[..., ProcessSpec]
pytestmark = pytest.mark.anyio

MAP = """
import mmap, os, signal, sys, time
def hold(path):
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, 16)
    return mmap.mmap(fd, 16)
"""
CHILD_HOLDS = (
    MAP
    + """
if os.fork() == 0:
    held = [hold(path) for path in sys.argv[2:]]
    open(sys.argv[1], "w").close()
signal.pause()
"""
)
DIES_AT_ONCE = MAP + "held = hold(sys.argv[1]); os.kill(os.getpid(), signal.SIGKILL)"
CHILD_DIES_AT_ONCE = (
    MAP
    + """
guardian = os.getppid()
def looks():  # it sleeps between two looks
    with open(f"/proc/{guardian}/status") as status:
        return int(status.read().split("\\nvoluntary_ctxt_switches:")[1].split()[0])
def let_it_look():
    until = looks() + 3
    while looks() < until:
        time.sleep(0.05)
if os.fork() == 0:
    seen = hold(sys.argv[2])  # a new file: it looks who has mapped it
    let_it_look()
    held = hold(sys.argv[1])
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
let_it_look()
"""
)


@pytest.fixture
def shm() -> Iterator[Callable[[str], Path]]:
    """A path in /dev/shm whose name begins as given."""
    made: list[Path] = []

    def path(prefix: str) -> Path:
        made.append(Path(f"/dev/shm/{prefix}asyncrl-test-{secrets.token_hex(6)}"))
        return made[-1]

    yield path
    for left in made:
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


async def test_what_a_child_had_mapped_goes_with_the_tree_and_what_is_anybody_elses_stays(
    host: EngineHost, python: PythonSpec, tmp_path: Path, shm: Callable[[str], Path]
) -> None:
    ours, older, mapped_here, directory = shm("any-name-"), shm("sem."), shm("psm_"), shm("models-")
    older.write_bytes(bytes(16))
    directory.mkdir()
    ready = tmp_path / "ready"
    paths = (ours, older, mapped_here, directory / "model.safetensors")
    with older.open("r+b") as file, mmap.mmap(file.fileno(), 16):  # else any other job on this machine may take it
        await host.spawn(python("engine-0", CHILD_HOLDS, str(ready), *map(str, paths)))
        await eventually(ready.exists)
    unmapped = shm("notes-")
    unmapped.write_text("of somebody else")
    with mapped_here.open("r+b") as file, mmap.mmap(file.fileno(), 16):
        await host.kill("engine-0")
        assert not ours.exists()
        assert all(path.exists() for path in (older, mapped_here, directory / "model.safetensors", unmapped))


@pytest.mark.parametrize("script", [DIES_AT_ONCE, CHILD_DIES_AT_ONCE], ids=["process", "child"])
async def test_a_file_that_was_made_in_the_last_instant_goes_too(
    host: EngineHost, python: PythonSpec, shm: Callable[[str], Path], script: str
) -> None:
    path, other = shm("sem."), shm("sem.")
    await host.spawn(python("engine-0", script, str(path), str(other)))
    await host.wait("engine-0")
    assert not path.exists() and not other.exists()


async def test_files_go_although_the_host_was_killed(
    tmp_path: Path, python: PythonSpec, shm: Callable[[str], Path]
) -> None:
    path, ready = shm("sem."), tmp_path / "ready"
    async with EngineHost.start(tmp_path / "logs") as host:
        await host.spawn(python("engine-0", CHILD_HOLDS, str(ready), str(path)))
        await eventually(ready.exists)
        assert path.exists()
        os.kill(host.pid, signal.SIGKILL)
        await eventually(lambda: not path.exists())


SEMAPHORES = """
import multiprocessing, signal, sys
context = multiprocessing.get_context("spawn")  # their names stay until somebody unlinks them
held = [context.Semaphore() for _ in range(3)]
open(sys.argv[1], "w").write(" ".join(semaphore._semlock.name for semaphore in held))
signal.pause()
"""


async def test_the_semaphores_of_an_engine_go_with_it(host: EngineHost, python: PythonSpec, tmp_path: Path) -> None:
    told = tmp_path / "names"
    await host.spawn(python("engine-0", SEMAPHORES, str(told)))
    await eventually(lambda: told.exists() and len(told.read_text().split()) == 3)
    paths = [Path("/dev/shm") / f"sem.{name.lstrip('/')}" for name in told.read_text().split()]
    assert all(path.exists() for path in paths)
    await eventually(lambda: {path.name for path in paths} <= mapped_by(pids()))
    await host.kill("engine-0")
    assert not any(path.exists() for path in paths)
