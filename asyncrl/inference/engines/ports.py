"""Free ports for engines and router, kept reserved for as long as the job owns them.

Invariants
- No two reservations overlap, within this process or between jobs of this machine, and none overlaps a port that is
  in use: every port is bound while it is chosen, and stays bound (not listening) until `release`. There is no moment
  between the choice and the server's own bind in which somebody could be handed the port.
- A reserved port can still be bound by the server it is meant for: both sides set SO_REUSEADDR, and Linux lets several
  such sockets bind a port while none of them listens. So an engine that restarts finds its ports too.
- Chosen ports lie outside the kernel's ephemeral range where that leaves room. Where it does not, the reservation is
  enough: the kernel hands out no port that is bound.

What a reservation cannot stop is a stranger that asks for this very number and sets SO_REUSEADDR. The server then ends
at its start with the number in its log, and is started again for as long as its restarts last.

What an engine of sglang 0.5.23 binds, for one node without data parallelism (`PortArgs.init_new` and what calls it):
- `--port`: HTTP, metrics included. `--nccl-port`: the rendezvous of its ranks.
- `--engine-info-bootstrap-port`: only where weights are seeded through a transfer engine; by default 6789 for all.
- from `--port` + 233 on, only with DP attention: another rendezvous and six message sockets. Reserved all the same.
- numbers that it lets the kernel choose, and so never collide: gloo, and a message queue between tensor-parallel ranks.
- Unix sockets in TMPDIR for the messages between tokenizer, scheduler and detokenizer.
Other ports (gRPC, gated launch, disaggregation) have to be asked for, and the configuration refuses them.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ConfigError, EngineError

LOWEST_PORT = 20000
HIGHEST_PORT = 65535
_ROOM = 4096
"""Ports that must lie on one side of the ephemeral range for it to be avoided."""
_ATTEMPTS = 512
_DERIVED_DELTA = 233
"""SGLang's ZMQ_TCP_PORT_DELTA."""
_DERIVED_COUNT = 8
"""Rendezvous, six message sockets of which one is unused, and one spare."""
_LINUX_EPHEMERAL = range(32768, 61000)


def port_range(ephemeral: range) -> range:
    """Ports to choose from, where the kernel hands out those in `ephemeral` by itself."""
    below = range(LOWEST_PORT, min(ephemeral.start, HIGHEST_PORT + 1))
    above = range(max(ephemeral.stop, LOWEST_PORT), HIGHEST_PORT + 1)
    for side in (below, above):
        if len(side) >= _ROOM:
            return side
    return range(LOWEST_PORT, HIGHEST_PORT + 1)


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """The ports of one engine."""

    http: int
    nccl: int
    bootstrap: int

    @property
    def all(self) -> tuple[int, ...]:
        """Every port that the engine may bind, derived ones included."""
        derived = range(self.http + _DERIVED_DELTA, self.http + _DERIVED_DELTA + _DERIVED_COUNT)
        return (self.http, self.nccl, self.bootstrap, *derived)

    @classmethod
    def from_base(cls, base: int) -> EnginePorts:
        return cls(http=base, nccl=base + 1, bootstrap=base + 2)


class PortAllocator:
    """Hands out reserved ports; `close` gives all back."""

    def __init__(self, seed: int | None = None, ports: range | None = None) -> None:
        """`ports`: where to choose; None avoids the kernel's ephemeral range."""
        self._held: dict[int, socket.socket] = {}
        self._random = random.Random(seed)  # not for secrets: spreads jobs over the range
        self._ports = port_range(_ephemeral()) if ports is None else ports

    def engine(self) -> EnginePorts:
        """Ports of one more engine; raises EngineError where the machine has no free block left."""
        bases = self._ports[: -_DERIVED_DELTA - _DERIVED_COUNT]
        for _ in range(_ATTEMPTS):
            ports = EnginePorts.from_base(self._random.choice(bases))
            if self._reserve(ports.all):
                return ports
        raise EngineError(f"no free ports for an engine in {self._where}; end other jobs on this machine")

    def single(self) -> int:
        """One free port."""
        for _ in range(_ATTEMPTS):
            port = self._random.choice(self._ports)
            if self._reserve((port,)):
                return port
        raise EngineError(f"no free port in {self._where}; end other jobs on this machine")

    def given(self, port: int, field: str) -> int:
        """Reserves the port that config field `field` asks for; raises ConfigError where somebody has it."""
        if self._reserve((port,)):
            return port
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT counts as free
        try:
            sock.bind(("0.0.0.0", port))
            # Bound by nobody that the kernel lists: another job keeps it reserved.
            reason = None if _has_connections(port) else "another job reserved it"
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            sock.close()
            raise ConfigError(
                f"{field}: port {port} is taken ({reason}); choose another, or leave {field} out for a free one"
            )
        self._held[port] = sock
        return port

    def release(self, ports: Iterable[int]) -> None:
        for port in ports:
            held = self._held.pop(port, None)
            if held is not None:
                held.close()

    def close(self) -> None:
        """Releases everything; may be called twice."""
        self.release(tuple(self._held))

    @property
    def _where(self) -> str:
        return f"{self._ports[0]} to {self._ports[-1]}"

    def _reserve(self, ports: Iterable[int]) -> bool:
        taken: dict[int, socket.socket] = {}
        for port in ports:
            sock = _bind_exclusively(port)
            if sock is None:
                for held in taken.values():
                    held.close()
                return False
            taken[port] = sock
        self._held |= taken
        return True


def _bind_exclusively(port: int) -> socket.socket | None:
    """A socket bound to `port` on every IPv4 address if nobody else has bound it, even without listening; else None."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind(("0.0.0.0", port))
    except OSError:
        sock.close()
        return None
    # Set only now: at bind time it would have let us share another job's reservation.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock


def _has_connections(port: int) -> bool:
    """Whether the kernel lists a connection of this port, dying ones included; a socket that is only bound is none."""
    suffix = f":{port:04X}"
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        if any(row.split()[1].endswith(suffix) for row in rows):
            return True
    return False


def _ephemeral() -> range:
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return _LINUX_EPHEMERAL
    return range(low, high + 1)
