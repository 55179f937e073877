"""The beacon by which ranks on rank 0's node know that rank 0 is alive, before any process group exists.

Rank 0 listens on an abstract Unix socket for as long as it lives. A rank connects, learns the process behind the
socket, and watches that process. It does not watch the connection, because a fork of rank 0 would hold it open.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping

from asyncrl.errors import TrainerError


def beacon_name(environ: Mapping[str, str]) -> str:
    """Returns the socket's address, which differs for each user, job and attempt on a node."""
    attempt = ":".join(environ.get(f"TORCHELASTIC_{key}", "") for key in ("RUN_ID", "RESTART_COUNT"))
    return f"\0asyncrl-rank-0:{os.getuid()}:{environ.get('MASTER_PORT', '')}:{attempt}"


def light_beacon(name: str, ranks: int) -> socket.socket:
    """Starts to listen at `name`, for connections of `ranks` ranks. Called by rank 0, which keeps the socket open.

    Raises TrainerError when another process listens there.
    """
    beacon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        beacon.bind(name)
    except OSError as error:
        beacon.close()
        raise TrainerError(
            f"rank 0: another rank 0 with the same MASTER_PORT is alive on this node ({error.strerror}); "
            "give each job a port of its own, or let torchrun choose (--standalone)"
        ) from error
    beacon.listen(ranks)
    return beacon


def watch_rank_zero(beacon: str) -> int | None:
    """Returns a descriptor that becomes readable when rank 0 ends; None if rank 0 does not listen (yet)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(beacon)
            pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return os.pidfd_open(pid) if uid == os.getuid() else None
        except OSError:
            return None
