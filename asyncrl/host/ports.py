"""Free ports of this machine, reserved for as long as the job owns them.

Invariants
- No two reservations overlap, within this process or between jobs of this machine, and none overlaps a port in use.
  Every port is bound while it is chosen, and stays bound (not listening) until `release`. So between the choice and the
  server's own bind, nobody else can be handed the port.
- The server that a port is reserved for can still bind it. Both sides set SO_REUSEADDR, and Linux lets several such
  sockets bind a port while none of them listens. So a server that is started again finds its ports too.
- Chosen ports lie outside the kernel's ephemeral range where that leaves room. Where it does not, the reservation is
  enough: the kernel hands out no port that is bound.

One case stays open: a stranger that asks for this very number and sets SO_REUSEADDR. The job's server then ends at its
start with the number in its log, and is started again as often as its restarts allow.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from asyncrl.errors import ConfigError, EngineError

LOWEST_PORT = 20000
HIGHEST_PORT = 65535
_ROOM = 4096
"""Ports that must lie on one side of the ephemeral range for it to be avoided."""
_ATTEMPTS = 512
_LINUX_EPHEMERAL = range(32768, 61000)


def port_range(ephemeral: range) -> range:
    """Ports to choose from on a machine whose kernel hands out those in `ephemeral` by itself."""
    below = range(LOWEST_PORT, min(ephemeral.start, HIGHEST_PORT + 1))
    above = range(max(ephemeral.stop, LOWEST_PORT), HIGHEST_PORT + 1)
    for side in (below, above):
        if len(side) >= _ROOM:
            return side
    return range(LOWEST_PORT, HIGHEST_PORT + 1)


class PortAllocator:
    """Hands out reserved ports; `close` gives all back."""

    def __init__(self, seed: int | None = None, ports: range | None = None) -> None:
        """Chooses among `ports`; None avoids the kernel's ephemeral range."""
        self._held: dict[int, socket.socket] = {}
        self._random = random.Random(seed)  # not for secrets: spreads jobs over the range
        self._ports = port_range(_ephemeral()) if ports is None else ports

    def reserve(self, offsets: Sequence[int] = (0,)) -> int:
        """Reserves free ports at `offsets` from the returned base. Raises EngineError where none are left."""
        bases = range(self._ports.start, self._ports.stop - max(offsets))
        for _ in range(_ATTEMPTS if bases else 0):
            base = self._random.choice(bases)
            if self._reserve([base + offset for offset in offsets]):
                return base
        wanted = "port" if len(offsets) == 1 else f"block of {len(offsets)} ports"
        raise EngineError(f"no free {wanted} in {self._ports[0]} to {self._ports[-1]}; end other jobs on this machine")

    def reserve_given(self, port: int, field: str) -> None:
        """Reserves the port that the setting `field` asks for; raises ConfigError where somebody else has it."""
        if self._reserve((port,)):
            return
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT counts as free
        try:
            sock.bind(("0.0.0.0", port))
            # It was not free, though the kernel lists no connection: another job keeps it reserved.
            reason = None if _has_connections(port) else "another job reserved it"
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            sock.close()
            raise ConfigError(
                f"{field}: port {port} is taken ({reason}); choose another, or leave {field} out for a free one"
            )
        self._held[port] = sock

    def release(self, ports: Iterable[int]) -> None:
        """Gives ports back; ports that are not reserved are passed over."""
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


def _has_connections(port: int) -> bool:
    """Whether the kernel lists a connection of this port, dying ones included. A socket that is only bound has none."""
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
