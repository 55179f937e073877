"""An external engine has one owner: the job that opened its owner session and put its name into the version stamp.

Invariants
- A job does nothing to an engine before it has claimed it, and a claim refuses an engine whose owner lives.
- Opening the session is atomic in the engine, so of two jobs that come at once one is refused.
- The owner lives as long as its run directory is locked. A job on another machine cannot be asked, and counts as alive.
- What a job claimed it gives back at its end. After a kill -9 the mark stays, and the next job on that machine, or the
  next attempt of that run, takes the engine over.
"""

from __future__ import annotations

import socket
from pathlib import Path

import anyio
import anyio.to_thread

from asyncrl.errors import EngineError, RunDirectoryError
from asyncrl.inference.sglang.engine_api import EngineApi
from asyncrl.run_directory import holder

SESSION = "asyncrl-owner"
_STAMP_WAIT_S = 2.0
"""From another job's session to its name in the stamp: milliseconds."""
_POLL_S = 0.1


async def claim(client: EngineApi, owner: str, step_s: float) -> None:
    """Makes `owner` the engine's owner; raises EngineError that names the other job where there is one."""
    opened = await client.open_session(SESSION, step_s)
    other = await client.owner(step_s)
    with anyio.move_on_after(0.0 if opened else _STAMP_WAIT_S):
        while other is None:
            await anyio.sleep(_POLL_S)
            other = await client.owner(step_s)
    if other is not None and other != owner and await anyio.to_thread.run_sync(is_alive, other):
        if opened:
            await client.close_session(SESSION, step_s)
        raise EngineError(_taken(client, other))
    await client.set_version("claimed", step_s)


async def give_back(client: EngineApi, step_s: float) -> None:
    """Takes the job's name off an engine that it owns."""
    await client.disown(step_s)
    await client.close_session(SESSION, step_s)


def is_alive(owner: str) -> bool:
    """Whether the job of that name may still run."""
    host, _, run_dir = owner.partition(":")
    if host != socket.gethostname():
        return True
    try:
        return holder(Path(run_dir)) is not None
    except (RunDirectoryError, OSError):
        return False


def _taken(client: EngineApi, other: str) -> str:
    host, _, run_dir = other.partition(":")
    return (
        f"{client.engine_id}: {client.url} belongs to the job in {run_dir} on {host}, and two jobs would train on each "
        f"other's weights. Stop that job, or take the engine out of engine.external. If it has ended: curl {client.url}"
        '/update_weight_version -d \'{"new_version": "free", "abort_all_requests": false}\' -H '
        "'Content-Type: application/json'"
    )
