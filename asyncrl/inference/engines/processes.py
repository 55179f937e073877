"""The processes of one engine that the host does not know.

SGLang's server is several processes, and the host waits for the first one. When the scheduler is killed, the first one
goes on answering /ping, and holds its requests, for 6 to 8 s more (measured). So the ends of the others are watched
here.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial

import anyio
import psutil

from asyncrl.tasks import first_of

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
    ended = ""

    async def watch(pid: int, title: str) -> None:
        nonlocal ended
        await _end_of(pid)
        ended = f"{title} (pid {pid})"

    await first_of(anyio.sleep_forever, *(partial(watch, pid, title) for pid, title in processes.items()))
    return ended


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
