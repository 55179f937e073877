"""Reads data in a thread, and says every few seconds how far that is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

import anyio
import structlog

from asyncrl.data.sources import Progress
from asyncrl.observability.waits import WAITS
from asyncrl.rollout.handover import in_thread
from asyncrl.tasks import first_of

T = TypeVar("T")
log = structlog.get_logger(__name__)

_TELL_EVERY_S = 5.0


async def read_in_thread(read: Callable[[Progress], T], where: str, source: str) -> T:
    """Returns what `read` returns, which runs in a thread and counts its records; a cancelled job does not wait for it.

    `where` is the setting that names the `source`. Raises what `read` raises.
    """
    progress, began = Progress(), time.monotonic()
    results: list[T] = []

    async def reading() -> None:
        results.append(await in_thread(lambda: read(progress)))

    async def telling() -> None:
        while True:
            await anyio.sleep(_TELL_EVERY_S)
            log.info(
                "reading data",
                setting=where,
                records=progress.read,
                prompts=progress.ready,
                seconds=round(time.monotonic() - began),
                source=source,
            )

    with WAITS.register(f"records of {where}", source, math.inf):
        await first_of(reading, telling)
    return results[0]
