"""What the doctor says of the machine beside its GPUs."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from asyncrl.doctor import machine
from asyncrl.doctor.machine import available_memory, disk, memory, open_files, ports, shared_memory
from asyncrl.host.ports import PortAllocator

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(("free", "level"), [(0, "failed"), (63 * MIB, "failed"), (GIB // 2, "warning"), (GIB, "ok")])
def test_the_shared_memory_that_docker_gives_is_too_little(free: int, level: str) -> None:
    found = shared_memory(8 * GIB, free)
    assert found.level == level and ("--shm-size" in found.mend) == (level != "ok")


def test_limits_disk_and_memory() -> None:
    assert open_files(None).level == open_files(1024).level == "ok"
    assert open_files(256).level == "failed"
    place = Path("/runs")
    assert disk("run directory", place, 10, 10, True, "m").level == "ok"
    assert disk("run directory", place, 9, 10, True, "m").level == "warning"
    assert disk("run directory", place, 10, 0, False, "m").level == "failed"
    assert memory(10, 10).level == "ok" and memory(9, 10).level == "warning"


def test_a_free_port_must_be_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = PortAllocator()
    try:
        assert ports(allocator).level == "ok"

        def refused(*_: object) -> None:
            raise ConnectionRefusedError(111, "Connection refused")

        monkeypatch.setattr(socket, "create_connection", refused)
        found = ports(allocator)
        assert found.level == "failed" and "Connection refused" in found.seen and "lo" in found.mend
    finally:
        allocator.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "no free port" in ports(PortAllocator(ports=range(port, port + 1))).seen


def test_memory_is_what_the_container_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    assert available_memory(tmp_path) == 64 * GIB
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    for limit, available in (("max", 64 * GIB), (f"{8 * GIB}", 7 * GIB), (f"{GIB // 2}", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert available_memory(tmp_path) == available


def test_a_run_directory_that_is_not_there_yet_is_looked_at_where_it_will_be(tmp_path: Path) -> None:
    found = {f.check: f for f in machine.look(tmp_path / "a" / "b", run_bytes=1 << 60, memory_bytes=0, on_gpus=True)}
    assert found["run directory"].level == "warning" and f"{tmp_path}/a/b" in found["run directory"].seen
    assert found["cache"].level in ("ok", "warning") and found["memory"].level == "ok"
