"""The processes of one engine that the host does not know.

SGLang's server is several processes, and the host waits for the first one. When the scheduler is killed, the first one
goes on answering /ping, and holds its requests, for 6 to 8 s more (measured). So the ends of the others are watched
here.
"""

from __future__ import annotations

import os
from contextlib import suppress

import anyio
import psutil

_TITLE = "sglang::"
"""The titles of SGLang's schedulers and detokenizers begin with it."""


def working_processes(pid: int) -> dict[int, str]:
    """pid → title of the living processes under `pid` without which the engine cannot work."""
    found = {}
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                title = " ".join(child.cmdline()[:1])
                if title.startswith(_TITLE):
                    found[child.pid] = title
    return found


async def first_end(processes: dict[int, str]) -> str:
    """Waits until one of `processes` ends and returns its title and pid; waits for ever if there is none."""
    ended: list[str] = []

    async def watch(pid: int, title: str, scope: anyio.CancelScope) -> None:
        await _end_of(pid)
        ended.append(f"{title} (pid {pid})")
        scope.cancel()

    async with anyio.create_task_group() as task_group:
        for pid, title in processes.items():
            task_group.start_soon(watch, pid, title, task_group.cancel_scope)
        if not processes:
            await anyio.sleep_forever()
    return ended[0]


async def _end_of(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await anyio.wait_readable(descriptor)
    finally:
        anyio.notify_closing(descriptor)
        os.close(descriptor)
