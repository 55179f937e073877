"""Events of the rollout side: the transitions of each prompt group, and failures on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.observability.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdmitted(Event):
    """A prompt was drawn and will be sampled."""

    kind: ClassVar[str] = "group_admitted"
    group_id: str
    prompt_id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRunning(Event):
    """The group's first request is under way."""

    kind: ClassVar[str] = "group_running"
    group_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFinished(Event):
    """All samples of the group ended; enough of them are usable."""

    kind: ClassVar[str] = "group_finished"
    group_id: str
    usable: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsDelivered(Event):
    """The groups were handed to the trainer as one batch."""

    kind: ClassVar[str] = "groups_delivered"
    rollout_id: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsTrained(Event):
    """The trainer committed the batch."""

    kind: ClassVar[str] = "groups_trained"
    rollout_id: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsRestored(Event):
    """A resumed job has these groups; they were finished and not trained when its checkpoint was written."""

    kind: ClassVar[str] = "groups_restored"
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsRolledBack(Event):
    """A resumed job goes on from `step`, and these groups were trained, filtered or dropped after it: that is undone.

    They are admitted again, or restored, and end once more.
    """

    kind: ClassVar[str] = "groups_rolled_back"
    step: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFiltered(Event):
    """A filter took the group out."""

    kind: ClassVar[str] = "group_filtered"
    group_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDropped(Event):
    """The group ended without being trained."""

    kind: ClassVar[str] = "group_dropped"
    group_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed(Event):
    """One attempt of a generation request failed; `retried` says whether another follows."""

    kind: ClassVar[str] = "request_failed"
    sample_id: str
    request_attempt: int
    failure: str
    detail: str
    engine: str
    """Id of the engine that answered; empty where it is not known."""
    retried: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsAborted(Event):
    """Requests that no sample needs any more were to be ended in the engines."""

    kind: ClassVar[str] = "requests_aborted"
    requests: int
    engines: int
    """Engines that the router knows."""
    heard: int
    """Engines that took all ids."""
    reasons: dict[str, int]
    """Number of requests by the reason why they were given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyLowered(Event):
    """Engines have more requests than they can hold, so fewer are in flight from now on."""

    kind: ClassVar[str] = "concurrency_lowered"
    limit: int
    previous: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailed(Event):
    """A sample could not be scored and is left out."""

    kind: ClassVar[str] = "reward_failed"
    sample_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Event):
    """An evaluation ended, or was skipped for a reason."""

    kind: ClassVar[str] = "evaluated"
    executor: str = ""
    """Name of the executor; empty for the one without a name."""
    rollout_id: int
    accuracy: float | None
    mean_reward: float | None = None
    num_samples: int
    seconds: float
    versions: tuple[str, ...] = ()
    """The weights that were evaluated."""
    skipped: str | None
