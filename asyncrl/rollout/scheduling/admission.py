"""Admission: which group may begin, and which finished groups make up the next batch. Pure: no I/O, no clock.

Unit: batches. Let j be the step whose batch is taken next, t the step whose weights are published, B the groups of a
batch, s how many steps old a token may be when its batch is trained (`Bound.batches` in data/staleness.py), and O the
over-sampling allowance.

- *Admit* a group iff consumed + live < (t + s + 1)·B + O. Live is what was admitted and neither taken nor removed, so a
  group that is filtered or dropped frees its place at once.
- *Deadline* of a group: the step of the weights that made its oldest token, plus s. Until it is finished that step is
  not known; the one published when it was started (t, while it has not) is a lower bound.
- *Take* for step j the B finished groups of earliest deadline, provided that of what stays live at most
  (k - j)·B have a deadline <= k, for every k >= j; otherwise wait for the unfinished ones among those.

Invariants
- No group is taken after its deadline.
- There is always something to wait for, or a batch: at most (k + 1)·B unfiltered groups are ever admitted with a
  deadline <= k, since that takes t <= k - s; each batch that keeps the rule for every k leaves a state from which the
  next one can. Without this look-ahead it fails at s = 2: two batches of young groups can leave more than B that all
  must be trained in the same step (tests/rollout/scheduling/test_admission.py shows it).

The allowance O loosens the rule for k > j by O groups, because up to O can still be dropped: what would have to be in
batch j and finds no place is dropped as surplus; where s lets it live on, it stays for a later batch. With
`straggler = "reissue"` an unfinished group never holds up a batch that could be had without it: it is dropped, to be
issued again.

All queries cost O(s) but for the choice of a batch, which sorts the finished groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

_NEVER = 1 << 60
"""Deadline of what is made by weights without a version: such weights never change."""
_NAMED = 3
"""Groups that a `Waiting` names."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The constants of the rule."""

    batch: int
    """B: groups of one batch."""
    staleness: int
    """s: steps between the weights that made a token and the step that trains it, at most."""
    oversample: int = 0
    """O: groups that may be live beyond what batches need, so that filters leave enough."""
    straggler: Literal["wait", "reissue"] = "wait"


@dataclass(frozen=True, slots=True)
class Batch:
    """What to do for the next step; `Admission.take` does it."""

    groups: tuple[str, ...]
    """B finished groups, earliest deadline first, then as admitted."""
    surplus: tuple[str, ...] = ()
    """Groups that no batch has room for before their deadline: to be dropped."""
    reissue: tuple[str, ...] = ()
    """Unfinished groups at their deadline: to be dropped, their prompts issued again."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why there is no batch now."""

    missing: int
    """Finished groups that lack for a batch of any kind; 0 when it is the deadline of `groups` that holds it up."""
    groups: tuple[str, ...]
    """The oldest of the unfinished groups that are waited for; some may still have to be admitted."""

    def __str__(self) -> str:
        named = ", ".join(self.groups)
        if self.missing:
            return f"{self.missing} more groups" + (f", the oldest: {named}" if named else "")
        return f"{named}: to be trained now or never"


