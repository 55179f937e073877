"""A prompt group: one record of everything that the driver knows about it, from admission to its end. Pure.

Invariant: only the ledger (`ledger.py`) changes `state`, `deadline` and `result`; every other module reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import anyio

from asyncrl.data.prompt_stream import PromptDraw
from asyncrl.data.sample import Prompt, SampleGroup


class GroupState(StrEnum):
    """Where a group stands; `ledger.py` has the transitions."""

    ADMITTED = "admitted"
    """It waits for its first request."""
    RUNNING = "running"
    """Its samples are being generated and scored."""
    FINISHED = "finished"
    """It waits for a batch."""
    DELIVERED = "delivered"
    """Its batch is with the trainer."""
    TRAINED = "trained"
    FILTERED = "filtered"
    DROPPED = "dropped"


ENDS = frozenset({GroupState.TRAINED, GroupState.FILTERED, GroupState.DROPPED})


def group_id_of(ordinal: int, issues: int, executor: str = "") -> str:
    """The id of the group for draw `ordinal` of the prompt stream, issued `issues` times before.

    That of an executor with a name begins with the name and a dash, which no name holds.

    An engine that aborts a request also aborts every request whose id begins with the same characters. In a request id
    the group id is followed by a dot, so no group id may be the beginning of another one up to that dot.
    """
    return (f"{executor}-" if executor else "") + f"{ordinal:08d}" + (f"r{issues}" if issues else "")


def executor_of(group_id: str) -> str:
    """The name of the executor that made the group; empty for the one without a name."""
    return group_id.rpartition("-")[0]


@dataclass(frozen=True, slots=True)
class Issue:
    """One prompt that is to become a group."""

    ordinal: int
    """Number of its draw from the prompt stream."""
    prompt: Prompt
    epoch: int
    issues: int = 0
    """How often the prompt of this draw was issued before."""
    executor: str = ""
    """Name of the executor that drew it."""

    @classmethod
    def of(cls, draw: PromptDraw, issues: int = 0) -> Issue:
        """The issue of a draw that was issued `issues` times before."""
        return cls(draw.ordinal, draw.prompt, draw.epoch, issues, draw.executor)

    @property
    def group_id(self) -> str:
        """The same in every attempt of the job."""
        return group_id_of(self.ordinal, self.issues, self.executor)


@dataclass(slots=True, eq=False)
class Group:
    """The record of one group. Two records are never equal."""

    issue: Issue
    order: int
    """Its number in the order of admission."""
    state: GroupState = GroupState.ADMITTED
    deadline: int | None = None
    """The last step whose batch may train it; None before its first request. Until it is finished, a lower bound."""
    scope: anyio.CancelScope | None = None
    """Cancels the task that makes it; None without such a task."""
    result: SampleGroup | None = None
    """Its samples; None in every state but FINISHED, so that a batch with the trainer is not kept in memory twice."""

    @property
    def group_id(self) -> str:
        """The id of its issue."""
        return self.issue.group_id

    @property
    def ended(self) -> bool:
        """Whether it was trained, filtered or dropped."""
        return self.state in ENDS
