"""Finds processes that hang: they live and do not answer. (The host tells of those that exit.)

Invariants
- Only `failures` probes in a row convict; one that succeeds clears the record.
- A probe counts only if its subject was to be probed, and was the same, from its start to its end: a probe that ran
  into a pause, an update, an offload or a restart says nothing.
- Every subject is probed by a task of its own, so that one that hangs delays no other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

import anyio

from asyncrl.config.sections.inference import HealthConfig
from asyncrl.errors import EngineError
from asyncrl.observability.waits import waiting


@dataclass(slots=True)
class HealthMonitoring:
    """The switch for the probes of all engines of a job; routers are probed in any case."""

    paused: bool = False
    """No engine is probed while it is set."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Failed probes in a row of one subject, and the reason of the last one."""

    subject: Hashable = None
    failures: int = 0
    reason: str = ""

    def after(self, before: Hashable, now: Hashable, failure: str | None) -> Suspicion:
        """The record after one probe.

        `before` and `now` identify the subject at the probe's start and end (None: not to be probed); `failure` is
        None when the subject answered.
        """
        if now is None or now != before or failure is None:
            return Suspicion(now)
        return Suspicion(now, self.failures + 1 if self.subject == now else 1, failure)


async def watch_health(
    name: str,
    config: HealthConfig,
    *,
    subject: Callable[[], Hashable],
    probe: Callable[[float], Awaitable[None]],
    convict: Callable[[str], Awaitable[None]],
) -> None:
    """Probes until cancelled; calls `convict` with the reason when the subject counts as hung.

    Args:
        subject: identifies the process and state that stand there now (it changes with each restart and each change
            of state); None while nothing is to be probed.
        probe: makes one probe, given its deadline in seconds; raises EngineError or TimeoutError when it fails.
    """
    suspicion = Suspicion()
    while True:
        await anyio.sleep(config.interval_s)
        before = subject()
        if before is None:
            continue
        failure: str | None = None
        try:
            with waiting("health probe", name, config.timeout_s):
                await probe(config.timeout_s)
        except (EngineError, TimeoutError) as error:
            failure = str(error)
        suspicion = suspicion.after(before, subject(), failure)
        if suspicion.failures >= config.failures:
            suspicion, reason = Suspicion(), suspicion.reason
            await convict(f"{config.failures} health probes in a row failed; the last: {reason}")
