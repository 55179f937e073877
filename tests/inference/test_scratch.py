from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path

from asyncrl.inference.scratch import Scratch, mapped_files, unlink

CHILD = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
held = mmap.mmap(fd, 16)
print("mapped", flush=True)
sys.stdin.read()
"""


def test_files_that_a_process_tree_has_mapped_are_found_and_removed() -> None:
    path = Path(f"/dev/shm/asyncrl-test-{os.getpid()}")
    path.write_bytes(bytes(16))
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "mapped\n"
        assert path in mapped_files(os.getpid())
        assert mapped_files(child.pid) == {path}
        child.stdin.close()
    assert mapped_files(child.pid) == frozenset()
    unlink(frozenset({path}))
    assert not path.exists()
    unlink(frozenset({path}))


def test_a_file_that_is_unlinked_already_is_not_listed() -> None:
    path = Path(f"/dev/shm/asyncrl-test-gone-{os.getpid()}")
    path.write_bytes(bytes(16))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 16):
        path.unlink()
        assert not any("test-gone" in str(found) for found in mapped_files(os.getpid()))


def test_scratch_lies_in_the_run_directory_and_starts_empty(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    scratch.create()
    assert scratch.path == tmp_path / "tmp"
    (scratch.path / "left-by-a-killed-attempt").touch()
    scratch.create()
    assert list(scratch.path.iterdir()) == []
    scratch.remove()
    scratch.remove()
    assert not scratch.path.exists()


def test_a_run_directory_too_deep_for_sockets_gets_its_scratch_elsewhere(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / ("d" * 90))
    scratch.create()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(scratch.path / "tmp12345678"))
    scratch.remove()
    assert not scratch.path.exists()
