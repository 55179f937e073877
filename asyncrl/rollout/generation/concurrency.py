"""How many requests are in flight, by the load of the engines: additive increase, multiplicative decrease.

An engine that has more requests than it has slots or memory for queues them, or takes their KV away and computes it
again. Neither yields a token; requests then grow stale in a queue, and deadlines run. `ConcurrencyPolicy` and
`LoadMeter` are pure; `look` reads the figures of the engines, and applies the one and tells the other.

Invariants
- The limit stays within [least, most], whatever engines report.
- The limit falls only while some engine is overloaded, and rises only while it holds requests back. It does not change
  while more requests are in flight than it allows: lowering it ends no request, so the engines look overloaded until
  enough requests have ended.
- Figures of engines that are paused are ignored, and the limit ignores those of engines that were a moment ago: an
  update of the weights queues all requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import anyio

from asyncrl.rollout.generation.slots import Slots
from asyncrl.rollout.group_events import ConcurrencyLowered
from asyncrl.rollout.requests.engine_clock import EngineClock
from asyncrl.rollout.requests.engine_queries import EngineLoad, EngineQueries

INTERVAL_S = 2.0
"""Between two looks: engines have new figures every dozen decoding steps, and must not be judged by the same twice."""


@dataclass(frozen=True, slots=True)
class ConcurrencyPolicy:
    """See the module's docstring."""

    least: int
    most: int
    increase: float = 0.05
    """Fraction of `most` that is added at each look which finds the limit in use and no engine overloaded (at least
    1)."""
    decrease: float = 0.8
    """Factor at each look that finds an engine overloaded."""
    queued: float = 0.1
    """An engine whose queue is longer than this fraction of the requests that it runs is overloaded."""
    few: int = 4
    """A queue of at most so many requests is no overload: they are the next to run."""
    token_usage: float = 0.95
    """An engine whose KV pool is in use to this fraction is overloaded."""

    def after(self, limit: int, in_flight: int, loads: Sequence[EngineLoad]) -> tuple[int, str | None]:
        """The new limit, and the overload for which it is lowered, or None. `in_flight`: requests as of now."""
        if in_flight > limit:
            return limit, None
        reason = next((reason for load in loads if (reason := self.overload(load)) is not None), None)
        if reason is not None:
            # Where less is in flight than allowed, that is what was too much.
            return max(int(max(in_flight, 1) * self.decrease), self.least), reason
        if not loads or in_flight < limit:
            return limit, None
        return min(limit + max(1, int(self.most * self.increase)), self.most), None

    def overload(self, load: EngineLoad) -> str | None:
        """Why this engine has too many requests, or None."""
        if load.waiting > max(self.few, self.queued * load.running):
            return f"{load.waiting} requests are queued behind {load.running}"
        if load.token_usage >= self.token_usage and load.running > 1:
            return f"{load.token_usage:.0%} of the KV pool are in use by {load.running} requests"
        return None


class LoadMeter:
    """The load of the engines between two deliveries."""

    def __init__(self) -> None:
        """Nobody has looked."""
        self._seen: list[EngineLoad] = []
        self._taken = False

    def add(self, loads: Sequence[EngineLoad]) -> None:
        """The engines at one look."""
        if self._taken and loads:
            self._seen, self._taken = [], False
        self._seen += loads

    def take(self) -> dict[str, float]:
        """Figures by name (of `RolloutMetrics`) over the looks since the last call; where there was none since, over
        those before it; empty before the first look."""
        self._taken = True
        seen = self._seen
        if not seen:
            return {}
        return {
            "engine_running_mean": sum(load.running for load in seen) / len(seen),
            "engine_queue_mean": sum(load.waiting for load in seen) / len(seen),
            "engine_queue_max": max(load.waiting for load in seen),
            "engine_kv_use_max": max(load.token_usage for load in seen),
        }


async def look(
    engines: EngineQueries,
    clock: EngineClock,
    meter: LoadMeter,
    slots: Slots,
    policy: ConcurrencyPolicy | None,
    *,
    most: Callable[[int], int],
    on_lowered: Callable[[ConcurrencyLowered], None],
) -> None:
    """Looks at the engines until cancelled: tells `meter`, and keeps the limit of `slots`.

    It is `most` of the number of engines that the router names: engines may come and go while a job runs. Below that it
    is as `policy` says, where there is one.
    """
    while True:
        pauses = clock.pauses
        await anyio.sleep(INTERVAL_S)
        if clock.paused:
            continue
        loads = await engines.loads()
        if not clock.paused:
            meter.add(loads)
        if clock.pauses != pauses or not engines.known:
            continue
        together, before = most(engines.known), slots.limit
        if policy is None:
            slots.limit = together
            continue
        current = replace(policy, least=min(policy.least, together), most=together)
        slots.limit, reason = current.after(min(before, together), slots.in_use, loads)
        if reason is not None and slots.limit < before:
            on_lowered(ConcurrencyLowered(limit=slots.limit, previous=before, reason=reason))
