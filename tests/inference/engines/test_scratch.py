from __future__ import annotations

import socket
from pathlib import Path

from asyncrl.inference.engines.scratch import Scratch


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
        scratch.next().mkdir()
        sock.bind(str(scratch.path / "0" / "tmp12345678"))
    scratch.remove()
    assert not scratch.path.exists()
