"""Real engines and their router listen on the ports that were reserved for them and on the kernel's own choice."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from asyncrl.data.fleet import EngineState
from tests.system.conftest import RealFleet, started_fleet

pytestmark = pytest.mark.system

GIVEN = ("--port", "--nccl-port", "--engine-info-bootstrap-port", "--prometheus-port")


def listening(host_pid: int) -> dict[tuple[int, ...], list[int]]:
    """Ports on which the descendants of the engine host listen, by those that their server was given."""
    found: dict[tuple[int, ...], list[int]] = {}
    for process in psutil.Process(host_pid).children(recursive=True):
        ports = {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        if ports:
            found.setdefault(given(server_of(process)), []).extend(ports)
    return found


def server_of(process: psutil.Process) -> psutil.Process:
    """The process with the command line: an engine's workers carry none."""
    return next(p for p in (process, *process.parents()) if "--port" in p.cmdline())


def given(server: psutil.Process) -> tuple[int, ...]:
    words = server.cmdline()
    return tuple(int(words[words.index(flag) + 1]) for flag in GIVEN if flag in words)


def check_ports(fleet: RealFleet, engines: int) -> None:
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    servers = listening(fleet.host.pid)
    assert len(servers) == engines + 1
    everything = [port for ports in servers.values() for port in ports]
    assert len(everything) == len(set(everything))
    for own, ports in servers.items():
        assert [port for port in ports if port not in own and port < ephemeral] == []
        assert own[0] in ports


async def test_an_engine_listens_on_no_port_that_was_not_reserved(serving_fleet: RealFleet) -> None:
    check_ports(serving_fleet, engines=1)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_four_engines_at_once_never_meet(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    async with started_fleet(tiny_models, tmp_path, num_engines=4) as fleet:
        await fleet.publish_from_disk(fleet.models[0])
        assert [status.state for status in fleet.controller.fleet().engines] == [EngineState.SERVING] * 4
        check_ports(fleet, engines=4)
    assert fleet.failures == []
