"""A process in the foreground of a terminal ends with its whole tree, and leaves nothing."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

RUN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background of a shell ignores it
from asyncrl.host.foreground import run_in_foreground
from asyncrl.host.process import INHERITED, ProcessSpec
argv, grace_s, scratch = (sys.executable, *sys.argv[3:]), float(sys.argv[1]), sys.argv[2]
sys.exit(run_in_foreground(ProcessSpec("engine", argv, log_path=INHERITED, scratch=scratch), grace_s=grace_s))
"""
CHILD_HOLDS = """
import mmap, os, signal, sys
def hold(path):
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, 16)
    return mmap.mmap(fd, 16)
read, write = os.pipe()
if os.fork() == 0:
    held = hold(sys.argv[1])
    os.write(write, b"1")
    signal.pause()
os.read(read, 1)
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("holds", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    path = Path(f"/dev/shm/psm_asyncrl-test-{secrets.token_hex(6)}")
    yield path
    path.unlink(missing_ok=True)


def started(tmp_path: Path, code: str, *args: str, grace_s: float) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", RUN, str(grace_s), str(tmp_path / "asyncrl-1" / "0"), "-c", code, *args]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize(
    ("signals", "ears", "grace_s", "code", "said"),
    [
        ([signal.SIGINT], "good", 60.0, 130, []),
        ([signal.SIGTERM], "deaf", 0.1, 143, ["asked\n"]),
        ([signal.SIGINT, signal.SIGINT], "deaf", 60.0, 130, ["asked\n"]),
        ([signal.SIGKILL], "deaf", 60.0, -9, []),
    ],
    ids=["ctrl-c", "deaf-to-the-end-of-its-grace", "ctrl-c-twice", "killed"],
)
def test_an_engine_in_the_foreground_leaves_nothing_when_its_main_process_is_stopped(
    tmp_path: Path, shared: Path, signals: list[int], ears: str, grace_s: float, code: int, said: list[str]
) -> None:
    with started(tmp_path, CHILD_HOLDS, str(shared), ears, grace_s=grace_s) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        assert shared.exists() and (tmp_path / "asyncrl-1" / "0").is_dir()
        heard = []
        for signum in signals:
            os.kill(process.pid, signum)
            heard += [line for line in [process.stdout.readline()] if line]  # at the end of the tree it is empty
        assert heard == said and process.stdout.read() == ""
        assert process.wait() == code
    assert not shared.exists() and not (tmp_path / "asyncrl-1").exists()


@pytest.mark.parametrize(("code", "exit_code"), [("raise SystemExit(3)", 3), ("import os; os.abort()", 134)])
def test_an_engine_that_ends_by_itself_gives_its_exit_code(tmp_path: Path, code: str, exit_code: int) -> None:
    with started(tmp_path, code, grace_s=60.0) as process:
        assert process.wait() == exit_code
