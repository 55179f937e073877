from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.inference.ports import EnginePorts, PortAllocator

ENGINES = 4


@pytest.fixture
def allocator():
    allocator = PortAllocator()
    yield allocator
    allocator.close()


def serve(port: int) -> socket.socket:
    """Listens as uvicorn, tokio and libuv do: with SO_REUSEADDR."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen()
    return sock


def test_four_engines_can_bind_all_their_ports_in_two_hundred_rounds() -> None:
    for _ in range(200):
        allocator = PortAllocator()
        ports = [port for _ in range(ENGINES) for port in allocator.engine().all] + [allocator.single()]
        assert len(set(ports)) == len(ports)
        servers = [serve(port) for port in ports]
        for server in servers:
            server.close()
        allocator.close()


def test_a_reserved_port_is_refused_to_other_jobs(allocator: PortAllocator) -> None:
    port = allocator.single()
    other = socket.socket()
    with pytest.raises(OSError):
        other.bind(("0.0.0.0", port))
    other.close()


def test_two_allocators_that_draw_alike_never_overlap() -> None:
    one, two = PortAllocator(seed=7), PortAllocator(seed=7)
    mine = {port for _ in range(10) for port in one.engine().all}
    theirs = {port for _ in range(10) for port in two.engine().all}
    assert not mine & theirs
    one.close()
    two.close()


def test_a_port_that_is_taken_is_named_with_its_field(allocator: PortAllocator) -> None:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    port = server.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"router\.port: port {port} is taken .* leave router\.port out"):
        allocator.given(port, "router.port")
    server.close()
    assert allocator.given(port, "router.port") == port


def test_closing_frees_every_port(allocator: PortAllocator) -> None:
    ports = allocator.engine().all
    allocator.close()
    for port in ports:
        with socket.socket() as sock:
            sock.bind(("0.0.0.0", port))


def test_derived_ports_are_those_of_the_installed_engine() -> None:
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    text = (Path(spec.submodule_search_locations[0]) / "srt" / "server_args.py").read_text(encoding="utf-8")
    assert "ZMQ_TCP_PORT_DELTA = 233" in text
    assert "NUM_DERIVED_PORTS = 6 if not is_rust_server" in text
    ports = EnginePorts.from_base(21000)
    # Rendezvous at port + 233, then six derived ones.
    assert set(range(21233, 21240)) <= set(ports.all)
