from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import pytest

from asyncrl.errors import ConfigError, EngineError
from asyncrl.host.ports import HIGHEST_PORT, LOWEST_PORT, PortAllocator, port_range
from asyncrl.inference.engines.ports import OFFSETS, EnginePorts

ENGINES = 4
ROUNDS = 200

GRABBER = """
import collections, itertools, socket

def grab(reuse):
    sock = socket.socket()
    if reuse:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    client = socket.create_connection(sock.getsockname())
    return sock, client

held = collections.deque()
for grabbed in itertools.count(1):
    held.append(grab(grabbed % 2 == 0))
    if len(held) > 400:
        for sock in held.popleft():
            sock.close()
    if grabbed % 400 == 0:
        print(grabbed, flush=True)
"""
"""Takes whatever ports the kernel gives, for listeners with and without SO_REUSEADDR and for connections, and keeps
800 of them. A line tells of 400 pairs more."""


@pytest.fixture
def allocator() -> Iterator[PortAllocator]:
    allocator = PortAllocator()
    yield allocator
    allocator.close()


@contextmanager
def grabber() -> Iterator[IO[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", GRABBER], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process.stdout
        assert process.poll() is None, "it ended by itself"
    finally:
        process.kill()
        process.communicate()


def serve(port: int) -> socket.socket:
    """Listens as uvicorn, tokio and libuv do: with SO_REUSEADDR."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen()
    return sock


def engine_ports(allocator: PortAllocator) -> list[int]:
    """All that one engine may bind."""
    base = allocator.reserve(OFFSETS)
    return [base + offset for offset in OFFSETS]


def assert_reserved(port: int) -> None:
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("0.0.0.0", port))


def bind_everything() -> None:
    """One round: a router and its engines bind all that was reserved for them, and once more after a restart."""
    allocator = PortAllocator()
    reserved = [port for _ in range(ENGINES) for port in engine_ports(allocator)]
    reserved += [allocator.reserve() for _ in range(2)]
    assert len(set(reserved)) == len(reserved) == 11 * ENGINES + 2
    for _ in range(2):
        with ExitStack() as servers:
            for port in reserved:
                servers.enter_context(serve(port))
    allocator.close()


def test_four_engines_can_bind_all_their_ports_in_two_hundred_rounds() -> None:
    for _ in range(ROUNDS):
        bind_everything()


@pytest.mark.parametrize("ports", [None, range(34000, 60000)], ids=["outside", "inside the ephemeral range"])
def test_another_process_that_grabs_ports_all_the_time_gets_none_that_is_reserved(ports: range | None) -> None:
    # Were they chosen and not held, about 16 of these would be among the 800 that are grabbed at the end.
    allocators = [PortAllocator(ports=ports) for _ in range(12)]
    reserved = [port for allocator in allocators for _ in range(ENGINES) for port in engine_ports(allocator)]
    with grabber() as lines:
        for _ in range(20):
            assert lines.readline()
        for port in reserved:
            serve(port).close()
    for allocator in allocators:
        allocator.close()


@pytest.mark.parametrize(
    ("ephemeral", "expected"),
    [
        (range(32768, 61000), range(LOWEST_PORT, 32768)),
        (range(1024, 65536), range(LOWEST_PORT, HIGHEST_PORT + 1)),
        (range(10000, 40000), range(40000, HIGHEST_PORT + 1)),
        (range(21000, 65000), range(LOWEST_PORT, HIGHEST_PORT + 1)),
        (range(1024, 5000), range(LOWEST_PORT, HIGHEST_PORT + 1)),
    ],
)
def test_ports_are_chosen_where_the_kernel_does_not(ephemeral: range, expected: range) -> None:
    assert port_range(ephemeral) == expected


def test_a_machine_without_free_ports_is_an_error_that_says_where(allocator: PortAllocator) -> None:
    port = allocator.reserve()
    crowded = PortAllocator(ports=range(port, port + 1))
    with pytest.raises(EngineError, match=rf"no free port in {port} to {port}"):
        crowded.reserve()
    with pytest.raises(EngineError, match=rf"no free block of 11 ports in {port} to {port}"):
        crowded.reserve(OFFSETS)


def test_a_reserved_port_is_refused_to_other_jobs(allocator: PortAllocator) -> None:
    assert_reserved(allocator.reserve())


def test_two_allocators_that_draw_alike_never_overlap() -> None:
    one, two = PortAllocator(seed=7), PortAllocator(seed=7)
    mine = {port for _ in range(10) for port in engine_ports(one)}
    theirs = {port for _ in range(10) for port in engine_ports(two)}
    assert not mine & theirs
    one.close()
    two.close()


def test_a_port_that_is_taken_is_named_with_its_field(allocator: PortAllocator) -> None:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    port = server.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"router\.port: port {port} is taken .* leave router\.port out"):
        allocator.reserve_given(port, "router.port")
    server.close()
    allocator.reserve_given(port, "router.port")
    assert_reserved(port)


def test_a_port_that_another_job_reserved_is_taken_though_nobody_listens_yet(allocator: PortAllocator) -> None:
    port = allocator.reserve()
    other = PortAllocator()
    with pytest.raises(ConfigError, match=rf"router\.port: port {port} is taken \(another job reserved it\)"):
        other.reserve_given(port, "router.port")
    allocator.release((port,))
    other.reserve_given(port, "router.port")
    assert_reserved(port)
    other.close()


def test_a_given_port_may_have_connections_that_are_still_dying(allocator: PortAllocator) -> None:
    port = allocator.reserve()
    with serve(port) as server, socket.create_connection(("127.0.0.1", port)) as client:
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first keeps TIME_WAIT
        assert client.recv(1) == b""
    allocator.release((port,))
    assert_reserved(port)  # though nobody holds it
    allocator.reserve_given(port, "router.port")


def test_closing_frees_every_port(allocator: PortAllocator) -> None:
    ports = engine_ports(allocator)
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
    # Rendezvous at port + 233, then six derived ones.
    assert set(range(233, 240)) <= set(OFFSETS)
    ports = EnginePorts.from_base(21000)
    assert {ports.http, ports.nccl, ports.bootstrap} == {21000 + offset for offset in OFFSETS[:3]}
