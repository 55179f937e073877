"""The statistics of the executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.rollout.requests.generate_client import ClientStatistics
from asyncrl.rollout.scheduling.group import GroupState


@dataclass(frozen=True, slots=True)
class ExecutorStatistics:
    """A snapshot."""

    groups: Mapping[GroupState, int]
    """Groups by state, over the whole attempt."""
    drop_reasons: Mapping[str, int]
    client: ClientStatistics
    aborted_requests: int
    """Requests that were ended in their engines because no sample needed them any more."""
    concurrency: int
    """Most requests in flight, as of now."""
    engines_paused_s: float
    """Seconds in which the deadlines of requests stood still."""
    reward_failures: Mapping[str, int]
    dropped_overlong: int
    """Prompts left out of the data because they leave no room for a response."""