class Admission:
    """The state of the rule. A group is admitted, started, finished and taken in a batch, or removed on the way."""

    def __init__(self, limits: Limits, *, first: int = 0) -> None:
        """`first` is the step of the first batch: all before it were consumed by earlier attempts of the job."""
        self._limits = limits
        self._step = first
        self._horizon = first
        self._published: int | None = None
        self._open: dict[str, int | None] = {}
        """Deadlines of unfinished groups, as admitted; None until started: then it moves with the published weights."""
        self._done: dict[str, int] = {}
        """Deadlines of finished groups."""
        self._order: dict[str, int] = {}
        """Place of each live group in the order of admission."""
        self._admitted = 0
        self._queued = 0
        self._running: Counter[int] = Counter()
        """Started and unfinished groups by deadline."""
        self._finished: Counter[int] = Counter()
        """Finished groups by deadline."""

    @property
    def step(self) -> int:
        """j: the step whose batch is taken next."""
        return self._step

    @property
    def published(self) -> int | None:
        """t; None while weights have no version, as those that never change: nothing is ever stale then."""
        return self._published

    @property
    def live(self) -> int:
        return len(self._order)

    @property
    def finished(self) -> int:
        """Groups that wait to be taken."""
        return len(self._done)

    @property
    def room(self) -> int:
        """Groups that may be admitted now."""
        limits = self._limits
        newest = self._step if self._published is None else self._published
        batches = min(newest + limits.staleness + 1, self._horizon) - self._step
        return max(0, batches * limits.batch + limits.oversample - self.live) if batches > 0 else 0

    def extend(self, horizon: int) -> None:
        """Batches of steps below `horizon` will be wanted; nothing is admitted for later ones."""
        self._horizon = max(self._horizon, horizon)

    def publish(self, step: int) -> None:
        """The engines hold the weights of `step` trained steps now."""
        self._published = step

    def admit(self, group_id: str) -> None:
        """Where there is `room`."""
        self._open[group_id] = None
        self._order[group_id] = self._admitted
        self._admitted += 1
        self._queued += 1

    def start(self, group_id: str) -> None:
        """Its first request is under way, with the published weights or newer ones."""
        self._open[group_id] = deadline = self._newest_deadline
        self._queued -= 1
        self._running[deadline] += 1

    def finish(self, group_id: str, oldest: int | None) -> bool:
        """All of it is there; `oldest` is the step of the weights that made its oldest token, None if they have none.

        Returns False when no batch to come may train it any more: remove it.
        """
        deadline = self._open.pop(group_id)
        assert deadline is not None, "finished before it was started"
        self._running[deadline] -= 1
        if self._published is not None and oldest is not None:
            deadline = oldest + self._limits.staleness
        self._done[group_id] = deadline
        self._finished[deadline] += 1
        return deadline >= self._step

    def restore(self, group_id: str, oldest: int | None) -> bool:
        """An earlier attempt of the job finished it; arguments and result as of `finish`."""
        self._order[group_id] = self._admitted
        self._admitted += 1
        self._done[group_id] = deadline = _NEVER if oldest is None else oldest + self._limits.staleness
        self._finished[deadline] += 1
        return deadline >= self._step

    def without_place(self) -> tuple[str, ...]:
        """Restored groups that no batch has room for before their deadline, the allowance included: to be removed.

        There are none unless batches or the bound are smaller than in the attempt that saved them.
        """
        limits, placed, left = self._limits, 0, []
        for group_id in self._in_order():
            if placed < (self._done[group_id] - self._step + 1) * limits.batch + limits.oversample:
                placed += 1
            else:
                left.append(group_id)
        return tuple(left)

    def remove(self, group_id: str) -> None:
        """It was filtered or dropped."""
        del self._order[group_id]
        if group_id in self._done:
            self._finished[self._done.pop(group_id)] -= 1
        elif (deadline := self._open.pop(group_id)) is None:
            self._queued -= 1
        else:
            self._running[deadline] -= 1

    def impossible(self) -> str | None:
        """Why no batch can come before newer weights are published, or None."""
        if self._published is None or self._published + self._limits.staleness >= self._step:
            return None
        return (
            f"the batch of step {self._step} may be made by weights of step {self._step} - {self._limits.staleness} = "
            f"{self._step - self._limits.staleness} or newer, and those of step {self._published} are published"
        )

    def next_batch(self) -> Batch | Waiting:
        """The batch of `step`, or what it waits for. Changes nothing."""
        missing = self._limits.batch - len(self._done)
        if missing > 0:
            return Waiting(missing, tuple(islice(self._unfinished(_NEVER), _NAMED)))
        over = list(self._over())
        if not over:
            return Batch(tuple(self._in_order()[: self._limits.batch]))
        return self._without_late(over)

    def take(self, batch: Batch) -> None:
        """The groups of `batch` were handed over, and what it drops was dropped; the next step is wanted now."""
        for group_id in (*batch.groups, *batch.surplus, *batch.reissue):
            self.remove(group_id)
        self._step += 1
        for counts in (self._running, self._finished):
            for deadline in [deadline for deadline, count in counts.items() if not count]:
                del counts[deadline]

    @property
    def _newest_deadline(self) -> int:
        return _NEVER if self._published is None else self._published + self._limits.staleness

    def _over(self) -> Iterator[tuple[int, int]]:
        """(k, n) wherever n groups too many with a deadline <= k would stay after a batch, in order of k."""
        batch, unfinished, finished, queued = self._limits.batch, 0, 0, self._queued
        newest = self._newest_deadline
        for k in sorted({*self._running, *self._finished, newest}):
            unfinished += self._running[k] + (queued if k == newest else 0)
            finished += self._finished[k]
            later = k - self._step
            room = later * batch + self._limits.oversample if later > 0 else 0
            if (excess := unfinished + max(0, finished - batch) - room) > 0:
                yield k, excess

    def _without_late(self, over: list[tuple[int, int]]) -> Batch | Waiting:
        """The batch that drops the `over`, as far as that is allowed; unfinished groups first, the youngest first."""
        limits = self._limits
        dropped: dict[str, bool] = {}
        """Whether to issue it again."""
        finished: list[str] | None = None
        for k, excess in over:
            spare = max(0, limits.oversample - len(dropped)) if k <= self._step else 0
            if limits.straggler == "wait" and excess - len(dropped) > spare:
                late = (group_id for group_id in self._unfinished(k) if group_id not in dropped)
                if named := tuple(islice(late, _NAMED)):
                    return Waiting(0, named)
            finished = finished or self._in_order()
            left = [g for g in finished[limits.batch :] if self._done[g] <= k]
            for group_id in (*reversed(list(self._unfinished(k))), *reversed(left)):
                if len(dropped) >= excess:
                    break
                if group_id not in dropped:
                    # Finished ones beyond O: an engine served weights older than those published. Waiting is no use.
                    dropped[group_id] = spare <= 0 and group_id in self._open
                    spare -= 1
        return Batch(
            tuple((finished or self._in_order())[: limits.batch]),
            surplus=tuple(group_id for group_id, again in dropped.items() if not again),
            reissue=tuple(group_id for group_id, again in dropped.items() if again),
        )

    def _unfinished(self, k: int) -> Iterator[str]:
        """Unfinished groups with a deadline <= k, as admitted."""
        newest = self._newest_deadline
        return (g for g, deadline in self._open.items() if (newest if deadline is None else deadline) <= k)

    def _in_order(self) -> list[str]:
        """Finished groups, earliest deadline first, then as admitted."""
        return sorted(self._done, key=lambda group_id: (self._done[group_id], self._order[group_id]))
