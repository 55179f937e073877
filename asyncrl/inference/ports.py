"""Free ports for engines and router, kept reserved for as long as the job owns them.

Invariants
- No two reservations overlap, within this process or between jobs of this machine, and none overlaps a port that is
  in use: every port is bound while it is chosen, and stays bound (not listening) until `release`.
- A reserved port can still be bound by the server it is meant for: both sides set SO_REUSEADDR, and Linux lets several
  such sockets bind a port while none of them listens.
- Chosen ports lie below the kernel's ephemeral range, so no outgoing connection takes one in between.

One SGLang port begets others (sglang 0.5.23, `PortArgs.init_new`): the torch.distributed rendezvous (`--nccl-port`),
the engine-info server (`--engine-info-bootstrap-port`), and with DP attention eight ports from port + 233 on. They are
reserved together.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ConfigError, EngineError

LOWEST_PORT = 20000
_ATTEMPTS = 512
_DERIVED_DELTA = 233
"""SGLang's ZMQ_TCP_PORT_DELTA."""
_DERIVED_COUNT = 8
"""Rendezvous, five message sockets, load collector, and one spare."""


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

    def __init__(self, seed: int | None = None) -> None:
        self._held: dict[int, socket.socket] = {}
        self._random = random.Random(seed)  # not for secrets: spreads jobs over the range
        self._highest = _ephemeral_low() - 1

    def engine(self) -> EnginePorts:
        """Ports of one more engine; raises EngineError where the machine has no free block left."""
        for _ in range(_ATTEMPTS):
            ports = EnginePorts.from_base(
                self._random.randint(LOWEST_PORT, self._highest - _DERIVED_DELTA - _DERIVED_COUNT)
            )
            if self._reserve(ports.all):
                return ports
        raise EngineError(f"no free ports for an engine between {LOWEST_PORT} and {self._highest}; end other jobs here")

    def single(self) -> int:
        """One free port."""
        for _ in range(_ATTEMPTS):
            port = self._random.randint(LOWEST_PORT, self._highest)
            if self._reserve((port,)):
                return port
        raise EngineError(f"no free port between {LOWEST_PORT} and {self._highest}; end other jobs on this machine")

    def given(self, port: int, field: str) -> int:
        """Reserves the port that config field `field` asks for; raises ConfigError where something listens on it."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT counts as free
        try:
            sock.bind(("0.0.0.0", port))
        except OSError as error:
            sock.close()
            raise ConfigError(
                f"{field}: port {port} is taken ({error.strerror}); choose another, or leave {field} out for a free one"
            ) from error
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


def _ephemeral_low() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
