from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import RunDirectoryError
from asyncrl.observability.line_file import UNREADABLE, LineFile, encode_line, read_lines


def test_a_line_cut_by_a_full_disk_does_not_damage_the_next(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    file = LineFile(path)
    assert file.append(encode_line({"n": 1}))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12, hard))  # only a part of the second line fits: a real short write
    try:
        assert not file.append(encode_line({"n": 2}))
        assert not file.append(encode_line({"n": 3}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b'{"n":1}\n{"n"'
    assert file.append(encode_line({"n": 4}))
    file.close()
    assert list(read_lines(path)) == [{"n": 1}, {"kind": UNREADABLE, "line": 2, "text": '{"n"'}, {"n": 4}]
    assert file.lost == 2


def test_a_full_disk_is_counted_and_does_not_raise() -> None:
    file = LineFile(Path("/dev/full"))
    assert not file.append(b"{}\n")
    assert file.lost == 1
    assert file.last_error is not None and "space" in str(file.last_error)


def test_a_line_torn_by_a_killed_writer_is_closed_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2, "te')
    assert list(read_lines(path)) == [{"n": 1}]
    LineFile(path).append(encode_line({"n": 3}))
    assert [line.get("n") for line in read_lines(path)] == [1, None, 3]


def test_what_was_appended_survives_a_kill_of_its_process(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    code = (
        "import os, sys; from pathlib import Path; from asyncrl.observability.line_file import LineFile\n"
        "LineFile(Path(sys.argv[1])).append(b'{\"n\":1}\\n'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -signal.SIGKILL
    assert list(read_lines(path)) == [{"n": 1}]


def test_lines_of_many_threads_stay_whole(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "log.jsonl")

    def write(thread: int) -> None:
        for i in range(200):
            file.append(encode_line({"thread": thread, "i": i, "text": "x" * 300}))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = list(read_lines(file.path))
    assert sorted((line["thread"], line["i"]) for line in lines) == [(t, i) for t in range(8) for i in range(200)]


def test_a_named_pipe_nobody_reads_costs_lines_not_time(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    file = LineFile(path)
    for _ in range(1000):
        file.append(b"x" * 1000 + b"\n")
    assert file.lost > 900


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"missing/log.jsonl: cannot be written \(No such file"):
        LineFile(tmp_path / "missing" / "log.jsonl")


def test_appending_after_close_is_counted(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "log.jsonl")
    file.close()
    file.close()
    assert not file.append(b"{}\n")
    assert file.lost == 1


@pytest.mark.parametrize("text", [b"[1]\n", b"nonsense\n", b"\xff\xfe\n", b"17\n", b"null\n"])
def test_damage_is_shown_in_its_place(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":1}\n' + text + b'{"n":2}\n')
    first, damaged, last = read_lines(path)
    assert (first["n"], damaged["kind"], damaged["line"], last["n"]) == (1, UNREADABLE, 2, 2)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_every_record_is_one_line_that_reads_back(record: dict[str, Any]) -> None:
    line = encode_line(record)
    assert line.count(b"\n") == 1
    assert json.loads(line) == record


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (np.float32(1.5), 1.5),
        (np.int64(3), 3),
        (float("nan"), None),
        (float("-inf"), None),
        (Path("/a"), "/a"),
        ("tail \udc80", "tail \\udc80"),
        (["tail \udc80", np.float64(2)], ["tail \\udc80", 2.0]),
        (np.arange(2), "[0 1]"),
    ],
)
def test_foreign_values_are_encoded(value: object, read: object) -> None:
    assert json.loads(encode_line({"value": value})) == {"value": read}


def test_nan_beside_a_surrogate_is_null_too() -> None:
    assert json.loads(encode_line({"a": float("nan"), "b": "\udc80"})) == {"a": None, "b": "\\udc80"}
